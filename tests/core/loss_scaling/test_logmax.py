"""The properties of LogMax, also where its model is wrong.

`replay` runs a scaler over a table of gradients, steps x streams: `update` is element-wise, so one
scaler fed a row per step is as many independent scalers as there are columns.
"""

import copy
import itertools
import math

import pytest
import torch

from mpframe.core.loss_scaling import LogMax, logmax

LIMIT = torch.finfo(torch.float16).max
WIDE = {"min_scale": 2.0**-40, "max_scale": 2.0**60}  # so far out that no clamp takes part
PROBABILITY = 0.001


def replay(scaler, amax, limit=LIMIT):
    """The scale of each step, and whether scale * amax was above `limit`: (steps, streams)."""
    scales, overflows = [], []
    for row in amax:
        scale = scaler.scale.expand(row.shape)
        overflow = row.double() * scale > limit
        scaler.update(torch.where(overflow, torch.inf, row))
        scales.append(scale)
        overflows.append(overflow)
    return torch.stack(scales), torch.stack(overflows)


def log_normal(steps, log2_mean, std, seed=0):
    """Largest gradients whose log2 is normal, one stream per mean: (steps, streams) float32."""
    noise = torch.randn(steps, len(log2_mean), generator=torch.Generator().manual_seed(seed))
    return (log2_mean + std * noise).exp2()


def test_overflows_are_as_rare_as_promised_and_little_room_is_unused() -> None:
    """Log-normal: share of overflows <= 2 p, median unused room <= 3.1 std + 1.5 octaves."""
    std = torch.tensor([0.5, 1.0, 2.0])
    mean = torch.linspace(-6, 6, 24).repeat(3)
    amax = log_normal(1600, mean, std.repeat_interleave(24))
    scale, overflow = (table[100:] for table in replay(LogMax(**WIDE), amax))
    room = math.log2(LIMIT) - (amax[100:] * scale).log2()
    # One stream may have more by chance: those of a spread are judged together.
    room, overflow = (t.view(-1, 3, 24).mT.reshape(-1, 3) for t in (room, overflow))
    assert (overflow.double().mean(0) <= 2 * PROBABILITY).all()
    assert (room.median(0).values <= 3.1 * std + 1.5).all()


def test_an_overflow_halves_the_scale_and_is_forgiven_within_50_clean_steps() -> None:
    """Or nearly; at a wide spread once that is learnt."""
    narrow, wide = (0.0, 0.5), (1.0, 2.0)
    steps = (10, narrow), (30, narrow), (100, narrow), (100, wide), (300, wide)
    for (count, std), bad in itertools.product(steps, (torch.nan, torch.inf)):
        mean = torch.linspace(-6, 6, 100).repeat(2)
        spread, scaler = torch.tensor(std).repeat_interleave(100), LogMax(**WIDE)
        replay(scaler, log_normal(count, mean, spread))
        before = scaler.scale
        scaler.update(torch.full_like(mean, bad))
        assert (scaler.scale <= before / 2).all()
        back, _ = replay(scaler, log_normal(50, mean, spread, seed=1))
        assert (back.amax(0) >= before / 2).all()


def test_it_ignores_zero() -> None:
    """At the start or later."""
    for zero_at in (0, 20):
        plain, given = LogMax(), LogMax()
        for step, amax in enumerate(log_normal(40, torch.tensor([-3.0]), 0.5)[:, 0]):
            if step == zero_at:
                given.update(torch.zeros(()))
            for scaler in (plain, given):
                scaler.update(amax)
            assert given.scale == plain.scale


def test_it_follows_a_jump() -> None:
    """2^8 up costs at most 10 skips; 2^8 down is within a factor 4 of rest in 500 steps."""
    mean = torch.linspace(-4, 0, 100).repeat(4)
    std = torch.tensor([0.0, 0.5, 1.0, 2.0]).repeat_interleave(100)
    scaler = LogMax(**WIDE)
    replay(scaler, log_normal(1000, mean, std))
    _, overflow = replay(copy.deepcopy(scaler), log_normal(500, mean + 8, std, seed=1))
    # Up to 4 of 500 steps overflow by chance alone: 0.5 are expected.
    assert (overflow.sum(0) <= 10).all()
    down, _ = replay(scaler, log_normal(501, mean - 8, std, seed=2))
    rest = (math.log2(LIMIT) - (mean - 8) - 3.09 * std).floor()
    assert ((down[-1].log2() - rest).abs() <= 2).all()


def test_a_cold_start_costs_at_most_6_skips_in_100_steps() -> None:
    """For any true amax from 2^-20 to 2^15."""
    mean, std = torch.linspace(-20, 15, 2000), 0.5
    # At amax = 2^15 a floor of 1 leaves two std of room: 2 more overflows that no scaler can
    # avoid. So the floor is lower here, and the ceiling higher.
    scale, overflow = replay(LogMax(init_scale=2.0**16, **WIDE), log_normal(100, mean, std))
    assert (overflow.sum(0) <= 6).all()
    # A scale that stays at the floor skips nothing either, so it must also be of use by then.
    assert (math.log2(LIMIT) - mean - scale[-1].log2() <= 3.1 * std + 3).all()


# Where the model is wrong. Each overflow that is judged adds 1 - p to the margin m and each other
# step takes p at most, so in N steps at most p N + m of them overflow, and m <= M. Up to the J-th
# observation none is judged: the retreats leave no more than one overflow to a clean step there,
# after three at the start. Together: share <= p + (M + 2 J) / N. The control is LogMax without a
# margin, which breaks the bound in every stream.


def spikes(steps):
    """One step in a hundred is 2^8 times as large as the others."""
    amax = log_normal(steps, torch.linspace(-4, 0, 8), 0.3, seed=1)
    spike = torch.rand(amax.shape, generator=torch.Generator().manual_seed(1)) < 0.01
    return torch.where(spike, amax * 2.0**8, amax)


def one_with_spikes(steps):
    """A single stream is computed with floats, and fast."""
    return spikes(steps)[:, 0], torch.tensor(LIMIT)


def wrong_in_each_way(steps):
    # Something in the backward pass is 2^k times as large as a, k = 1 to 6.
    hidden = log_normal(steps, torch.linspace(-4, 0, 4).repeat(6), 0.5)
    hidden_limit = LIMIT / torch.arange(1.0, 7.0).repeat_interleave(4).exp2()
    # log2 a falls off exponentially: 0.6 % of it lie where a normal one has 0.1 %.
    noise = torch.rand(2, steps, 8, generator=torch.Generator().manual_seed(2)).log()
    heavy_tail = (2**0.5 * (noise[0] - noise[1])).exp2()
    amax = torch.cat([hidden, spikes(steps), heavy_tail], 1)
    return amax, torch.cat([hidden_limit, torch.full((16,), LIMIT)])


WRONG = [(one_with_spikes, 6000), pytest.param(wrong_in_each_way, 20_000, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("case", "steps"), WRONG)
def test_a_margin_keeps_overflows_as_rare_as_promised(case, steps, monkeypatch) -> None:
    bound = PROBABILITY + (logmax.MAX_MARGIN + 2 * logmax.JUDGED_AFTER) / steps
    for margin, keeps in ((logmax.MAX_MARGIN, True), (0.0, False)):
        monkeypatch.setattr(logmax, "MAX_MARGIN", margin)
        _, overflow = replay(LogMax(**WIDE), *case(steps))
        assert ((overflow.double().mean(0) <= bound) == keeps).all()
