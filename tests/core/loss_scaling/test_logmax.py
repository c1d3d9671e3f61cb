"""LogMax: its mechanisms, on a CPU and as on an accelerator; its properties, also where its model
is wrong."""

import copy
import itertools
import math

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import metrics
from vocabulary import Kernels, differing

from mpframe.core.loss_scaling import LogMax, logmax
from mpframe.core.loss_scaling.logmax import JUDGED_AFTER, MAX_MARGIN, PRIOR_STD, PRIOR_WEIGHT

LIMIT = torch.finfo(torch.float16).max
WIDE = {"min_scale": 2.0**-60, "max_scale": 2.0**60}  # so far out that no clamp takes part
PROBABILITY = 0.001


def feed(scaler, *log2_amax):
    for octave in log2_amax:
        scaler.update(torch.tensor(2.0**octave))
    return scaler


def overflow(scaler, times=1):
    return feed(scaler, *[math.inf] * times)


def log2_scale(scaler):
    return math.log2(scaler.scale.item())


def numbers(scaler):
    """Its mean and spread in octaves, and its margin."""
    return scaler.log2_mean.item(), scaler.log2_std.item(), margin(scaler)


def margin(scaler):
    return scaler.state["margin"].item()


def octaves_behind(scaler, unhurt, steps):
    """By how much the one has the lower scale, after each of so many gradients of 1."""
    return [log2_scale(feed(unhurt, 0.0)) - log2_scale(feed(scaler, 0.0)) for _ in range(steps)]


def settled(std=0.0, **options):
    """A scaler that has seen 1000 gradients around 1."""
    noise = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * std
    return feed(LogMax(**WIDE, **options), *noise.tolist())


def test_the_first_gradient_decides_with_the_prior_spread() -> None:
    """A smaller probability leaves more room: the quantile of the standard normal at 1 - p."""
    for octave, probability, quantile, half in (
        (-9.0, 0.001, 3.09023, torch.float16),
        (110.0, 0.001, 3.09023, torch.bfloat16),
        (0.0, 1e-6, 4.75342, torch.float16),
        (0.0, 0.1, 1.28155, torch.float16),
    ):
        scaler = feed(LogMax(overflow_probability=probability, half=half, **WIDE), octave)
        top = math.log2(torch.finfo(half).max)
        assert log2_scale(scaler) == math.floor(top - octave - quantile * PRIOR_STD)
        assert numbers(scaler) == (octave, PRIOR_STD, 0)


def test_the_gains_are_plain_averages_at_first_and_later_the_decays() -> None:
    variance = PRIOR_STD**2
    for n, error in ((1, 1.0), (2, 1.5)):  # The mean was 0, then 1/2, then 1.
        variance += (error**2 - variance) / (n + PRIOR_WEIGHT)
    mean, std, _ = numbers(feed(LogMax(**WIDE), 0.0, 1.0, 2.0))
    assert (mean, std) == pytest.approx((1.0, math.sqrt(variance)), rel=1e-14)
    _, before, _ = numbers(settled())
    mean, std, _ = numbers(feed(settled(), 0.25))  # float32 amax
    expected = (0.01 * 0.25, 0.999 * before**2 + 0.001 / 16)
    assert (mean, std**2) == pytest.approx(expected, rel=1e-6)


def test_retreats_are_1_2_4_8_octaves_and_taken_back_in_the_reverse_order() -> None:
    scaler = LogMax(**WIDE)
    assert [log2_scale(overflow(scaler)) for _ in range(5)] == [15, 13, 9, 1, -15]
    assert octaves_behind(overflow(LogMax(**WIDE), 4), LogMax(**WIDE), 5) == [7, 3, 1, 0, 0]
    for probability in torch.linspace(1e-4, 0.49, 100).tolist():  # However the quantile rounds.
        assert log2_scale(overflow(LogMax(overflow_probability=probability))) == 15
    behind = octaves_behind(overflow(LogMax(), 1000), LogMax(), 8)  # As of eight.
    assert behind[-1] == 0 < min(behind[:-1])


def test_an_overflow_costs_an_octave_and_teaches_the_averages_nothing() -> None:
    """At the floor it is no surprise."""
    scaler, unhurt = overflow(settled()), settled()
    assert numbers(scaler)[:2] == numbers(unhurt)[:2]
    assert octaves_behind(scaler, unhurt, 3) == [1, 1, 1]
    scaler = feed(LogMax(), *[40.0] * 100)
    before = numbers(scaler)
    assert (scaler.scale, numbers(overflow(scaler, 4))) == (1.0, before)
    assert numbers(feed(scaler, 40.0))[::2] == (before[0], 0)
    assert scaler.state["count"] == 101  # it never restarted


def test_a_gradient_costs_an_octave_if_it_is_beyond_the_room_with_its_margin() -> None:
    assert margin(feed(settled(), 2.0)) == 1 - 0.001
    for times, costs in ((3.0, False), (3.2, True)):
        scaler = settled()
        mean, std, _ = numbers(scaler)
        assert bool(margin(feed(scaler, mean + times * std))) is costs
    scaler = overflow(settled())
    assert margin(feed(copy.deepcopy(scaler), 0.9)) < margin(scaler)


def test_the_margin_begins_with_the_first_judged_observation_is_given_back_and_has_an_end() -> None:
    """It takes as long to give back as one overflow may take."""
    early = feed(LogMax(**WIDE), *[0.0] * (JUDGED_AFTER - 1))
    assert margin(overflow(early)) == 0
    assert margin(overflow(feed(early, 0.0))) > 0
    for probability in (0.001, 0.01):
        scaler = overflow(settled(overflow_probability=probability))
        steps = round(1 / probability)
        feed(scaler, *[0.0] * (steps // 2))
        assert margin(scaler) == pytest.approx(0.5 - probability, rel=1e-9)
        assert margin(feed(scaler, *[0.0] * steps)) == 0
    scaler = feed(settled(), *[math.inf, 0.0] * 40)
    assert MAX_MARGIN - 0.002 <= margin(scaler) <= MAX_MARGIN


@pytest.mark.parametrize("side", [1.0, -1.0])
def test_four_surprises_in_a_row_on_one_side_restart(side) -> None:
    """An expected gradient, or one on the other side, breaks the row; a restart ends it."""
    shift = 3.0 * side
    for breaker in ([], [0.0, *[shift] * 3], [-shift, *[shift] * 3]):
        scaler = feed(settled(std=0.5), *[shift] * 3, *breaker)
        assert abs(scaler.log2_mean) < 0.5
    scaler = feed(settled(std=0.5), *[shift] * 4)
    assert (scaler.log2_mean, scaler.log2_std) == (shift, PRIOR_STD)
    feed(scaler, 3 * shift)  # one more surprise is one, not the fifth
    assert scaler.log2_mean.item() == pytest.approx((shift + 3 * shift) / 2)
    scaler = feed(overflow(settled()), 0.0, *[5.0 * side] * 3)
    assert margin(scaler) > 0.9
    assert margin(feed(scaler, 5.0 * side)) == 0


def test_overflows_are_surprises_and_what_was_assumed_before_the_first_gradient_is_none() -> None:
    assert feed(overflow(settled(), times=4), 6.0).log2_mean == 6.0
    high = feed(overflow(LogMax(**WIDE), times=2), 2.5, 5.0)
    low = feed(LogMax(**WIDE), -20.0, -23.0, -29.0, -40.0)
    assert (high.log2_mean, low.log2_mean) == pytest.approx((7.5 / 2, -112 / 4))


def gradients(steps):
    """Of two levels, with overflows, zeros and nan among them."""
    noise = torch.randn(steps, generator=torch.Generator().manual_seed(0))
    amaxes = torch.exp2(3 * noise - 10.0 * (torch.arange(steps) > steps // 2))
    amaxes[::70], amaxes[5::90], amaxes[80:84] = math.inf, 0.0, math.nan
    return amaxes


def test_floats_of_the_host_and_tensors_of_a_device_have_the_same_bits() -> None:
    """Several scalers in one tensor take the way of a device. On a CPU it computes with floats,
    and no kernel decides: each would take longer than all the arithmetic."""
    alone, of_device, kernels = LogMax(**WIDE), LogMax(**WIDE), Kernels()
    of_device.state = {name: own.reshape(1) for name, own in of_device.state.items()}
    for amax in gradients(600):
        with kernels:
            alone.update(amax)
        of_device.update(amax.reshape(1))
        assert {own.shape for own in alone.state.values()} == {()}
        of_host = {name: own.reshape(1) for name, own in alone.state.items()}
        assert differing(of_host, of_device.state) == []
    ran = {kernel.name for kernel in kernels.ran}
    assert "log2" in ran
    assert not {"where", "clamp", "lt", "frexp"} & ran, ran


@pytest.fixture
def triton(monkeypatch) -> None:
    """As if the CPU were an accelerator that Inductor can compile for."""
    monkeypatch.setattr(logmax, "has_triton", lambda: True)
    monkeypatch.setattr(logmax, "host_waits_for", lambda _: True)
    logmax._ways.cache_clear()
    yield
    logmax._ways.cache_clear()


def state_after(steps):
    scaler = LogMax()
    for amax in gradients(steps):
        scaler.update(amax)
    return scaler.state


@pytest.mark.slow
@pytest.mark.usefixtures("triton")
def test_its_update_is_one_kernel_with_the_bits_of_the_host(monkeypatch) -> None:
    metrics.reset()
    counters.clear()
    compiled = state_after(200)
    assert (metrics.generated_kernel_count, counters["stats"]["unique_graphs"]) == (1, 1)
    assert not counters["graph_break"]
    monkeypatch.setattr(logmax, "host_waits_for", lambda _: False)
    assert differing(compiled, state_after(200)) == []


@pytest.mark.usefixtures("triton")
def test_without_a_compiler_it_says_so_once_and_goes_on_op_by_op(monkeypatch, caplog) -> None:
    def no_compiler(*_):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: no_compiler)
    by_op = state_after(3)
    assert caplog.messages == [
        "loss_scaling=LogMax: not compiled, so it takes longer: Failed to find C compiler"
    ]
    monkeypatch.setattr(logmax, "host_waits_for", lambda _: False)
    assert differing(by_op, state_after(3)) == []


def replay(scaler, amax, limit=LIMIT):
    """The scale of each step, and whether scale * amax was above `limit`: (steps, streams).

    `update` is element-wise, so one scaler fed a row per step is as many independent scalers.
    """
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
    bound = PROBABILITY + (MAX_MARGIN + 2 * JUDGED_AFTER) / steps
    for margin, keeps in ((MAX_MARGIN, True), (0.0, False)):
        monkeypatch.setattr(logmax, "MAX_MARGIN", margin)
        _, overflow = replay(LogMax(**WIDE), *case(steps))
        assert ((overflow.double().mean(0) <= bound) == keeps).all()
