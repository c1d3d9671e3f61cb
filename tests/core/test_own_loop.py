"""`Precision`, `MasterWeights` and a scaler in a loop of the user's own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vocabulary import HALVES, same_bits

from mpframe import Backoff, LogMax, Precision, Static, Trainer
from mpframe.core.objective import supervised
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


@pytest.mark.parametrize(
    ("mode", "half", "make_scaler"),
    [(*mode, make) for mode, make in zip(MODES, SCALERS, strict=True)],
)
def test_it_learns_skips_an_overflow_in_the_middle_and_is_the_trainers_step(
    mode: str, half: str, make_scaler: Callable[[], Any]
) -> None:
    batches = data(40)
    batches[10] = (batches[10][0] * torch.inf, batches[10][1])
    precision, scaler = Precision(mode, half), make_scaler()
    model, optimizer = prepared(precision)
    losses, skipped = [], []
    for inputs, targets in batches:  # as it is documented
        with precision.cast():
            loss = nn.functional.cross_entropy(model(inputs), targets)
        (loss * scaler.scale).backward()
        result = optimizer.step(scaler, max_norm=1.0)
        optimizer.zero_grad()
        losses.append(loss.detach())
        skipped.append(bool(result.skipped))
        assert result.skipped or result.amax <= result.grad_norm
    assert losses[-1] < losses[0] / 3
    assert [step for step, own in enumerate(skipped) if own] == [10]
    other, masters = prepared(precision)
    objective, plan = supervised(nn.CrossEntropyLoss()), Plan(clip_norm=1.0)
    trainer = Trainer(other, masters, objective, precision, make_scaler(), plan=plan)
    for batch in batches:
        trainer.train_step(batch)
    assert same_bits(model.parameters(), other.parameters())
