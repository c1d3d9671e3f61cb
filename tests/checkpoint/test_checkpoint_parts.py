"""The parts that ranks wrote become whole tensors again, and nothing else does."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mpframe.checkpoint.folder import all_parts, parts_of
from mpframe.checkpoint.state import put_together
from mpframe.core.errors import CheckpointError

FIVE = torch.arange(10.0).view(5, 2)
PLACE = ("trainer", "weights", "w")


def written(folder: Path, ranks: list[Any]) -> list[Path]:
    paths = [folder / parts_of(rank) for rank in range(len(ranks))]
    for path, parts in zip(paths, ranks, strict=True):
        torch.save(parts, path)
    return paths


def state() -> dict[str, Any]:
    return {"trainer": {"weights": {"w": None, "tied": None}, "optimizer": {0: {"m": None}}}}


def test_the_parts_of_all_ranks_are_the_tensor(tmp_path: Path) -> None:
    """An empty one, too; what several names share is one tensor."""
    ranks = []
    for rows in (FIVE[:3].clone(), FIVE[3:].clone(), FIVE[5:].clone()):
        moment = rows + 1
        other = ("trainer", "weights", "tied")
        ranks.append({PLACE: rows, other: rows, ("trainer", "optimizer", 0, "m"): moment})
    own = state()
    put_together(own, written(tmp_path, ranks))
    weights = own["trainer"]["weights"]
    assert torch.equal(weights["w"], FIVE)
    assert weights["tied"] is weights["w"]
    assert torch.equal(own["trainer"]["optimizer"][0]["m"], FIVE + 1)


def test_the_files_are_in_the_order_of_the_ranks() -> None:
    names = ["state.pt", parts_of(100000), parts_of(2), "parts_1.pt", parts_of(0)]
    assert all_parts(names) == ["parts_00000.pt", "parts_00002.pt", "parts_100000.pt"]


LONG = torch.arange(2.0**16)
HOSTILE: dict[str, list[Any]] = {
    "holds no rank's": [{PLACE: 3}],
    "its tensors overlap": [{("trainer", n): LONG[n:] for n in range(4)}],
    "not parts of its checkpoint": [{PLACE: FIVE}, {}],
    "one holds other tensors": [{}, {PLACE: FIVE}],
    "something in a divided tensor's place": [{("trainer", "weights"): FIVE}],
}


@pytest.mark.parametrize("said", HOSTILE)
def test_parts_that_do_not_fit_are_refused(tmp_path: Path, said: str) -> None:
    with pytest.raises(CheckpointError, match=said) as refused:
        put_together(state(), written(tmp_path, HOSTILE[said]))
    assert str(refused.value).startswith(str(tmp_path))
