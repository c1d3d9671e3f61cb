"""A diagnosis's remedy in words for the command line, as the autopsy and the doctor print it.

A scale's words name the scaler: one that `loss_scaling=auto` chose has no options to set.
"""

import math
from collections.abc import Iterator

from mpframe.config.overrides import deny_words, pin_words
from mpframe.lab.autopsy.diagnosis import Diagnosis, Kind
from mpframe.lab.autopsy.replay import Case, Setting
from mpframe.lab.hints import ADAPTIVE

CEILING = 2.0**24  # of Backoff and LogMax, unless an option moves it


def remedy_words(diagnosis: Diagnosis, case: Case, ceiling: float = CEILING) -> tuple[str, ...]:
    """Return the words that mend the step, none if no option of the precision does.

    Pins and ops are the ones that were tried, or fp32 if none helped. `ceiling` is the largest
    scale that the run's scaler takes.
    """
    if diagnosis.kind is Kind.BEYOND_FORMAT:
        return setting_words(diagnosis.remedy) if diagnosis.proven else ("dtype=fp32",)
    if diagnosis.kind in (Kind.SCALE_TOO_HIGH, Kind.UNDERFLOW):
        return tuple(_scale_words(case, fitting_scale(diagnosis, case), ceiling))
    return ()


def setting_words(setting: Setting) -> tuple[str, ...]:
    """Return the words for a replay's pins and ops, none if it had none."""
    return (*pin_words(setting.pins), *deny_words(setting.denied))


def fitting_scale(diagnosis: Diagnosis, case: Case) -> float:
    """Return a power of two that is low enough for the step, or high enough."""
    if diagnosis.octaves < 0:
        # An octave below the scale that was tried: the next batch may have larger gradients.
        return 2.0 ** (math.floor(math.log2(min(case.scales.values())) + diagnosis.octaves) - 1)
    return 2.0 ** math.floor(math.log2(max(case.scales.values())) + diagnosis.octaves)


def scaler_goes_there(diagnosis: Diagnosis, case: Case) -> bool:
    """Return whether the scaler itself goes down to the scale at which the step was finite."""
    times = 2.0**diagnosis.octaves
    return all(case.floors.get(name, scale) <= scale * times for name, scale in case.scales.items())


def _scale_words(case: Case, scale: float, ceiling: float) -> Iterator[str]:
    if case.scaling == "static":
        yield from ("loss_scaling=static", f"loss_scaling.scale={_exactly(scale)}")
        return
    yield f"loss_scaling={case.scaling if case.scaling in ADAPTIVE else ADAPTIVE[0]}"
    yield f"loss_scaling.init_scale={_exactly(scale)}"
    if scale < max(case.floors.values(), default=1.0):
        yield f"loss_scaling.min_scale={_exactly(scale)}"
    if scale > ceiling:
        yield f"loss_scaling.max_scale={_exactly(scale)}"


def _exactly(power: float) -> str:
    """Write a power of two in all its digits."""
    return str(int(power)) if power >= 1.0 else repr(power)
