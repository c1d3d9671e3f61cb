"""Ranks that divide the weights, and do not all use the same ones, or step whole matrices."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from ranked import assert_same_but, on_ranks
from ranks import Ranks

from mpframe.training.callbacks.freeze import set_requires_grad
from mpframe.training.trainer import Trainer


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


def freeze_for_a_step(trainer: Trainer, step: int) -> None:
    frozen = [own for name, own in trainer.model.named_parameters() if name.startswith(("1.", "4"))]
    if step < 4:
        set_requires_grad(trainer.optimizer, frozen, requires_grad=step not in (0, 2))


def test_layers_are_frozen_and_trained_again(two: Ranks) -> None:
    """From the start, and later, when they have a state: a block, and one with others after it."""
    options = {"name": "tied", "steps": 5, "before": freeze_for_a_step}
    found = assert_as_ddp(two, "mixed", options)
    for name in ("1.weight", "4.bias"):
        values = [state["weights"][name] for state in found["states"]]
        moved = [not torch.equal(own, other) for own, other in pairwise(values)]
        assert moved[:5] == [False, True, False, True, True], name
