"""Prints the table of docs/loss_scaling.md that sets LogMax beside the published algorithm."""

import math

import torch
from test_logmax import LIMIT, WIDE, PublishedLogMax, log_normal, octaves_from_rest, replay

from mpframe.core.loss_scaling import LogMax


def print_numbers(make) -> None:
    """Print one column of the table."""
    print(make.__name__)
    scaler = make()
    replay(scaler, torch.ones(200, 1))
    before = scaler.scale.clone()
    scaler.update(torch.full((1,), torch.nan))
    back = replay(scaler, torch.ones(20_000, 1))[0][:, 0] >= before
    print("  clean steps until back after one nan:", int(back.int().argmax()) or "more than 20000")
    amax = log_normal(20_100, torch.linspace(-6, 6, 24), 1.0)
    scale, _ = replay(make(**WIDE), amax)
    room = math.log2(LIMIT) - (amax * scale).log2()[100:].median(0).values.max()
    print(f"  median room at a spread of 1: {room:.1f} octaves")
    mean, scaler = torch.linspace(-4, 0, 100), make(**WIDE)
    replay(scaler, log_normal(2000, mean, 0.5))
    down, _ = replay(scaler, log_normal(501, mean - 8, 0.5, 2))
    far = octaves_from_rest(down[-1], mean - 8, 0.5).max()
    print(f"  after a jump down: worst {far:.0f} octaves from rest")
    cold = log_normal(100, torch.linspace(-20, 15, 2000), 0.5)
    _, overflow = replay(make(init_scale=2.0**16, **WIDE), cold)
    print(f"  cold start: worst {overflow.sum(0).max()} skips")


if __name__ == "__main__":
    print_numbers(PublishedLogMax)
    print_numbers(LogMax)
