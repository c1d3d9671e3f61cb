"""One model of the zoo with a batch of its own, and the loss that it is trained with."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

Recompute = Callable[[nn.Module], object]


class NotBuiltError(Exception):
    """The zoo does not know how to make this model small, or what to feed it."""


@dataclass(frozen=True)
class Example:
    """A model at its smallest, and one batch.

    Attributes:
        model: fp32, with random weights, on the CPU.
        inputs: positional arguments of its forward pass.
        named: the others.
        recompute: turns on the model's own activation checkpointing; None where it has none.
    """

    model: nn.Module
    inputs: tuple[Any, ...] = ()
    named: Mapping[str, Any] | None = None
    recompute: Recompute | None = None

    def loss(self, model: nn.Module) -> Tensor:
        """0-d: the loss that `model` returns by itself, else a distance to fixed targets."""
        return loss_of(model(*self.inputs, **(self.named or {})))


def loss_of(outputs: Any) -> Tensor:
    """The outputs' own loss, or the sum of their mean squared distances to fixed noise.

    Noise, and not zero: behind a norm the mean square of the outputs is constant, and its gradient
    nothing but rounding errors.
    """
    own = getattr(outputs, "loss", None)
    if isinstance(own, Tensor) and own.ndim == 0:
        return own
    losses = [o for o in tensors_in(outputs) if o.requires_grad]
    if all(o.ndim == 0 for o in losses):
        return torch.stack([o.float() for o in losses]).sum()
    noise = torch.Generator().manual_seed(7)
    return torch.stack(
        [(o.float() - torch.randn(o.shape, generator=noise)).square().mean() for o in losses]
    ).sum()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The floating tensors in nested tuples, lists, mappings and dataclasses, in their order."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
        return
    if isinstance(value, Mapping):
        children = list(value.values())
    elif is_dataclass(value):
        children = [getattr(value, field.name) for field in fields(value)]
    else:
        children = list(value) if isinstance(value, list | tuple) else []
    for child in children:
        yield from tensors_in(child)


def images(size: int, *, channels: int = 3, count: int = 2) -> Tensor:
    """A batch of noise as images, float32."""
    return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(1))


def row(**options: Any) -> dict[str, Any]:
    """The options as a dict: of a table, whose rows so stay short."""
    return options
