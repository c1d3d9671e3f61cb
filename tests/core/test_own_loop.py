"""`Precision`, `MasterWeights` and a scaler in a loop of the user's own."""

from functools import partial

import pytest
import torch
from prepared import prepared
from torch import nn
from vocabulary import same_bits

from mpframe import Backoff, LogMax, Static
from mpframe.training.trainer import Plan


def data(count):
    generator = torch.Generator().manual_seed(1)
    targets = [torch.randint(0, 4, (16,), generator=generator) for _ in range(count)]
    noise = [torch.randn(16, 8, generator=generator) for _ in range(count)]
    return [(n + 3 * nn.functional.one_hot(t, 8), t) for n, t in zip(noise, targets, strict=True)]


def trainer_of(mode, half, scaler):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    options = {"optimizer": partial(torch.optim.AdamW, lr=1e-2), "plan": Plan(clip_norm=1.0)}
    return prepared(model, nn.CrossEntropyLoss(), mode, half, scaler=scaler, **options)


@pytest.mark.parametrize(
    ("mode", "half", "scaler"),
    [
        ("fp32", "float16", LogMax),
        ("mixed", "float16", Backoff),
        ("mixed", "bfloat16", lambda: Static(2.0**10)),
        ("amp", "float16", LogMax),
        ("amp", "bfloat16", Backoff),
    ],
)
def test_it_learns_skips_an_overflow_and_is_the_trainers_step(mode, half, scaler) -> None:
    batches = data(40)
    batches[10] = (batches[10][0] * torch.inf, batches[10][1])
    by_hand, trainer = (trainer_of(mode, half, scaler()) for _ in range(2))
    model, optimizer, scaler = by_hand.model, by_hand.optimizer, by_hand.scaler
    losses, skipped = [], []
    for inputs, targets in batches:  # as it is documented
        with by_hand.precision.cast():
            loss = nn.functional.cross_entropy(model(inputs), targets)
        (loss * scaler.scale).backward()
        result = optimizer.step(scaler, max_norm=1.0)
        optimizer.zero_grad()
        losses.append(loss.detach())
        skipped.append(bool(result.skipped))
        assert result.skipped or result.amax <= result.grad_norm
    assert losses[-1] < losses[0] / 3
    assert [step for step, own in enumerate(skipped) if own] == [10]
    for batch in batches:
        trainer.train_step(batch)
    assert same_bits(model.parameters(), trainer.model.parameters())
