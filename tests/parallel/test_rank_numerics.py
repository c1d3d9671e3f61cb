"""What `numerics` counts on two ranks is what one process counts of their two halves."""

from dataclasses import asdict
from typing import Any

import pytest
import torch
from rank_training import CPU, assert_same, setup
from ranks import Ranks
from torch import nn

import mpframe.lowbit  # noqa: F401  # Recipes are named.
from mpframe import Precision
from mpframe.core.comm import SINGLE_PROCESS, Comm
from mpframe.core.objective import supervised
from mpframe.lab.product_noise import ProductProbe
from mpframe.lab.ranges import RangeProbe
from mpframe.parallel.launch import init_comm
from mpframe.training.trainer import Trainer


def counted(mode: str, comm: Comm, options: dict[str, Any]) -> dict[str, Any]:
    """The ranges of the first step."""
    trainer, train, _ = setup(mode, comm, options)
    batches = train.epoch(0)
    probe = RangeProbe(trainer, torch.float16)
    trainer.train_step(*(next(batches) for _ in range(options.get("accumulate", 1))))
    ranges = asdict(probe.ranges())
    return {k: torch.from_numpy(v) if hasattr(v, "dtype") else v for k, v in ranges.items()}


def counted_on_ranks(mode: str, options: dict[str, Any]) -> dict[str, Any]:
    with init_comm(None, lambda: CPU, 120) as comm:
        return counted(mode, comm, options)


@pytest.mark.parametrize(
    ("mode", "options"),
    [("amp", {}), ("mixed", {"whole": True, "reduce": "in_backward"})],
)
def test_ranges_are_those_of_all_ranks(two: Ranks, mode: str, options: dict[str, Any]) -> None:
    """Also where a layer is used on one rank alone."""
    first, second = two(counted_on_ranks, mode, options)
    assert_same(first, second)
    alone = {**options, "reduce": "after_backward", "accumulate": 2, "batch": 8}
    assert_same(first, counted(mode, SINGLE_PROCESS, alone))


def noise(comm: Comm) -> Any:
    """Of the operands of one step, the whole batch or a rank's half."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    precision = Precision("mixed", half="bfloat16", products="mxfp8")
    _, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    trainer = Trainer(model, optimizer, supervised(nn.MSELoss()), precision, comm=comm)
    halves = [(half, half) for half in torch.randn(2, 32, 32).unbind()]
    probe = ProductProbe(precision)
    trainer.train_step(*(halves if comm.size == 1 else [halves[comm.rank]]))
    return probe.noises(comm)


def noise_on_ranks() -> Any:
    with init_comm(None, lambda: CPU, 120) as comm:
        return noise(comm)


def test_the_noise_of_products_is_that_of_all_ranks(two: Ranks) -> None:
    first, second = two(noise_on_ranks)
    assert first == noise(SINGLE_PROCESS)
    assert second == {}
    assert {own.values for own in first.values()} == {2 * 32 * 32}
