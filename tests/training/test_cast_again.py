"""Weights that are gathered for a while: their casts do not stay until the backward pass."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from ranked import in_group, parts, setup
from ranks import Ranks
from torch import Tensor, nn
from vocabulary import Living, same_bits

from mpframe import Precision
from mpframe.core.comm import Comm
from mpframe.training.memory import cast_again, recompute


class Net(nn.Module):
    """A weight of each kind of product, one that is used twice, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.first = nn.Conv1d(3, 7, 3), nn.Linear(8, 10)
        self.twice, self.frozen = nn.Linear(10, 10), nn.Linear(10, 10).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(self.conv(inputs)).tanh()
        return self.twice(self.frozen(self.twice(hidden))) @ self.first.weight


def made(mode: str, half: str, compute: str, saving: Any) -> tuple[Net, Precision]:
    model, precision = Net(), Precision(mode, half, compute=compute)
    precision.use_shards(model, {}, saving)
    precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model, precision


def casts_of(weights: nn.Module) -> Living:
    """Casts that live, of tensors in the shapes of the weights."""
    shapes, cast = (
        {weight.shape for weight in weights.parameters()},
        torch.ops.aten._to_copy.default,
    )
    return Living(lambda func, made: func is cast and made.shape in shapes)


def step(
    precision: Precision, model: nn.Module, run: Callable[[Tensor], Tensor], order: int = 1
) -> tuple[list[Tensor], int]:
    """The gradients of a backward pass, and how many casts the forward pass has left."""
    torch.manual_seed(1)
    watch, inputs = casts_of(model), torch.randn(2, 3, 10, requires_grad=True)
    with precision.cast(), watch:
        loss = run(inputs).float().square().sum()
    alive = len(watch.alive())
    if order == 2:  # A second derivative goes through the cast.
        (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
        loss = slope.square().sum()
    loss.backward()
    return [weight.grad for weight in model.parameters() if weight.grad is not None], alive


@pytest.mark.parametrize(("mode", "half", "compute"), [
    ("amp", "bfloat16", "native"), ("amp", "float16", "emulated"), ("mixed", "float16", "emulated"),
])  # fmt: skip
def test_weights_are_cast_again_to_the_same_values(mode: str, half: str, compute: str) -> None:
    found = []
    for saving in (nullcontext, cast_again):  # Autograd saves casts by itself.
        model, precision = made(mode, half, compute, saving)
        found.append(step(precision, model, model, order=1 if mode == "mixed" else 2))
    (plain, kept), (again, left) = found
    assert same_bits(plain, again)
    # `conv`, `first` and `frozen` once and again, `twice` twice; their biases need no cast.
    assert kept == 6
    assert left == 0


def test_others_decide_what_is_saved() -> None:
    """A module that runs again keeps nothing, and torch.func takes no hooks at all."""
    model, precision = made("amp", "bfloat16", "native", cast_again)
    plain, _ = step(precision, model, model)
    model.zero_grad()
    seen: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        assert step(precision, model, model)[1] > 0
    assert any(saved.dtype == torch.bfloat16 for saved in seen)
    model.zero_grad()
    recompute(model, [""])
    again, left = step(precision, model, model)
    assert left == 0
    assert same_bits(plain, again)
    with precision.cast():
        slope = torch.func.grad(lambda inputs: Net.forward(model, inputs).float().sum())
        assert slope(torch.ones(2, 3, 10)).any()


def casts_left(comm: Comm, half: str) -> int:
    """How many casts of a divided GPT's weights live when its backward pass begins."""
    watch = casts_of(parts("gpt")[0].get_submodule("blocks"))
    trainer, train, _ = setup("amp", comm, {"name": "gpt", "fsdp": True, "half": half})
    with trainer.precision.cast(), watch:
        output = trainer.model(next(iter(train.epoch(0)))[0])
    left = len(watch.alive())
    output.float().sum().backward()
    assert watch.most > 0
    return left


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_ranks_keep_no_casts_of_gathered_weights(two: Ranks, half: str) -> None:
    assert two(in_group, casts_left, half) == [0, 0]
