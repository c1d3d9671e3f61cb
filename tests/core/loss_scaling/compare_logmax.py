"""Prints the table of docs/loss_scaling.md that sets LogMax beside the published algorithm."""

import math

import torch
from published_logmax import PublishedLogMax
from test_logmax import LIMIT, WIDE, log_normal, octaves_between, replay

from mpframe.core.loss_scaling import LogMax


def steps_until_back(scaler):
    """Count the clean steps after one nan until the scale is where it was."""
    replay(scaler, torch.ones(200, 1))
    before = scaler.scale.clone()
    scaler.update(torch.full((1,), torch.nan))
    back = replay(scaler, torch.ones(20_000, 1)).scale[:, 0] >= before
    return int(back.int().argmax()) if back.any() else "more than 20000"


def print_numbers(make) -> None:
    """Print one column of the table."""
    print(make.__name__)
    print("  clean steps until back after one nan:", steps_until_back(make()))
    amax = log_normal(20_100, torch.linspace(-6, 6, 24), 1.0)
    scale, _ = replay(make(**WIDE), amax)
    room = math.log2(LIMIT) - (amax * scale).log2()[100:].median(0).values.max()
    print(f"  median room at a spread of 1: {room:.1f} octaves")
    mean, scaler = torch.linspace(-4, 0, 100), make(**WIDE)
    replay(scaler, log_normal(2000, mean, 0.5))
    down = replay(scaler, log_normal(501, mean - 8, 0.5, 2)).scale[-1]
    rest = (math.log2(LIMIT) - (mean - 8) - 3.09 * 0.5).floor().exp2()
    print(f"  after a jump down: worst {octaves_between(down, rest).max():.0f} octaves from rest")
    cold = log_normal(100, torch.linspace(-20, 15, 2000), 0.5)
    skips = replay(make(init_scale=2.0**16, **WIDE), cold).overflow.sum(0).max()
    print(f"  cold start: worst {skips} skips")


if __name__ == "__main__":
    print_numbers(PublishedLogMax)
    print_numbers(LogMax)
