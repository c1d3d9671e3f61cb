"""Ranks that divide the weights, and do not all use the same ones, or step whole matrices."""

from typing import Any

import pytest
import torch
from ranked import assert_same_but, on_ranks
from ranks import Ranks


def assert_as_ddp(ranks: Ranks, mode: str, options: dict[str, Any], *but: str) -> Any:
    """Divided weights take the steps of whole ones, bit for bit; what the first rank found."""
    given = {"clip_norm": None, **options}
    (whole, _), (first, second) = (ranks(on_ranks, mode, {**given, "fsdp": f}) for f in (0, 1))
    norms = [[step.pop("grad_norm") for step in own["results"]] for own in (whole, first, second)]
    assert_same_but([whole], [first], "weights", *but)  # Those of ddp are stored in half.
    assert first["results"] == second["results"]
    assert norms[1] == norms[2]
    assert norms[0] == pytest.approx(norms[1], rel=2**-13)
    return first


@pytest.mark.parametrize(("name", "mode"), [("skipping", "amp"), ("net", "mixed")])
def test_a_layer_that_some_ranks_do_not_use_counts_as_zero_there(
    two: Ranks, name: str, mode: str
) -> None:
    found = assert_as_ddp(two, mode, {"name": name, "steps": 6})
    before, after = found["states"][0]["weights"], found["states"][-1]["weights"]
    kept = {key for key, value in before.items() if torch.equal(value, after[key])}
    never = "never" if name == "net" else "blocks.3"
    assert kept >= {key for key in before if never in key}
    assert 0 < len(kept) < len(before)
