"""One model of the zoo, and the losses that it is trained with."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn


class NotBuiltError(Exception):
    """The zoo does not know how to make this model small, or what to feed it."""


@dataclass(frozen=True)
class Example:
    """A model at its smallest: fp32, with random weights, on the CPU.

    Attributes:
        loss: of (model, step), 0-d.
        recompute: turns on the model's own activation checkpointing; None where it has none.
        steps: how many it takes.
        traced: whether `prepare` is given an example.
        after_step: called with the model behind every applied step.
    """

    model: nn.Module
    loss: Callable[[Any, int], Tensor]
    recompute: Callable[[nn.Module], object] | None = None
    steps: int = 2
    traced: bool = False
    after_step: Callable[[Any], object] = lambda model: None


def called(model: nn.Module, /, *inputs: Any, recompute: Any = None, **named: Any) -> Example:
    """Trained with the same inputs in each step."""
    return Example(model, lambda own, _: loss_of(own(*inputs, **named)), recompute)


def loss_of(outputs: Any) -> Tensor:
    """The outputs' own loss, or the sum of their mean squared distances to fixed noise.

    Noise, and not zero: behind a norm the mean square of the outputs is constant, and its gradient
    nothing but rounding errors.
    """
    own = getattr(outputs, "loss", None)
    if isinstance(own, Tensor) and own.ndim == 0:
        return own
    losses = [o for o in tensors_in(outputs) if o.requires_grad]
    if any(o.ndim for o in losses):
        random = torch.Generator().manual_seed(7)
        wanted = [torch.randn(o.shape, generator=random) for o in losses]
        losses = [(o.float() - w).square().mean() for o, w in zip(losses, wanted, strict=True)]
    return torch.stack([o.float() for o in losses]).sum()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The floating tensors in nested tuples, lists, mappings and dataclasses, in their order."""
    if isinstance(value, Tensor) and value.is_floating_point():
        yield value
    if is_dataclass(value) and not isinstance(value, Mapping):
        value = [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, Mapping):
        value = list(value.values())
    for child in value if isinstance(value, list | tuple) else ():
        yield from tensors_in(child)


def noise(*shape: int, seed: int = 4) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def images(size: int, *, channels: int = 3, count: int = 2) -> Tensor:
    return noise(count, channels, size, size, seed=1)


def row(**options: Any) -> dict[str, Any]:
    """The options as a dict: of a table, whose rows so stay short."""
    return options
