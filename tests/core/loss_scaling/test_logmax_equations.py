"""LogMax, mechanism by mechanism. Its properties are in test_logmax.py."""

import copy
import functools
import math

import pytest
import torch
from vocabulary import Kernels

from mpframe.core.loss_scaling import LogMax
from mpframe.core.loss_scaling.logmax import JUDGED_AFTER, MAX_MARGIN, PRIOR_STD, PRIOR_WEIGHT

TOP = math.log2(torch.finfo(torch.float16).max)
QUANTILE = 3.090232306167813  # of the standard normal at 0.999
WIDE = {"min_scale": 2.0**-60, "max_scale": 2.0**60}


def feed(scaler: LogMax, *log2_amax: float) -> LogMax:
    for octave in log2_amax:
        scaler.update(torch.tensor(2.0**octave))
    return scaler


def overflow(scaler: LogMax, times: int = 1) -> LogMax:
    for _ in range(times):
        scaler.update(torch.tensor(math.inf))
    return scaler


def log2_scale(scaler: LogMax) -> float:
    return math.log2(scaler.scale.item())


def margin(scaler: LogMax) -> float:
    return scaler.state_dict()["margin"].item()


@functools.cache
def seen(std: float) -> LogMax:
    noise = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * std
    return feed(LogMax(**WIDE), *noise.tolist())


def settled(std: float = 0.0) -> LogMax:
    """A scaler that has seen 1000 gradients around 1."""
    return copy.deepcopy(seen(std))


@pytest.mark.parametrize("octave", [-9.0, 3.0])
def test_the_first_gradient_alone_decides_with_the_prior_spread(octave: float) -> None:
    scaler = feed(LogMax(**WIDE), octave)
    assert log2_scale(scaler) == math.floor(TOP - octave - QUANTILE * PRIOR_STD)
    assert scaler.log2_mean == octave
    assert scaler.log2_std == PRIOR_STD


def test_the_gains_are_plain_averages_at_first() -> None:
    scaler = feed(LogMax(**WIDE), 0.0, 1.0, 2.0)
    # Mean 0, then 1/2, then 1; the errors it made are 1 and 3/2.
    variance = PRIOR_STD**2
    for n, error in ((1, 1.0), (2, 1.5)):
        variance += (error**2 - variance) / (n + PRIOR_WEIGHT)
    assert scaler.log2_mean.item() == pytest.approx(1.0, rel=1e-14)
    assert scaler.log2_std.item() == pytest.approx(math.sqrt(variance), rel=1e-14)


def test_later_they_are_the_decays() -> None:
    scaler = settled()
    before = scaler.log2_std.item() ** 2
    feed(scaler, 0.25)
    assert scaler.log2_mean.item() == pytest.approx(0.01 * 0.25, rel=1e-6)  # float32 amax
    assert scaler.log2_std.item() ** 2 == pytest.approx(0.999 * before + 0.001 / 16, rel=1e-6)


def test_the_moments_approach_the_truth() -> None:
    scaler = settled(std=0.5)
    # The mean averages about 200 observations, the variance 1000: 0.5/√200 and 0.5/√2000, 3 times.
    assert abs(scaler.log2_mean.item()) < 3 * 0.5 / math.sqrt(200)
    assert abs(scaler.log2_std.item() - 0.5) < 3 * 0.5 / math.sqrt(2000)


def test_retreats_are_1_2_4_8_octaves_before_anything_was_seen() -> None:
    scaler = LogMax(**WIDE)
    assert [log2_scale(overflow(scaler)) for _ in range(5)] == [15, 13, 9, 1, -15]
    assert scaler.log2_std == PRIOR_STD  # overflows alone teach nothing


def test_the_first_retreat_is_one_octave_however_the_quantile_rounds() -> None:
    for probability in torch.linspace(1e-4, 0.49, 100).tolist():
        assert log2_scale(overflow(LogMax(overflow_probability=probability))) == 15


def test_retreats_are_taken_back_in_the_reverse_order() -> None:
    scaler, unhurt = overflow(LogMax(**WIDE), times=4), LogMax(**WIDE)
    behind = [log2_scale(feed(unhurt, 0.0)) - log2_scale(feed(scaler, 0.0)) for _ in range(5)]
    assert behind == [7, 3, 1, 0, 0]


def test_a_long_row_of_overflows_is_forgotten_as_soon_as_eight() -> None:
    scaler, unhurt = overflow(LogMax(), times=1000), LogMax()
    assert scaler.scale == 1.0
    same = [feed(scaler, 0.0).scale.equal(feed(unhurt, 0.0).scale) for _ in range(8)]
    assert same == [False] * 7 + [True]


def test_an_overflow_teaches_the_averages_nothing() -> None:
    scaler = settled(std=0.5)
    before = scaler.log2_mean, scaler.log2_std
    overflow(scaler)
    assert torch.equal(scaler.log2_mean, before[0])
    assert torch.equal(scaler.log2_std, before[1])


def test_a_gradient_beyond_the_room_costs_one_octave() -> None:
    assert margin(feed(settled(), 2.0)) == 1 - 0.001
    scaler, unhurt = overflow(settled()), settled()
    # An overflow leaves the averages alone: the margin is all that differs.
    behind = [log2_scale(feed(unhurt, 0.0)) - log2_scale(feed(scaler, 0.0)) for _ in range(3)]
    assert behind == [1, 1, 1]


def test_a_gradient_within_the_room_costs_nothing() -> None:
    scaler = settled()
    feed(scaler, scaler.log2_mean.item() + 3.0 * scaler.log2_std.item())
    assert margin(scaler) == 0
    feed(scaler, scaler.log2_mean.item() + 3.2 * scaler.log2_std.item())
    assert margin(scaler) > 0


def test_within_the_margin_too_it_costs_nothing() -> None:
    scaler = overflow(settled())
    before = margin(scaler)
    feed(scaler, 0.9)
    assert margin(scaler) < before


@pytest.mark.parametrize("probability", [0.001, 0.01])
def test_the_margin_is_given_back_in_the_time_an_overflow_may_take(probability: float) -> None:
    scaler = overflow(feed(LogMax(overflow_probability=probability, **WIDE), *[0.0] * 1000))
    steps = round(1 / probability)
    feed(scaler, *[0.0] * (steps // 2))
    assert margin(scaler) == pytest.approx(0.5 - probability, rel=1e-9)
    feed(scaler, *[0.0] * steps)
    assert margin(scaler) == 0


def test_the_first_observations_are_not_judged() -> None:
    early = feed(LogMax(**WIDE), *[0.0] * (JUDGED_AFTER - 1))
    assert margin(overflow(early)) == 0
    assert margin(overflow(feed(early, 0.0))) > 0


def test_the_margin_has_an_end() -> None:
    scaler = settled()
    for _ in range(40):
        feed(overflow(scaler), 0.0)
    assert MAX_MARGIN - 0.002 <= margin(scaler) <= MAX_MARGIN


@pytest.mark.parametrize("side", [1.0, -1.0])
def test_a_restart_forgets_the_margin(side: float) -> None:
    scaler = feed(overflow(settled()), 0.0, *[5.0 * side] * 3)
    assert margin(scaler) > 0.9
    assert margin(feed(scaler, 5.0 * side)) == 0


def test_an_overflow_at_the_floor_is_no_surprise() -> None:
    scaler = feed(LogMax(), *[40.0] * 100)
    assert scaler.scale == 1.0
    mean = scaler.log2_mean
    for _ in range(4):
        overflow(scaler)
    assert margin(scaler) == 0
    assert torch.equal(feed(scaler, 40.0).log2_mean, mean)
    assert scaler.state_dict()["count"] == 101  # it never restarted


def test_zero_leaves_every_tensor_as_it_is() -> None:
    scaler = overflow(feed(LogMax(), 0.0, 0.3, 5.0))
    before = scaler.state_dict()
    scaler.update(torch.tensor(0.0))
    assert scaler.state_dict() == before


@pytest.mark.parametrize("shift", [3.0, -3.0])
def test_four_surprises_in_a_row_on_one_side_restart(shift: float) -> None:
    scaler = feed(settled(std=0.5), *[shift] * 3)
    assert abs(scaler.log2_mean.item()) < 0.5
    feed(scaler, shift)
    assert scaler.log2_mean == shift
    assert scaler.log2_std == PRIOR_STD


@pytest.mark.parametrize("breaker", [0.0, -3.0])
def test_an_expected_gradient_or_the_other_side_breaks_the_row(breaker: float) -> None:
    row = [3.0] * 3
    scaler = feed(settled(std=0.5), *row, breaker, *row)
    assert abs(scaler.log2_mean.item()) < 0.5


@pytest.mark.parametrize("side", [1.0, -1.0])
def test_a_restart_ends_the_row(side: float) -> None:
    scaler = feed(settled(std=0.5), *[3.0 * side] * 4)
    feed(scaler, 9.0 * side)  # one more surprise is one, not the fifth
    assert scaler.log2_mean.item() == pytest.approx((3.0 + 9.0) / 2 * side)


def test_what_was_assumed_before_the_first_gradient_surprises_nobody() -> None:
    high = feed(overflow(LogMax(**WIDE), times=2), 2.5, 5.0)
    assert high.log2_mean.item() == pytest.approx((2.5 + 5.0) / 2)
    low = feed(LogMax(**WIDE), -20.0, -23.0, -29.0, -40.0)
    assert low.log2_mean.item() == pytest.approx((-20 - 23 - 29 - 40) / 4)


def test_overflows_are_surprises_too() -> None:
    scaler = overflow(settled(), times=4)
    feed(scaler, 6.0)
    assert scaler.log2_mean == 6.0


@pytest.mark.parametrize(("half", "octave"), [(torch.float16, 3.0), (torch.bfloat16, 110.0)])
def test_the_formats_own_maximum_counts(half: torch.dtype, octave: float) -> None:
    scaler = feed(LogMax(half=half, **WIDE), *[octave] * 60)
    limit = torch.finfo(half).max
    assert limit / 4 < scaler.scale.item() * 2.0**octave <= limit


@pytest.mark.parametrize("probability", [1e-6, 0.1])
def test_a_smaller_probability_leaves_more_room(probability: float) -> None:
    quantile = -torch.special.ndtri(torch.tensor(probability, dtype=torch.float64)).item()
    scaler = feed(LogMax(overflow_probability=probability, **WIDE), 0.0)
    assert log2_scale(scaler) == math.floor(TOP - quantile * PRIOR_STD)


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
        for name, own in alone.state.items():
            other = of_device.state[name]
            assert own.dtype == other.dtype
            assert own.shape == ()
            assert torch.equal(own.reshape(1), other), name


def test_on_a_cpu_no_kernel_decides() -> None:
    """Each would take longer than all the arithmetic on floats."""
    scaler, kernels = feed(LogMax(), -10.0), Kernels()
    with kernels:
        feed(scaler, -10.0)
    ran = {kernel.name for kernel in kernels.ran}
    assert "log2" in ran
    assert not {"where", "clamp", "lt", "frexp"} & ran, ran
