"""LogMax, mechanism by mechanism. Its properties are in test_logmax.py."""

import copy
import functools
import math

import pytest
import torch
from vocabulary import Kernels, differing

from mpframe.core.loss_scaling import LogMax
from mpframe.core.loss_scaling.logmax import JUDGED_AFTER, MAX_MARGIN, PRIOR_STD, PRIOR_WEIGHT

WIDE = {"min_scale": 2.0**-60, "max_scale": 2.0**60}


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


@functools.cache
def seen(std):
    noise = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * std
    return feed(LogMax(**WIDE), *noise.tolist())


def settled(std=0.0):
    """A scaler that has seen 1000 gradients around 1."""
    return copy.deepcopy(seen(std))


@pytest.mark.parametrize(
    ("octave", "probability", "quantile", "half"),
    [
        (-9.0, 0.001, 3.09023, torch.float16),
        (110.0, 0.001, 3.09023, torch.bfloat16),
        (0.0, 1e-6, 4.75342, torch.float16),
        (0.0, 0.1, 1.28155, torch.float16),
    ],
)
def test_the_first_gradient_decides_with_the_prior_spread(
    octave, probability, quantile, half
) -> None:
    """A smaller probability leaves more room: the quantile of the standard normal at 1 - p."""
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
    # The mean averages about 200 observations, the variance 1000: 0.5/√200 and 0.5/√2000, 3 times.
    mean, std, _ = numbers(settled(0.5))
    assert abs(mean) < 3 * 0.5 / math.sqrt(200)
    assert abs(std - 0.5) < 3 * 0.5 / math.sqrt(2000)


def test_retreats_are_1_2_4_8_octaves_and_taken_back_in_the_reverse_order() -> None:
    scaler = LogMax(**WIDE)
    assert [log2_scale(overflow(scaler)) for _ in range(5)] == [15, 13, 9, 1, -15]
    assert octaves_behind(overflow(LogMax(**WIDE), 4), LogMax(**WIDE), 5) == [7, 3, 1, 0, 0]
    for probability in torch.linspace(1e-4, 0.49, 100).tolist():  # However the quantile rounds.
        assert log2_scale(overflow(LogMax(overflow_probability=probability))) == 15
    behind = octaves_behind(overflow(LogMax(), 1000), LogMax(), 8)  # As of eight.
    assert behind[-1] == 0 < min(behind[:-1])


def test_an_overflow_costs_an_octave_and_teaches_the_averages_nothing() -> None:
    scaler, unhurt = overflow(settled()), settled()
    assert numbers(scaler)[:2] == numbers(unhurt)[:2]
    assert octaves_behind(scaler, unhurt, 3) == [1, 1, 1]


def test_a_gradient_costs_an_octave_if_it_is_beyond_the_room_with_its_margin() -> None:
    assert margin(feed(settled(), 2.0)) == 1 - 0.001
    for times, costs in ((3.0, False), (3.2, True)):
        scaler = settled()
        mean, std, _ = numbers(scaler)
        assert bool(margin(feed(scaler, mean + times * std))) is costs
    scaler = overflow(settled())
    assert margin(feed(copy.deepcopy(scaler), 0.9)) < margin(scaler)


@pytest.mark.parametrize("probability", [0.001, 0.01])
def test_the_margin_is_given_back_in_the_time_an_overflow_may_take(probability) -> None:
    scaler = overflow(feed(LogMax(overflow_probability=probability, **WIDE), *[0.0] * 1000))
    steps = round(1 / probability)
    feed(scaler, *[0.0] * (steps // 2))
    assert margin(scaler) == pytest.approx(0.5 - probability, rel=1e-9)
    assert margin(feed(scaler, *[0.0] * steps)) == 0


def test_the_margin_begins_with_the_first_judged_observation_and_has_an_end() -> None:
    early = feed(LogMax(**WIDE), *[0.0] * (JUDGED_AFTER - 1))
    assert margin(overflow(early)) == 0
    assert margin(overflow(feed(early, 0.0))) > 0
    scaler = feed(settled(), *[math.inf, 0.0] * 40)
    assert MAX_MARGIN - 0.002 <= margin(scaler) <= MAX_MARGIN


def test_an_overflow_at_the_floor_is_no_surprise() -> None:
    scaler = feed(LogMax(), *[40.0] * 100)
    before = numbers(scaler)
    assert (scaler.scale, numbers(overflow(scaler, 4))) == (1.0, before)
    assert numbers(feed(scaler, 40.0))[::2] == (before[0], 0)
    assert scaler.state["count"] == 101  # it never restarted


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


def test_floats_of_the_host_and_tensors_of_a_device_have_the_same_bits() -> None:
    """On a CPU it computes with floats; several scalers in one tensor take the way of a device."""
    generator = torch.Generator().manual_seed(0)
    octaves = 3 * torch.randn(600, generator=generator) - 10.0 * (torch.arange(600) > 300)
    amaxes = torch.exp2(octaves)
    amaxes[::70], amaxes[5::90], amaxes[400:410] = math.inf, 0.0, math.nan
    alone, of_device = LogMax(**WIDE), LogMax(**WIDE)
    of_device.state = {name: own.reshape(1) for name, own in of_device.state.items()}
    for amax in amaxes:
        alone.update(amax)
        of_device.update(amax.reshape(1))
        assert {own.shape for own in alone.state.values()} == {()}
        of_host = {name: own.reshape(1) for name, own in alone.state.items()}
        assert differing(of_host, of_device.state) == []


def test_on_a_cpu_no_kernel_decides() -> None:
    """Each would take longer than all the arithmetic on floats."""
    scaler, kernels = feed(LogMax(), -10.0), Kernels()
    with kernels:
        feed(scaler, -10.0)
    ran = {kernel.name for kernel in kernels.ran}
    assert "log2" in ran
    assert not {"where", "clamp", "lt", "frexp"} & ran, ran
