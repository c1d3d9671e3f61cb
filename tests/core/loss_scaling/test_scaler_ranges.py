"""Arguments out of their range are refused at construction, and the error names the option."""

import math

import pytest
import torch

from mpframe.core.errors import ConfigError
from mpframe.core.loss_scaling import Backoff, LogMax, Static

NO_NUMBERS = [math.nan, math.inf, True, "2", None, [2.0]]
REFUSED = {
    Static: {"scale": [*NO_NUMBERS, 0, -1.0, 1e-46, 1e39, 10**400]},
    Backoff: {
        "min_scale": [math.nan, 0.0, 1e39],
        "max_scale": [math.inf, 0, "2"],
        "init_scale": [math.nan, None, 0.5, 2.0**25, "Probe"],
        "growth_factor": [math.inf, True, 1.0, -2.0, 1e39],
        "backoff_factor": [math.nan, "2", 0.0, 1.0, -0.5],
        "growth_interval": [math.nan, True, 0, -1, 2000.0, 2**31],
        "hysteresis": [None, 0, 1.0, 2**31],
        "half": [torch.float32, "float64", "fp16", None],
    },
    LogMax: {
        "min_scale": [math.inf, 0.0, 1.5],
        "max_scale": [None, -1.0, 65537.0],
        "init_scale": [math.nan, 0.5, 2.0**25, 1000.0, "Probe"],
        "overflow_probability": [math.nan, 0.0, 0.5, -0.001],
        "mean_decay": [True, 1.0, -0.1],
        "variance_decay": ["2", 1.0, -0.1],
        "half": [torch.int16, "float", None],
    },
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind) -> None:
    for argument, values in REFUSED[kind].items():
        for value in values:
            with pytest.raises(ConfigError) as caught:
                kind(**{argument: value})
            text = str(caught.value)
            assert text.startswith(f"loss_scaling.{argument}={value}: must be ")
            assert text.count("; ") == 1  # what is allowed; the way out
            assert "\n" not in text


DEFAULT = "leave it out for the default"


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (Static, {"scale": 0}, f"a number >= 1.175494351e-38 and <= 3.402823466e+38; {DEFAULT}"),
        (Backoff, {"growth_factor": 1.0}, f"a number > 1 and <= 3.402823466e+38; {DEFAULT}"),
        (Backoff, {"backoff_factor": 1.0}, f"a number > 0 and < 1; {DEFAULT}"),
        (Backoff, {"growth_interval": 0}, f"a whole number >= 1 and <= 2147483647; {DEFAULT}"),
        (Backoff, {"min_scale": 8.0, "max_scale": 4.0},
         "at most max_scale, which is 4; lower it, or raise max_scale"),
        (Backoff, {"init_scale": 65536.0, "max_scale": 2.0**10},
         "probe or a number >= 1 and <= 1024; set it, or move min_scale and max_scale"),
        (LogMax, {"overflow_probability": 0.5}, f"a number > 0 and < 0.5; {DEFAULT}"),
        (LogMax, {"mean_decay": 1.0}, f"a number >= 0 and < 1; {DEFAULT}"),
        (LogMax, {"max_scale": 100_000.0}, "a power of two; use 2**16 or 2**17"),
        (LogMax, {"half": torch.float32}, f"float16 or bfloat16; {DEFAULT}"),
    ],
)  # fmt: skip
def test_the_error_says_what_is_allowed_and_the_way_out(kind, options, said) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**options)
    name, value = next(iter(options.items()))
    assert str(caught.value) == f"loss_scaling.{name}={value}: must be {said}"


def test_the_ends_of_the_ranges_are_allowed() -> None:
    largest = torch.finfo(torch.float32).max
    for scaler in (
        Static(0.1),
        Backoff(min_scale=2.0**-126, max_scale=largest, half="float16"),
        Backoff(init_scale=3, min_scale=3, max_scale=3, growth_interval=1, hysteresis=9),
        Backoff(growth_factor=1.0001, backoff_factor=0.999),
        LogMax(min_scale=2.0**-126, max_scale=2.0**127, half="bfloat16"),
        LogMax(overflow_probability=1e-300, mean_decay=0, variance_decay=0.0),
        LogMax(init_scale=1, max_scale=1, overflow_probability=0.4999),
    ):
        assert scaler.scale > 0
