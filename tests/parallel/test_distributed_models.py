"""Ranks that train real models: a ResNet-18 and a small GPT, beside one process."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import Ranks
from test_distributed_step import CPU, MODES, assert_same
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from mpframe import LogMax, Precision
from mpframe.core.comm import SINGLE_PROCESS, Comm
from mpframe.core.objective import supervised
from mpframe.data import Loader
from mpframe.parallel.launch import init_comm
from mpframe.training.plan import Plan
from mpframe.training.trainer import Trainer
from mpframe.workloads.images import resnet18
from mpframe.workloads.text.language_model import GPT

SAMPLES = 16


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of every token of every window."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def parts(name: str) -> tuple[nn.Module, TensorDataset, Any]:
    """A model, its samples and its loss."""
    random = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    if name == "gpt":
        text = torch.randint(0, 32, (SAMPLES, 17), generator=random)
        data = TensorDataset(text[:, :-1], text[:, 1:])
        return GPT(32, context=16, depth=2, heads=2, width=32), data, token_loss
    images = torch.randn(SAMPLES, 3, 8, 8, generator=random)
    data = TensorDataset(images, torch.arange(SAMPLES) % 10)
    return resnet18(10, width=4), data, nn.CrossEntropyLoss()


def trained(
    name: str, mode: str, comm: Comm, batch: int, accumulate: int = 1, double: bool = False
) -> list[Tensor]:
    """The loss and the gradients' norm of each of the steps of an epoch, then the weights."""
    model, data, loss = parts(name)
    if double:
        model = model.double()
        data = TensorDataset(*(t.double() if t.is_floating_point() else t for t in data.tensors))
        comm.synchronize_batchnorm(model)
    precision = Precision(mode)
    _, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    trainer = Trainer(
        model,
        optimizer,
        supervised(loss),
        precision,
        scaler=None if mode == "fp32" else LogMax(init_scale=2.0**10),
        plan=Plan(epochs=1, clip_norm=1.0, accumulate=accumulate),
        comm=comm,
    )
    told, step = [], trainer.train_step

    def watched(*batches: Any) -> Any:
        result = step(*batches)
        assert not result.skipped
        told.extend([torch.as_tensor(result.loss), torch.as_tensor(result.grad_norm)])
        return result

    trainer.train_step = watched  # type: ignore[method-assign]
    trainer.fit(Loader(data, batch, shuffle=True, comm=comm))
    return [*told, *(own.detach().clone() for own in model.parameters())]


def on_ranks(name: str, mode: str, batch: int, double: bool = False) -> list[Tensor]:
    """`trained` as one of the ranks."""
    with init_comm(None, lambda: CPU, 120) as comm:
        return trained(name, mode, comm, batch, double=double)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["resnet18", "gpt"])
def test_two_ranks_equal_one_process_that_accumulates(two: Ranks, name: str, mode: str) -> None:
    """BatchNorm takes the statistics of a rank's half, as one process does of a micro-batch."""
    first, second = two(on_ranks, name, mode, 8)
    alone = trained(name, mode, SINGLE_PROCESS, 4, accumulate=2)
    assert_same(first, second)
    assert_same(first, alone)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["resnet18", "gpt"])
def test_ranks_equal_one_process_with_the_whole_batch(
    two: Ranks, four: Ranks, name: str, size: int
) -> None:
    """With synchronised BatchNorm, in float64, where rounding leaves room for nothing else.

    Sums of at most 10^4 terms in another order differ by 10^4 * 2^-53 = 1e-12 of their size; three
    more digits are for what 18 layers and 4 steps make of it.
    """
    first, *others = {2: two, 4: four}[size](on_ranks, name, "fp32", 8, True)
    for other in others:
        assert_same(first, other)
    alone = trained(name, "fp32", SINGLE_PROCESS, 8, double=True)
    for ours, theirs in zip(first, alone, strict=True):
        assert torch.allclose(ours.double(), theirs.double(), rtol=1e-9, atol=1e-9)
