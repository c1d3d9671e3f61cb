"""A few steps of a zoo model in one dtype mode, and what came out of them."""

import copy
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy
import torch
from example import Example
from torch import Tensor, nn

from mpframe import Backoff, Precision

STEPS = 2
TRIES = 30  # Backoff starts at 2^16, and 2^24 steps down is further than any model needs
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Outcome:
    """What training gave.

    Attributes:
        losses: of each step that was applied, unscaled.
        gradients: of the first of them, flat, fp32, unscaled, every parameter in order; a
            parameter without gradient counts as zeros.
    """

    losses: list[float]
    gradients: Tensor


def train_plain(example: Example, context: Callable[[], AbstractContextManager[Any]]) -> Outcome:
    """Steps by torch alone, the forward pass within `context`."""
    model = copy.deepcopy(example.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, gradients = [], []
    for _ in range(STEPS):
        loss = _forward(example, model, context)
        loss.backward()
        losses.append(loss.item())
        gradients.append(_flat(model, 1.0))
        optimizer.step()
        optimizer.zero_grad()
    return Outcome(losses, gradients[0])


def train_fp32(example: Example) -> Outcome:
    """Steps by torch alone, in fp32."""
    return train_plain(example, nullcontext)


def train_autocast(example: Example) -> Outcome:
    """Steps by torch alone, under its own autocast to bfloat16."""
    return train_plain(example, partial(torch.autocast, "cpu", torch.bfloat16))


def train_rounded(example: Example) -> Outcome:
    """Steps in fp32 from weights that were rounded to bfloat16: how much the model minds that."""
    rounded = copy.deepcopy(example)
    with torch.no_grad():
        for parameter in rounded.model.parameters():
            parameter.copy_(parameter.bfloat16())
    return train_fp32(rounded)


def train(example: Example, mode: str, half: str, *, recompute: bool = False) -> Outcome:
    """Steps by mpframe, with a loss scale where the half format needs one.

    Args:
        recompute: turn on the model's own activation checkpointing.

    Raises:
        OverflowError: no step was applied within TRIES.
    """
    model = copy.deepcopy(example.model)
    if recompute and example.recompute is not None:
        example.recompute(model)
    precision = Precision(mode, half)
    model, optimizer = precision.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    )
    scaler = Backoff() if half == "float16" and mode != "fp32" else None
    losses, gradients = [], []
    for _ in range(TRIES):
        scale = torch.ones(()) if scaler is None else scaler.scale
        loss = _forward(example, model, precision.cast)
        (loss * scale).backward()
        gradient = _flat(model, scale.item())
        if not optimizer.step(scaler).skipped:
            losses.append(loss.item())
            gradients.append(gradient)
        optimizer.zero_grad()
        if len(losses) == STEPS:
            return Outcome(losses, gradients[0])
    raise OverflowError(f"beyond {half} at every scale")


def overflows_under_autocast(example: Example) -> bool:
    """Whether torch's own float16 gradients are not finite, even without a loss scale."""
    model = copy.deepcopy(example.model)
    _forward(example, model, partial(torch.autocast, "cpu", torch.float16)).backward()
    return not _flat(model, 1.0).isfinite().all()


def _forward(
    example: Example, model: nn.Module, context: Callable[[], AbstractContextManager[Any]]
) -> Tensor:
    """The loss; whatever is random in the forward pass is so in the same way every time."""
    random.seed(0)
    numpy.random.seed(0)  # What transformers draws its masks from
    torch.manual_seed(0)
    with context():
        return example.loss(model)


def _flat(model: nn.Module, scale: float) -> Tensor:
    parts = [
        torch.zeros(p.numel()) if p.grad is None else p.grad.float().reshape(-1) / scale
        for p in model.parameters()
        if p.requires_grad
    ]
    return torch.cat(parts)
