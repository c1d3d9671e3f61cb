"""Evidence keeps a batch of any shape, in a file that names no class, bit for bit."""

from collections import UserDict, namedtuple
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mpframe.core.tree import named_tensors
from mpframe.lab.autopsy import evidence
from mpframe.lab.autopsy.evidence import Evidence

Pair = namedtuple("Pair", "left right")
IDS = torch.arange(6).reshape(2, 3)


@dataclass(frozen=True)
class Holder:
    image: Tensor
    target: dict[str, Any]


def saved(folder: Path, *batches: Any) -> Evidence:
    """Written and read again."""
    samples = [[4, 5]] * len(batches)
    step = Evidence(3, "asked", list(batches), samples, 0, 2, {"": 1.0}, {}, "none")
    step = replace(step, updates=2, clips=True)
    return evidence.load(evidence.save(folder, step, {"weight": torch.ones(1)}, "a: 1"))[0]


def same(left: Any, right: Any) -> bool:
    pairs = zip(named_tensors(left), named_tensors(right), strict=True)
    return all(a == b and x.dtype == y.dtype and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tuples_lists_and_dicts_as_they_are(dtype: torch.dtype, tmp_path: Path) -> None:
    images = [torch.randn(3, 4, 5).to(dtype), torch.randn(3, 6, 5).to(dtype)]
    batches = [
        {"input_ids": IDS, "name": ["a", "b"], "share": 0.5, "none": None},
        (images, [{"boxes": torch.zeros(0, 4)}, {"boxes": torch.ones(2, 4)}]),
        ((IDS, (IDS + 1, IDS + 2)), torch.tensor([1, 0])),
        IDS,
    ]
    step = saved(tmp_path, *batches)
    assert step.plain
    assert (step.updates, step.clips) == (2, True)
    assert all(map(same, step.batches, batches))
    assert [type(batch) for batch in step.batches] == [dict, tuple, tuple, Tensor]
    assert {**step.batches[0], "input_ids": 0} == {**batches[0], "input_ids": 0}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "batch",
    [
        Pair(IDS, [IDS]),
        Holder(IDS, {"boxes": IDS + 1}),
        UserDict(input_ids=IDS, inner={"a": IDS}),
        (IDS, [Pair(IDS, "a"), Pair(IDS + 1, "b")]),
    ],
)
def test_a_class_comes_back_by_the_example_of_another_batch(batch: Any, tmp_path: Path) -> None:
    step = saved(tmp_path, batch)
    assert not step.plain
    (plain,) = step.batches
    assert same(plain, batch)
    assert type(plain) in (dict, tuple)
    (restored,) = step.like(batch).batches
    assert type(restored) is type(batch)
    assert same(restored, batch)
    if isinstance(batch, tuple):
        assert [type(item) for item in restored[1]] == [type(item) for item in batch[1]]


def test_an_example_of_another_form_changes_nothing(tmp_path: Path) -> None:
    (batch,) = saved(tmp_path, Pair(IDS, IDS)).like({"left": IDS, "middle": IDS}).batches
    assert type(batch) is dict
    assert list(batch) == ["left", "right"]


def test_what_is_no_tensor_is_kept_as_a_number_or_its_text(tmp_path: Path) -> None:
    batch = {"x": IDS, "file": Path("a.png"), "share": np.float32(0.5), "box": np.arange(4)}
    (kept,) = saved(tmp_path, batch).batches
    assert (kept["file"], kept["share"], kept["box"].tolist()) == ("a.png", 0.5, [0, 1, 2, 3])  # type: ignore[call-overload]


def test_a_view_is_saved_without_what_it_is_a_view_of(tmp_path: Path) -> None:
    whole = torch.zeros(2**20)
    saved(tmp_path, {"x": whole[:2]})
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.pt")) < 2**16


@pytest.mark.parametrize("batch", [1, [[], {"a": 1}]])
def test_a_batch_without_a_tensor_is_no_evidence(batch: Any, tmp_path: Path) -> None:
    with pytest.raises(evidence.CheckpointError, match="not the evidence of a step"):
        saved(tmp_path, batch)
