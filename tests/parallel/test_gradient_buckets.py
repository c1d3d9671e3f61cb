"""The averages of the backward pass in a hand-written loop, parameter by parameter."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranked import CPU
from ranks import Ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpframe.core.errors import ConfigError
from mpframe.parallel import data_parallel
from mpframe.parallel.data_parallel import DataParallel
from mpframe.parallel.launch import init_comm

ALL = [0, 1, 2]
TWO = torch.tensor(2.0, dtype=torch.float64)


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


def used_on_one_rank(model: Layers, ranks: DataParallel, rank: int) -> list[list[int]]:
    """A rank may use none; hooks of a parameter are called where it is used."""
    unrelated, hooked = torch.ones((), requires_grad=True), list[Tensor]()
    found = [model.averaged(ranks, 0, loss=unrelated * 1 if rank == 0 else None)]
    model.each[2].weight.register_hook(hooked.append)  # type: ignore[no-untyped-call]
    found.append(model.averaged(ranks, *((0,) if rank else (0, 2))))
    assert len(hooked) == 1 - rank
    return found


def frozen_and_back(model: Layers, ranks: DataParallel, rank: int) -> list[list[int]]:
    """Or converted, even on one rank only: buckets are laid out alike at any time."""
    found, weight = [], model.each[1].weight
    for trained in (True, False, True):
        weight.requires_grad_(trained)
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


@pytest.mark.parametrize(
    ("do", "averaged"),
    [
        (beside, [[0, 1], [0, 1], [1], ALL]),
        (used_on_one_rank, [[0], [0, 2]]),
        (frozen_and_back, [ALL, [0, 2], ALL, ALL, [0, 1]]),
        (after_a_failure, [ALL, [0, 1]]),
        (refused, None),
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


@pytest.mark.parametrize(("megabytes", "buckets"), [(25, [ALL]), (1e-6, [[2], [1], [0]])])
def test_buckets_are_the_same_in_every_step_and_after_a_restart(
    two: Ranks, megabytes: float, buckets: list[list[int]]
) -> None:
    """With three ranks and more the order in which values are summed depends on their place."""
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


def recomputed(model: Layers, ranks: DataParallel, rank: int) -> list[str]:
    """What is said of one, and of two recomputations of a layer in passes of their own."""
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


def test_a_layer_may_be_recomputed_once_in_a_pass_of_its_own(two: Ranks) -> None:
    twice = (
        "trainer.reduce=in_backward: a weight got a second gradient in one backward pass, "
        "as by checkpoint(use_reentrant=True); use use_reentrant=False, or "
        "trainer.reduce=after_backward"
    )
    assert two(with_layers, recomputed) == [["[0, 1]", twice, "[0, 1]", "[0]", twice, "[0]"]] * 2
