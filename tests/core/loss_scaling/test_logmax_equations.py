"""LogMax, mechanism by mechanism, on a CPU and as on an accelerator. Its properties are in
test_logmax.py."""

import copy
import math

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import metrics
from vocabulary import Kernels, differing

from mpframe.core.loss_scaling import LogMax, logmax
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
