"""Steps of small models, with layers of every kind, to be made faulty and examined."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import mpframe.lowbit  # noqa: F401  # Recipes are named.
from mpframe.core.objective import NamedObjective, supervised
from mpframe.core.optim.master_weights import MasterWeights
from mpframe.core.precision import Precision
from mpframe.lab.autopsy.replay import Case

ROWS = 8


class Each(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor], **children: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class _Louder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def louder(factor: float) -> nn.Module:
    """The identity, whose backward pass multiplies by a number."""
    return Each(lambda x: _Louder.apply(x, factor))


def times(factor: float) -> nn.Module:
    return Each(lambda x: x * factor)


def exp(shift: float) -> nn.Module:
    return Each(lambda x: torch.exp(0.01 * x + shift))


def attention() -> nn.Module:
    """Self-attention over a sequence of length 2."""
    inner = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(x: Tensor) -> Tensor:
        pair = torch.stack([x, x], dim=1)
        return inner(pair, pair, pair, need_weights=False)[0].mean(dim=1)

    return Each(forward, inner=inner)


def recurrent() -> nn.Module:
    inner = nn.GRU(16, 16, batch_first=True)
    return Each(lambda x: inner(x[:, None])[0][:, 0], inner=inner)


def conv(kind: type[nn.Module] = nn.Conv2d) -> nn.Module:
    """A convolution over 16 features seen as channels and places."""
    return nn.Sequential(nn.Unflatten(1, (4, 2, 2)), kind(4, 4, 1), nn.Flatten())


def linear() -> nn.Module:
    return nn.Linear(16, 16)


def net(middle: nn.Module) -> nn.Module:
    """Layers around a middle; the norm behind it keeps what it does from the others."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), middle, nn.LayerNorm(16), nn.Linear(16, 4))


def loud(layer: nn.Module) -> nn.Module:
    """The layer, and a loud backward pass before it."""
    return nn.Sequential(OrderedDict(loud=louder(1e9), layer=layer))


def large(layer: nn.Module, factor: float = 1e5) -> nn.Module:
    """The same layer with large weights."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(factor)
    return layer


def data(rows: tuple[int, ...] = (), factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Random numbers, some rows of them multiplied."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, 16, generator=generator)
    inputs[list(rows)] *= factor
    return inputs, torch.randint(0, 4, (ROWS,), generator=generator)


def case_of(*arguments: Any, **more: Any) -> Case:
    return prepared(*arguments, **more)[0]


def prepared(
    model: nn.Module,
    mode: str = "mixed",
    compute: str = "emulated",
    half: str = "float16",
    **more: Any,
) -> tuple[Case, MasterWeights]:
    own = {"ops": more.pop("ops", None), "products": more.pop("products", "none")}
    precision = Precision(mode, half, compute=compute, **own)
    model, masters = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    objective = NamedObjective("", supervised(nn.CrossEntropyLoss()))
    scale, batches = more.pop("scale", 1024.0), more.pop("batches", [data()])
    return Case(model, precision, [objective], batches, {"": scale}, **more), masters
