"""What ranks tell each other: sums, statistics of batches, ranges; and the planned traffic."""

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prepared import prepared
from ranked import adds_zeros, assert_same, in_group, setup
from ranks import Ranks
from torch import Tensor, nn

from mpframe.core.comm import SINGLE_PROCESS, Comm
from mpframe.core.errors import ConfigError
from mpframe.core.objective import supervised
from mpframe.core.optim.master_weights import MasterWeights
from mpframe.core.trainer import StepOptions, StepTrainer
from mpframe.lab.ranges import RangeProbe
from mpframe.run.footprint import Way, Weight, payload, sent
from mpframe.training import evaluation
from mpframe.training.parallel import process_group
from mpframe.training.parallel.sync_batchnorm import synchronize


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


def test_sums_are_the_same_however_sent_and_a_norm_does_not_overflow(two: Ranks) -> None:
    expected = [torch.full((4,), 3.0), torch.full((2,), 0.2, dtype=torch.float64)]
    expected += [torch.arange(6.0).view(2, 3).t() * 2 + 1, torch.arange(10.0) * 3]
    for found in two(in_group, sums):
        assert_same(found, [*expected * 3, torch.tensor(2e38 * 2**0.5)])


def test_only_a_rank_without_a_batch_gets_that_of_another() -> None:
    """The third of four ranks whose weights are divided; the second has no batch."""
    third = SimpleNamespace(sharding=object(), any=lambda _: True, broadcast_object=lambda it: it)
    third.gather_object = lambda value: ["first", None, value, "fourth"]
    take: Any = evaluation._batch_of_any
    assert [take(third, own) for own in ("third", None)] == ["third", "first"]


def normalized(comm: Comm, shares: list[int]) -> str | None:
    """The error's text, if samples that the ranks share so are not normalised."""
    norm = nn.BatchNorm1d(3)
    synchronize(norm)
    try:
        norm(torch.randn(shares[comm.rank], 3))
    except ValueError as error:
        return str(error)
    return None


def test_batchnorm_over_ranks_that_have_one_value_is_refused(two: Ranks) -> None:
    with pytest.raises(ValueError, match="Expected more than 1 value") as torchs:
        nn.BatchNorm1d(3)(torch.ones(1, 3))
    for shares in ([1, 0], [0, 1]):
        assert two(in_group, normalized, shares) == [str(torchs.value)] * 2
    assert two(in_group, normalized, [1, 1]) == [None, None]


def step_behind_batchnorm(comm: Comm, shares: list[int], reduce: str) -> Any:
    """The model's tensors after a step on a share of nine samples, one without a label."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    if comm.size > 1:
        synchronize(model)
    wrapped = MasterWeights(torch.optim.SGD(model.parameters(), lr=1.0))
    plan, loss = StepOptions(reduce=reduce), supervised(nn.CrossEntropyLoss())
    trainer = StepTrainer(model, wrapped, loss, plan=plan, comm=comm)
    samples = torch.arange(27.0, dtype=torch.float64).sin().view(9, 3)
    labels = torch.tensor([0, 1, -100, 1, 0, 1, 1, 0, 0])
    trainer.train_step((samples.split(shares)[comm.rank], labels.split(shares)[comm.rank]))
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("reduce", ["in_backward", "after_backward"])
@pytest.mark.parametrize("shares", [[4, 5], [8, 1], [9, 0]], ids=str)
def test_layers_below_batchnorm_train_as_on_the_whole_batch(
    two: Ranks, shares: list[int], reduce: str
) -> None:
    """To 2^-20, because a rank's weight is fp32; alike, ranks of other counts were off by 2^-6."""
    whole = step_behind_batchnorm(SINGLE_PROCESS, [9, 0], reduce)
    for found in two(in_group, step_behind_batchnorm, shares, reduce):
        for own, theirs in zip(found, whole, strict=True):
            assert torch.allclose(own, theirs, rtol=2**-20, atol=2**-20)


def ranges(comm: Comm, mode: str, options: dict[str, Any]) -> dict[str, Any]:
    """Those of the first step."""
    trainer, train, _ = setup(mode, comm, options)
    batches, probe = train.epoch(0), RangeProbe(trainer, torch.float16)
    trainer.train_step(*(next(batches) for _ in range(options.get("accumulate", 1))))
    found = asdict(probe.ranges())
    return {k: torch.from_numpy(v) if hasattr(v, "dtype") else v for k, v in found.items()}


FSDP: dict[str, Any] = {"fsdp": True, "clip_norm": None}
HSDP: dict[str, Any] = {**FSDP, "layout": {"replicas": 2}}


@pytest.mark.parametrize(
    ("number", "mode", "options"),
    [("two", "amp", {}), ("two", "mixed", {"whole": True, "reduce": "in_backward"}),
     pytest.param("two", "mixed", FSDP, marks=adds_zeros),
     pytest.param("four", "mixed", HSDP, marks=[adds_zeros, pytest.mark.slow])],
)  # fmt: skip
def test_ranges_are_those_of_all_ranks(request: Any, number: str, mode: str, options: Any) -> None:
    """What one process counts of their parts, even if one alone uses a layer."""
    first, *others = request.getfixturevalue(number)(in_group, ranges, mode, options)
    for other in others:
        assert_same(first, other)
    count = len(others) + 1
    alone = {"reduce": "after_backward", "accumulate": count, "batch": 16 // count, "fsdp": False}
    assert_same(first, ranges(SINGLE_PROCESS, mode, {**options, **alone}))


def test_the_plan_tells_the_traffic_of_a_step_in_a_ring() -> None:
    """Beside the weights: amaxes and a loss, counts, the norm's square, and what was used."""
    weights = [Weight((4, 2), 2, block=1), Weight((3,))]
    handed = payload(weights, Way("ddp", 2), buffers=5)
    assert handed["all_reduce", 2] == 4 * (8 + 3) + 2 * 8 + 3 * 4 + 8
    assert handed["broadcast", 2] == 5
    handed = payload(weights, Way("hsdp", 2, 2))  # Three rows become two of each rank.
    assert (handed["all_gather", 2], handed["reduce_scatter", 2]) == (2 * (16 + 16), 4 * (8 + 4))
    assert (handed["all_reduce", 2], handed["all_reduce", 4]) == (24, 3 * 8 + 12 + 8 * (1 + 6))
    # A ring sends twice what is summed.
    handed = {("all_reduce", 4): 100, ("all_gather", 4): 40, ("reduce_scatter", 4): 40}
    assert sent({**handed, ("broadcast", 4): 8, ("all_reduce", 1): 99}) == 2 * 75 + 30 + 30 + 8


def test_a_sparse_gradient_is_not_summed() -> None:
    """After the backward pass; the other rank sends zeros."""
    partner: Any = type("Partner", (Comm,), {"size": 2, "sum_": lambda *_: None})
    trainer = prepared(nn.Embedding(4, 4, sparse=True), nn.MSELoss(), comm=partner())
    with pytest.raises(ConfigError, match=r"^trainer\.parallel=ddp: a gradient is sparse, and"):
        trainer.train_step((torch.arange(4), torch.zeros(4, 4)))
