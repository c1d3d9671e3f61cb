"""A few steps of a model in one dtype mode, and what came out of them."""

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
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
AUTOCAST = partial(torch.autocast, "cpu", torch.bfloat16)


@dataclass(frozen=True)
class Steps:
    """What is trained: loss(model, step) over `count` steps, `after_step` behind each applied."""

    model: Any
    loss: Callable[[Any, int], Tensor]
    count: int = STEPS
    after_step: Callable[[Any], object] = lambda model: None


@dataclass(frozen=True)
class Outcome:
    """What training gave.

    losses: of each step that was applied, unscaled. gradients: of the first of them, flat, fp32,
    unscaled, every parameter in order; one without gradient counts as zeros.
    """

    losses: list[float]
    gradients: Tensor


def by_torch(steps: Steps, context: Callable[[], Any]) -> Outcome:
    """Steps of AdamW by torch alone, the forward pass within `context`."""
    optimizer = torch.optim.AdamW(steps.model.parameters(), lr=LEARNING_RATE)
    losses, gradients = [], []
    for step in range(steps.count):
        with context():
            loss = steps.loss(steps.model, step)
        loss.backward()
        losses.append(loss.item())
        gradients.append(_flat(steps.model, 1.0))
        optimizer.step()
        optimizer.zero_grad()
        steps.after_step(steps.model)
    return Outcome(losses, gradients[0])


def by_mpframe(steps: Steps, mode: str, half: str, example: Any = None) -> Outcome:
    """Steps as a user's own loop takes them, with a loss scale where the half format needs one.

    Raises:
        OverflowError: a step was not applied within TRIES.
    """
    precision = Precision(mode, half)
    optimizer = torch.optim.AdamW(steps.model.parameters(), lr=LEARNING_RATE)
    model, optimizer = precision.prepare(steps.model, optimizer, example)
    scaler = Backoff() if half == "float16" and mode != "fp32" else None
    losses, gradients = [], []
    for _ in range(steps.count + TRIES):
        scale = torch.ones(()) if scaler is None else scaler.scale
        with precision.cast():
            loss = steps.loss(model, len(losses))
        (loss * scale).backward()
        gradient = _flat(model, scale.item())
        skipped = optimizer.step(scaler).skipped
        optimizer.zero_grad()
        if not skipped:
            steps.after_step(model)
            losses.append(loss.item())
            gradients.append(gradient)
        if len(losses) == steps.count:
            return Outcome(losses, gradients[0])
    raise OverflowError(f"beyond {half} at every scale")


def round_weights(model: nn.Module) -> None:
    """Round them to bfloat16: how much does the model mind that?"""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())


def train_plain(example: Example, context: Any = nullcontext, *, rounded: bool = False) -> Outcome:
    """Steps by torch alone, the forward pass within `context`, maybe from rounded weights."""
    steps = _copied(example)
    if rounded:
        round_weights(steps.model)
    return by_torch(steps, context)


def train(example: Example, mode: str, half: str, *, recompute: bool = False) -> Outcome:
    """Steps by mpframe; recompute: with the model's own activation checkpointing."""
    steps = _copied(example)
    if recompute and example.recompute is not None:
        example.recompute(steps.model)
    return by_mpframe(steps, mode, half)


def overflows_under_autocast(example: Example) -> bool:
    """Whether torch's own float16 gradients are not finite, even without a loss scale."""
    steps = _copied(example)
    with torch.autocast("cpu", torch.float16):
        loss = steps.loss(steps.model, 0)
    loss.backward()
    return not _flat(steps.model, 1.0).isfinite().all()


def _copied(example: Example) -> Steps:
    """The steps of a copy; whatever is random in the forward pass is so in the same way."""

    def loss(model: nn.Module, step: int) -> Tensor:
        random.seed(0)
        numpy.random.seed(0)  # What transformers draws its masks from
        torch.manual_seed(0)
        return example.loss(model)

    return Steps(copy.deepcopy(example.model), loss)


def _flat(model: nn.Module, scale: float) -> Tensor:
    parts = [
        torch.zeros(p.numel()) if p.grad is None else p.grad.float().reshape(-1) / scale
        for p in model.parameters()
        if p.requires_grad
    ]
    return torch.cat(parts)
