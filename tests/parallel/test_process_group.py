"""What ranks tell each other: sums, norms, values of one of them, and what `numerics` counts."""

from dataclasses import asdict
from typing import Any

import pytest
import torch
from ranked import assert_same, in_group, on_ranks, setup, trained
from ranks import Ranks
from torch import Tensor, nn

import mpframe.lowbit  # noqa: F401  # Recipes are named.
from mpframe import Precision
from mpframe.core.comm import SINGLE_PROCESS, Comm
from mpframe.core.objective import supervised
from mpframe.lab.product_noise import ProductProbe
from mpframe.lab.ranges import RangeProbe
from mpframe.parallel import process_group
from mpframe.training.trainer import Trainer


def sums(comm: Any) -> list[Tensor]:
    """Where tensors of so many bytes are sent alone; one of them does not lie in rows."""
    found = []
    for large in (1, 24, 2**22):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(process_group, "_LARGE", large)
            own = [torch.full((4,), 1.0 + comm.rank), torch.full((2,), 0.1, dtype=torch.float64)]
            columns = torch.arange(6.0).view(2, 3).t() + comm.rank
            comm.sum_(own := [*own, columns, torch.arange(10.0) * (comm.rank + 1)])
            found += own
    return [*found, comm.norm(torch.tensor(2e38))]


def test_sums_are_the_same_however_tensors_are_sent_and_a_norm_does_not_overflow(
    two: Ranks,
) -> None:
    expected = [torch.full((4,), 3.0), torch.full((2,), 0.2, dtype=torch.float64)]
    expected += [torch.arange(6.0).view(2, 3).t() * 2 + 1, torch.arange(10.0) * 3]
    for found in two(in_group, sums):
        assert_same(found, [*expected * 3, torch.tensor(2e38 * 2**0.5)])


class Third(process_group.ProcessGroup):
    """The third of four ranks whose weights are divided; the second has no batch."""

    def __init__(self) -> None:
        self.sharding = object()  # type: ignore[assignment]

    def any(self, flag: bool) -> bool:
        return True

    def gather_object(self, value: Any) -> list[Any]:
        return ["first", None, value, "fourth"]

    def broadcast_object(self, value: Any) -> Any:
        return value


def test_only_a_rank_without_a_batch_gets_that_of_another() -> None:
    found = [Third().broadcast_if_missing(own) for own in ("third", None)]
    assert found == ["third", "first"]


@pytest.mark.parametrize(
    ("name", "size"), [("resnet18", 2), pytest.param("gpt", 4, marks=pytest.mark.slow)]
)
def test_ranks_equal_one_process_with_the_whole_batch(
    request: pytest.FixtureRequest, name: str, size: int
) -> None:
    """With synchronised BatchNorm, in float64, where rounding leaves room for nothing else.

    Sums of at most 10^4 terms in another order differ by 10^4 * 2^-53 = 1e-12 of their size; three
    more digits are for what 18 layers and 2 steps make of it.
    """
    options = {"name": name, "double": True, "sync": True, "optimizer": torch.optim.SGD, "steps": 2}
    ranks = request.getfixturevalue({2: "two", 4: "four"}[size])
    first, *others = ranks(on_ranks, "fp32", options)
    for other in others:
        assert_same(first, other)
    alone = trained("fp32", SINGLE_PROCESS, options)
    for ours, theirs in zip(first["weights"], alone["weights"], strict=True):
        assert torch.allclose(ours.double(), theirs.double(), rtol=1e-9, atol=1e-9)
    for own, other in zip(first["results"], alone["results"], strict=True):
        assert own == pytest.approx(other, rel=1e-9)


def ranges(comm: Comm, mode: str, options: dict[str, Any]) -> dict[str, Any]:
    """Those of the first step."""
    trainer, train, _ = setup(mode, comm, options)
    batches, probe = train.epoch(0), RangeProbe(trainer, torch.float16)
    trainer.train_step(*(next(batches) for _ in range(options.get("accumulate", 1))))
    found = asdict(probe.ranges())
    return {k: torch.from_numpy(v) if hasattr(v, "dtype") else v for k, v in found.items()}


@pytest.mark.parametrize(
    ("mode", "options"), [("amp", {}), ("mixed", {"whole": True, "reduce": "in_backward"})]
)
def test_ranges_are_those_of_all_ranks(two: Ranks, mode: str, options: dict[str, Any]) -> None:
    """Of two ranks what one process counts of their two halves, even if one alone uses a layer."""
    first, second = two(in_group, ranges, mode, options)
    assert_same(first, second)
    alone = {**options, "reduce": "after_backward", "accumulate": 2, "batch": 8}
    assert_same(first, ranges(SINGLE_PROCESS, mode, alone))


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


def test_the_noise_of_products_is_that_of_all_ranks(two: Ranks) -> None:
    first, second = two(in_group, noise)
    assert first == noise(SINGLE_PROCESS)
    assert second == {}
    assert {own.values for own in first.values()} == {2 * 32 * 32}
