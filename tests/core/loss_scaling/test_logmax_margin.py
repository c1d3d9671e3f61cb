"""LogMax keeps its promise where the model is wrong: hidden limits, spikes and heavy tails.

Each overflow that is judged adds 1 - p to the margin m and each other step takes p at most, so in N
steps at most p N + m of them overflow, and m <= M. Up to the J-th observation none is judged: the
retreats leave no more than one overflow to a clean step there, after three at the start. Together:

    share <= p + (M + 2 J) / N

The control is LogMax without a margin. It is told the same and breaks the bound in every stream.
"""

import pytest
import torch
from test_logmax import LIMIT, PROBABILITY, WIDE, log_normal, replay
from torch import Tensor

from mpframe.core.loss_scaling import LogMax, logmax

STEPS = 20_000
BOUND = PROBABILITY + (logmax.MAX_MARGIN + 2 * logmax.JUDGED_AFTER) / STEPS


def hidden_limit() -> tuple[Tensor, Tensor]:
    """Something in the backward pass is 2^k times as large as a, k = 1 to 6."""
    amax = log_normal(STEPS, torch.linspace(-4, 0, 4).repeat(6), 0.5)
    octaves = torch.arange(1.0, 7.0).repeat_interleave(4)
    return amax, LIMIT / octaves.exp2()


def spikes() -> tuple[Tensor, Tensor]:
    """One step in a hundred is 2^8 times as large as the others."""
    amax = log_normal(STEPS, torch.linspace(-4, 0, 8), 0.3, seed=1)
    spike = torch.rand(amax.shape, generator=torch.Generator().manual_seed(1)) < 0.01
    return torch.where(spike, amax * 2.0**8, amax), torch.full((8,), LIMIT)


def heavy_tail() -> tuple[Tensor, Tensor]:
    """log2 a falls off exponentially: 0.6 % of it lie where a normal one has 0.1 %."""
    noise = torch.rand(2, STEPS, 8, generator=torch.Generator().manual_seed(2)).log()
    return (2**0.5 * (noise[0] - noise[1])).exp2(), torch.full((8,), LIMIT)


CASES = (hidden_limit, spikes, heavy_tail)


def shares() -> dict[str, Tensor]:
    """Per case and stream the share of steps that overflowed."""
    amax, limits = zip(*(case() for case in CASES), strict=True)
    done = replay(LogMax(**WIDE), torch.cat(amax, 1), torch.cat(limits))
    parts = done.overflow.double().mean(0).split([len(limit) for limit in limits])
    return dict(zip((case.__name__ for case in CASES), parts, strict=True))


def test_overflows_stay_as_rare_as_promised() -> None:
    broken = {case for case, share in shares().items() if (share > BOUND).any()}
    assert broken == set()


def test_without_a_margin_they_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logmax, "MAX_MARGIN", 0.0)
    kept = {case for case, share in shares().items() if (share <= BOUND).any()}
    assert kept == set()
