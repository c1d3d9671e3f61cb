"""`Precision`, `MasterWeights` and a scaler in a loop of the user's own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vocabulary import HALVES, same_bits

from mpframe import Backoff, LogMax, Precision, Static, Trainer
from mpframe.core.objective import supervised
from mpframe.core.step_result import StepResult
from mpframe.training.trainer import Plan

MODES = [("fp32", "float16"), *((m, h) for m in ("mixed", "amp") for h in HALVES)]
SCALERS: list[Callable[[], Any]] = [LogMax, Backoff, lambda: Static(2.0**10), LogMax, Backoff]


def data(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    targets = [torch.randint(0, 4, (16,), generator=generator) for _ in range(count)]
    noise = [torch.randn(16, 8, generator=generator) for _ in range(count)]
    return [(n + 3 * nn.functional.one_hot(t, 8), t) for n, t in zip(noise, targets, strict=True)]


def prepared(precision: Precision) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    return precision.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def loop(
    precision: Precision, scaler: Any, batches: list[tuple[Tensor, Tensor]]
) -> tuple[nn.Module, list[Tensor], list[StepResult]]:
    """The loop as it is documented."""
    model, optimizer = prepared(precision)
    losses, results = [], []
    for inputs, targets in batches:
        with precision.cast():
            loss = nn.functional.cross_entropy(model(inputs), targets)
        (loss * scaler.scale).backward()
        results.append(optimizer.step(scaler, max_norm=1.0))
        optimizer.zero_grad()
        losses.append(loss.detach())
    return model, losses, results


@pytest.mark.parametrize(
    ("mode", "half", "make_scaler"),
    [(*mode, make) for mode, make in zip(MODES, SCALERS, strict=True)],
)
def test_it_learns_and_skips_an_overflow_in_the_middle(
    mode: str, half: str, make_scaler: Callable[[], Any]
) -> None:
    batches = data(40)
    batches[10] = (batches[10][0] * torch.inf, batches[10][1])
    _, losses, results = loop(Precision(mode, half), make_scaler(), batches)
    assert losses[-1] < losses[0] / 3
    assert [step for step, result in enumerate(results) if result.skipped] == [10]
    assert all(result.amax <= result.grad_norm for result in results if not result.skipped)


@pytest.mark.parametrize(("mode", "half"), MODES[:4])
def test_it_is_the_trainers_step(mode: str, half: str) -> None:
    precision, objective = Precision(mode, half), supervised(nn.CrossEntropyLoss())
    model, masters = prepared(precision)
    trainer = Trainer(model, masters, objective, precision, Backoff(), plan=Plan(clip_norm=1.0))
    for batch in data(5):
        trainer.train_step(batch)
    ours, _, _ = loop(Precision(mode, half), Backoff(), data(5))
    assert same_bits(ours.parameters(), model.parameters())


def test_mixed_and_amp_take_the_same_steps() -> None:
    """Masters and fp32 weights see the same gradients here: no weight is used twice."""
    both = (Precision(mode, compute="emulated") for mode in ("mixed", "amp"))
    (mixed, _, _), (amp, _, _) = (loop(own, Static(2.0**8), data(5)) for own in both)
    pairs = zip(mixed.parameters(), amp.parameters(), strict=True)
    assert all(torch.equal(m, a.to(m.dtype)) for m, a in pairs)
