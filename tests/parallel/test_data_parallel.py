"""Ranks that train together take the step that one process takes on all their samples.

Two ranks with half a batch each equal one process that accumulates the two halves: bit for bit,
because both add two fp32 numbers and halve the sum.
"""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranked import CPU, SHARDED, assert_same, assert_same_but, bad_input, on_ranks, trained
from ranks import Ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpframe.core.comm import SINGLE_PROCESS, part_of
from mpframe.core.errors import ConfigError
from mpframe.training.parallel import data_parallel
from mpframe.training.parallel.data_parallel import DataParallel
from mpframe.training.parallel.launch import init_comm
from mpframe.training.trainer import Trainer

LOW_BITS = {
    "every": {"format": "e2m1", "per": "row"},
    "forward": {role: {"per": "block", "block": 4, "scale": "e8m0"} for role in ("x", "w")},
    "dw": {"x": {"per": "tensor"}, "dy": {"per": "tensor"}},
}
EARLY, LATE = {"reduce": "in_backward"}, {"reduce": "after_backward"}
FSDP = {"name": "mlp", "fsdp": True}
ALL = [0, 1, 2]
TWO = torch.tensor(2.0, dtype=torch.float64)


@pytest.mark.parametrize(
    ("mode", "options"),
    [("fp32", EARLY), ("amp", LATE), ("mixed", EARLY), ("mixed", LATE),
     ("mixed", {"recipe": LOW_BITS, "batch": 32})],
)  # fmt: skip
def test_two_ranks_equal_one_process_with_their_halves(two: Ranks, mode: str, options: Any) -> None:
    """Also where a layer is used on one rank alone, or on none: it is left as it was.

    Each micro-batch is quantised by itself.
    """
    first, second = two(on_ranks, mode, options)
    halves = {**options, "batch": options.get("batch", 16) // 2, "accumulate": 2}
    alone = trained(mode, SINGLE_PROCESS, halves)
    assert_same(first, second)
    # One process counts twice as many batches.
    assert_same_but(first["states"], alone["states"], "progress")
    assert_same(first["weights"], alone["weights"])
    assert_same_but(first["results"], alone["results"], "dropped")
    assert first["metrics"] == alone["metrics"]
    # At most 67 fp32 losses are added in another order.
    assert first["loss"] == pytest.approx(alone["loss"], rel=67 * 2**-24)
    begin, end = (first["states"][step]["weights"] for step in (0, -1))
    assert torch.equal(begin["never.weight"], end["never.weight"])
    assert not torch.equal(begin["sometimes.weight"], end["sometimes.weight"])


def bad_gradient(trainer: Trainer, batches: Any) -> None:
    """That of the last layer's weight is nan on this rank, before the ranks add theirs."""
    layers = dict(trainer.model.named_modules())

    def spoil(module: nn.Module, inputs: Any) -> None:
        handle.remove()
        weight: Any = module.weight  # A divided one as it is gathered: the same in each step.
        once = weight.register_hook(lambda own: (once.remove(), own * torch.nan)[1])

    handle = (layers.get("last") or layers["4"]).register_forward_pre_hook(spoil)


def bad_sum(trainer: Trainer, batches: Any) -> None:
    """inf on this rank alone, in what the ranks have already summed."""
    patch, sum_, receive = pytest.MonkeyPatch(), trainer.comm.sum_, DataParallel._receive

    def spoilt(tensors: Any) -> None:
        sum_(tensors)
        tensors[0].view(-1)[0] = torch.inf
        patch.undo()

    def spoilt_early(ranks: DataParallel, reduction: Any) -> Tensor:
        means = receive(ranks, reduction)
        means[0] = torch.inf
        patch.undo()
        return means

    patch.setattr(trainer.comm, "sum_", spoilt)
    patch.setattr(DataParallel, "_receive", spoilt_early)


def bad_divided_sum(trainer: Trainer, batches: Any) -> None:
    usage: Any = trainer.comm.sharding.usage
    drop = usage.drop_unused

    def spoilt(comm: Any) -> None:
        drop(comm)
        part_of(next(trainer.model.parameters()).grad)[0] = torch.inf  # type: ignore[arg-type]
        usage.drop_unused = drop

    usage.drop_unused = spoilt


@pytest.mark.parametrize(
    ("mode", "options"),
    [("fp32", EARLY), ("amp", LATE), ("mixed", EARLY), ("fp32", FSDP), (SHARDED, FSDP)],
)
def test_what_overflows_on_one_rank_is_skipped_on_all(two: Ranks, mode: str, options: Any) -> None:
    """Before the sum, or only in it; nothing changes but the scale, and the ranks agree."""
    last, clip = (bad_divided_sum, None) if options is FSDP else (bad_sum, 1.0)
    faults = {1: bad_input, 2: bad_gradient, 3: last}
    own = {"faults": faults, "norm": True, "clip_norm": clip, **options}
    first, second = two(on_ranks, mode, own)
    assert_same(first["states"], second["states"])
    assert_same_but(first["results"], second["results"], "grad_norm")
    skipped = [own["skipped"] for own in first["results"]]
    assert skipped == [step in faults for step in range(len(skipped))]
    for step in faults:  # Buffers, masters, the optimizer's state and the average, too.
        before, after = ([first["states"][n]] for n in (step, step + 1))
        assert_same_but(before, after, "progress", "scaler")


def test_a_sum_of_a_window_that_overflows_is_dropped_on_all(two: Ranks) -> None:
    options = {"faults": {1: bad_divided_sum}, "norm": True, "accumulate": 2, "steps": 3, **FSDP}
    first, second = two(on_ranks, "amp", options)
    assert_same(first, second)
    told = [(own["skipped"], own["dropped"]) for own in first["results"]]
    assert told == [(False, 0), (False, 1), (False, 0)]


FAULTS = {1: bad_input, 3: bad_gradient}


@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        ("fp32", {"faults": FAULTS, "whole": True}),
        ("mixed", {"accumulate": 2, "whole": True}),  # Averaged after the last backward pass.
        ("amp", {"faults": FAULTS, "sync": True}),  # One rank may use a layer, or none.
        ("mixed", {"faults": FAULTS, "sync": True, "large": 100}),
    ],
)
def test_averaged_in_the_backward_it_is_the_same_step(two: Ranks, mode: str, changes: Any) -> None:
    """Weights, masters, optimizer and scaler, which is told what a rank's gradients alone reach."""
    options = {"norm": True, **changes}
    first, second = two(on_ranks, mode, {**options, "reduce": "in_backward"})
    after, _ = two(on_ranks, mode, {**options, "reduce": "after_backward"})
    assert_same(first["states"], second["states"])
    assert_same(first["states"], after["states"])
    assert_same(first["weights"], after["weights"])


# The averages in a hand-written loop, parameter by parameter.


class Layers(nn.Module):
    """Three layers, of which a call uses those that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))

    def forward(self, *numbers: int) -> Tensor:
        return torch.stack([self.each[number](torch.ones(2)).sum() for number in numbers]).sum()

    def averaged(self, ranks: DataParallel, *numbers: int, loss: Tensor | None = None) -> list[int]:
        """The numbers of the layers that have means in a step; what another rank used is halved."""
        parameters = [own for own in self.parameters() if own.requires_grad]
        loss = self(*numbers) if loss is None else loss
        ranks.backward(loss, 1.0, TWO, parameters)
        means, *_ = ranks.means(loss.detach())
        assert all(own.grad is None for own in self.parameters())
        return [n for n, layer in enumerate(self.each) if layer.weight in means]


def with_layers(do: Callable[..., Any], bucket_mb: float = 25) -> Any:
    """What it finds; the buckets go with their trainer."""
    with init_comm(None, lambda: CPU, 60) as comm, pytest.MonkeyPatch.context() as patched:
        patched.setattr(data_parallel, "_BUCKET_MB", bucket_mb)
        ranks = comm.in_backward()
        found = do(Layers(), ranks, comm.rank)
        gone = weakref.ref(ranks)
        del ranks
        gc.collect()
        assert gone() is None
        return found


def beside(model: Layers, ranks: DataParallel, rank: int) -> list[list[int]]:
    """A probe, an autopsy or a callback of a user's has backward passes of its own."""
    found = [model.averaged(ranks, 0, 1)]
    model(0, 1, 2).backward()
    model.zero_grad()
    found.append(model.averaged(ranks, 0, 1))
    torch.autograd.grad(model(2), model.each[2].weight)
    return [*found, model.averaged(ranks, 1), model.averaged(ranks, 0, 1, 2)]


def frozen_and_back(model: Layers, ranks: DataParallel, rank: int) -> list[list[int]]:
    """Or converted, even on one rank only: buckets are laid out alike at any time."""
    found, weight = [], model.each[1].weight
    for is_trained in (True, False, True):
        weight.requires_grad_(is_trained)
        found.append(model.averaged(ranks, 0, 1, 2))
    if rank:  # The node that accumulates its gradient is another one now.
        weight.data = weight.data.double()
        weight.data = weight.data.float()
    return [*found, model.averaged(ranks, 0, 1, 2), model.averaged(ranks, 0, 1)]


def after_a_failure(model: Layers, ranks: DataParallel, rank: int) -> list[list[int]]:
    found = [model.averaged(ranks, 0, 1, 2)]
    handle = model.each[0].weight.register_hook(lambda _: 1 / 0)  # type: ignore[no-untyped-call]
    with pytest.raises(ZeroDivisionError):
        model.averaged(ranks, 0, 1, 2)
    handle.remove()
    model.zero_grad()
    return [*found, model.averaged(ranks, 0, 1)]


def refused(model: Layers, ranks: DataParallel, rank: int) -> None:
    table = nn.Embedding(4, 2, sparse=True)
    said = "^trainer.parallel=ddp: a gradient is sparse, and ranks sum dense ones; make the layer"
    with pytest.raises(ConfigError, match=said):
        ranks.backward(table(torch.arange(4)).sum(), 1.0, TWO, [table.weight])


def recomputed(model: Layers, ranks: DataParallel, rank: int) -> list[str]:
    """A layer once or twice, in passes of their own: the layers averaged, or what is said."""
    said = []
    for alone in (False, True):  # All that DDP waits for is there after its first gradient.
        for layer in model.each[1:] if alone else ():
            layer.requires_grad_(False)
        for times in (1, 2, 1):
            hidden = torch.ones(2, requires_grad=True)
            for _ in range(times):
                hidden = checkpoint(model.each[0], hidden, use_reentrant=True)
            try:
                loss = hidden.sum() + (0 if alone else model(1))
                said.append(str(model.averaged(ranks, loss=loss)))
            except ConfigError as error:
                said.append(str(error))
            model.zero_grad()
    return said


TWICE = (
    "trainer.reduce=in_backward: a weight got a second gradient in one backward pass, as by "
    "checkpoint(use_reentrant=True); use use_reentrant=False, or trainer.reduce=after_backward"
)


@pytest.mark.parametrize(
    ("do", "averaged"),
    [
        (beside, [[0, 1], [0, 1], [1], ALL]),
        (frozen_and_back, [ALL, [0, 2], ALL, ALL, [0, 1]]),
        (after_a_failure, [ALL, [0, 1]]),
        (refused, None),
        (recomputed, ["[0, 1]", TWICE, "[0, 1]", "[0]", TWICE, "[0]"]),
    ],
)
def test_the_layers_of_a_step_are_averaged(two: Ranks, do: Any, averaged: Any) -> None:
    assert two(with_layers, do) == [averaged, averaged]


def laid_out(model: Layers, ranks: DataParallel, rank: int) -> list[list[list[int]]]:
    """The layers of each bucket, in the order in which they are sent, in three steps."""
    orders, weights = [], [layer.weight for layer in model.each]
    for numbers in ((2, 0, 1), (0, 1), (1, 2)):
        loss = model(*numbers)
        ranks.backward(loss, 1.0, TWO, weights)
        sent: Any = ranks._reductions
        orders.append([[n for n, w in enumerate(weights) if w in slots] for _, slots, _ in sent])
        ranks.means(loss.detach())
    return orders


def test_buckets_are_the_same_in_every_step_and_after_a_restart(two: Ranks) -> None:
    """With three ranks and more the order in which values are summed depends on their place."""
    for megabytes, buckets in ((25, [ALL]), (1e-6, [[2], [1], [0]])):
        assert two(with_layers, laid_out, megabytes) == [[buckets] * 3] * 2


def strided(rank: int) -> list[nn.Parameter]:
    """Parameters that do not lie in rows, or have holes, or nothing in them."""
    values = torch.arange(48.0) + rank
    columns, holes = values[:6].view(2, 3).t(), values.view(6, 8)[::2, ::2].t()
    image = values.view(1, 3, 4, 4).to(memory_format=torch.channels_last)
    return [nn.Parameter(own) for own in (columns, holes, image, values[:0], values.sum())]


def mean_layouts(model: Layers, ranks: DataParallel, rank: int) -> list[list[Tensor | None]]:
    """The second rank uses all, the first one all or the last; d/dw w^2/2 is w."""
    found = []
    for used in ((0, 1, 2, 3, 4), (4,)):
        parameters = strided(rank)
        own = range(5) if rank else used
        loss = torch.stack([parameters[n].square().sum() / 2 for n in own]).sum()
        ranks.backward(loss, 1.0, TWO, parameters)
        means, *_ = ranks.means(loss.detach())
        found.append([means[own] for own in parameters])
    return found


def test_gradients_lie_where_they_belong(two: Ranks) -> None:
    for of_all, of_one in two(with_layers, mean_layouts):
        for n, (ours, theirs) in enumerate(zip(strided(0), strided(1), strict=True)):
            assert torch.equal(of_all[n], (ours.detach() + theirs.detach()) / 2)
            assert torch.equal(of_one[n], (ours.detach() * (n == 4) + theirs.detach()) / 2)
