"""Arguments out of their range are refused at construction, and the error names the option."""

import math

import pytest
import torch

from mpframe.core.errors import ConfigError
from mpframe.core.loss_scaling import Backoff, LogMax, Static

NO_NUMBERS = [math.nan, math.inf, -math.inf, True, "2", None, 1j, [2.0]]
NO_SCALES = [*NO_NUMBERS, 0, 0.0, -1.0, 1e-46, 1e39, 10**400]
SCALE_OPTIONS = [(Static, "scale")] + [
    (kind, option) for kind in (Backoff, LogMax) for option in ("min_scale", "max_scale")
]


def cases(kind, argument, values):
    return [pytest.param(kind, argument, value, id=f"{argument}={value}"[:40]) for value in values]


REFUSED = [
    *(case for kind, option in SCALE_OPTIONS for case in cases(kind, option, NO_SCALES)),
    *cases(Backoff, "init_scale", [*NO_SCALES, 0.5, 2.0**25, "Probe"]),
    *cases(Backoff, "growth_factor", [*NO_NUMBERS, 1, 1.0, 0.5, 0, -2.0, 1e39]),
    *cases(Backoff, "backoff_factor", [*NO_NUMBERS, 0, 0.0, 1, 1.0, 2.0, -0.5]),
    *cases(Backoff, "growth_interval", [*NO_NUMBERS, 0, -1, 2000.0, 2**31]),
    *cases(Backoff, "hysteresis", [*NO_NUMBERS, 0, -1, 1.0, 2**31]),
    *cases(Backoff, "half", [torch.float32, torch.float64, "float64", "fp16", None]),
    *cases(LogMax, "init_scale", [*NO_SCALES, 0.5, 2.0**25, 1000.0, "Probe"]),
    *cases(LogMax, "overflow_probability", [*NO_NUMBERS, 0, 0.0, 0.5, 1.0, -0.001]),
    *cases(LogMax, "mean_decay", [*NO_NUMBERS, 1, 1.0, -0.1, 2.0]),
    *cases(LogMax, "variance_decay", [*NO_NUMBERS, 1, 1.0, -0.1, 2.0]),
    *cases(LogMax, "min_scale", [1.5, 3.0]),
    *cases(LogMax, "max_scale", [65537.0, 3e6]),
    *cases(LogMax, "half", [torch.float32, torch.int16, "float", None]),
]


@pytest.mark.parametrize(("kind", "argument", "value"), REFUSED)
def test_refused(kind, argument, value) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**{argument: value})
    text = str(caught.value)
    assert text.startswith(f"loss_scaling.{argument}={value}: must be ")
    assert text.count("; ") == 1  # what is allowed; the way out
    assert "\n" not in text


DEFAULT = "leave it out for the default"


@pytest.mark.parametrize(
    ("make", "option", "allowed", "way_out"),
    [
        (lambda: Static(0), "scale=0",
         "a number >= 1.175494351e-38 and <= 3.402823466e+38", DEFAULT),
        (lambda: Backoff(growth_factor=1.0), "growth_factor=1.0",
         "a number > 1 and <= 3.402823466e+38", DEFAULT),
        (lambda: Backoff(backoff_factor=1.0), "backoff_factor=1.0",
         "a number > 0 and < 1", DEFAULT),
        (lambda: Backoff(growth_interval=0), "growth_interval=0",
         "a whole number >= 1 and <= 2147483647", DEFAULT),
        (lambda: Backoff(min_scale=8.0, max_scale=4.0), "min_scale=8.0",
         "at most max_scale, which is 4", "lower it, or raise max_scale"),
        (lambda: Backoff(max_scale=2.0**10), "init_scale=65536.0",
         "probe or a number >= 1 and <= 1024", "set it, or move min_scale and max_scale"),
        (lambda: LogMax(overflow_probability=0.5), "overflow_probability=0.5",
         "a number > 0 and < 0.5", DEFAULT),
        (lambda: LogMax(mean_decay=1.0), "mean_decay=1.0", "a number >= 0 and < 1", DEFAULT),
        (lambda: LogMax(max_scale=100_000.0), "max_scale=100000.0",
         "a power of two", "use 2**16 or 2**17"),
        (lambda: LogMax(half=torch.float32), "half=torch.float32",
         "float16 or bfloat16", DEFAULT),
    ],
)  # fmt: skip
def test_the_error_says_what_is_allowed_and_the_way_out(make, option, allowed, way_out) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value) == (f"loss_scaling.{option}: must be {allowed}; {way_out}")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Static(1000),
        lambda: Static(0.1),
        lambda: Backoff(min_scale=2.0**-126, max_scale=torch.finfo(torch.float32).max),
        lambda: Backoff(init_scale=3, min_scale=3, max_scale=3, growth_interval=1, hysteresis=9),
        lambda: Backoff(growth_factor=1.0001, backoff_factor=0.999),
        lambda: LogMax(min_scale=2.0**-126, max_scale=2.0**127),
        lambda: LogMax(overflow_probability=1e-300, mean_decay=0, variance_decay=0.0),
        lambda: LogMax(overflow_probability=0.4999, half=torch.bfloat16),
        lambda: LogMax(init_scale=1, max_scale=1),
        lambda: LogMax(half="bfloat16"),
        lambda: Backoff(half="float16"),
    ],
)
def test_the_ends_of_the_ranges_are_allowed(make) -> None:
    assert make().scale > 0
