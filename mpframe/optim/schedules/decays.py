"""Schedules that fall by a formula, as OpenSeq2Seq has them.

Each is a factor on every group's own learning rate, by the number t of the steps before: 0 for the
first one.
"""

import math
from collections.abc import Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from mpframe.errors import ConfigError
from mpframe.ranges import FRACTION, NOT_NEGATIVE, POSITIVE, Range, require

_COUNT = Range(low=1)


def poly(
    optimizer: Optimizer,
    total_steps: int,
    power: float = 1.0,
    warmup: float = 0.0,
    min_factor: float = 0.0,
    begin: float = 0.0,
) -> LRScheduler:
    """Linear warm-up over w steps, then from step b on a power of what is left of the run.

        t < w:  (t + 1) / (w + 1)
        t < b:  1
        else:   min_factor + (1 - min_factor) * (1 - (t - b) / (total_steps - b))^power

    Args:
        optimizer: whose groups are scheduled.
        total_steps: planned optimizer steps, >= 1.
        power: > 0; 1 falls in a line, 2 steeply at first.
        warmup: share of the steps in which the rate rises, 0 to 1.
        min_factor: the last learning rate as a fraction of the first, 0 to 1.
        begin: share of the steps before the rate falls, 0 to 1; at least the warm-up.

    Raises:
        ConfigError: an argument is out of its range.
    """
    require("scheduler", POSITIVE, power=power)
    fractions = {"warmup": warmup, "min_factor": min_factor, "begin": begin}
    require("scheduler", FRACTION, "a fraction", **fractions)
    rising = int(total_steps * warmup)
    start = max(rising, int(total_steps * begin))
    falling = max(1, total_steps - start)

    def factor(step: int) -> float:
        if step < rising:
            return (step + 1) / (rising + 1)
        left = min(1.0, max(0.0, 1 - (step - start) / falling))
        return float(min_factor + (1 - min_factor) * left**power)

    return LambdaLR(optimizer, factor)


def exponential(
    optimizer: Optimizer,
    factor: float,
    every: float = 1.0,
    begin: float = 0.0,
    staircase: bool = False,
    min_factor: float = 0.0,
    unit: int = 1,
) -> LRScheduler:
    """The rate times `factor` for each `every` that has passed since `begin`.

        t < begin:  1
        else:       max(min_factor, factor^((t - begin) / every))

    Args:
        optimizer: whose groups are scheduled.
        factor: > 0 and <= 1.
        every: in units, > 0.
        begin: in units, >= 0.
        staircase: the exponent is rounded down, so the rate falls in steps.
        min_factor: the lowest learning rate as a fraction of the first, 0 to 1.
        unit: optimizer steps in a unit, >= 1.

    Raises:
        ConfigError: an argument is out of its range.
    """
    require("scheduler", Range(above=0.0, high=1.0), factor=factor)
    require("scheduler", POSITIVE, every=every)
    require("scheduler", NOT_NEGATIVE, begin=begin)
    require("scheduler", _COUNT, unit=unit)
    require("scheduler", FRACTION, "a fraction", min_factor=min_factor)
    start, period = _steps(begin, unit), _steps(every, unit)

    def fallen(step: int) -> float:
        passed = max(0.0, (step - start) / period)
        exponent = math.floor(passed) if staircase else passed
        return float(max(min_factor, factor**exponent))

    return LambdaLR(optimizer, fallen)


def transformer(
    optimizer: Optimizer,
    d_model: int,
    warmup_steps: int,
    coefficient: float = 1.0,
    max_factor: float | None = None,
) -> LRScheduler:
    """The schedule of "Attention Is All You Need" (2017), also called noam.

        coefficient / sqrt(d_model) * min((t + 1) / w^1.5, 1 / sqrt(t + 1))    for w = warmup_steps

    Args:
        optimizer: whose groups are scheduled; a learning rate of 1 or 2 is usual.
        d_model: width of the model, >= 1.
        warmup_steps: steps in which the rate rises, >= 1; less is taken for 1.
        coefficient: a factor on all, > 0.
        max_factor: the rate is at most so many times its own, > 0; None: there is no such bound.

    Raises:
        ConfigError: an argument is out of its range.
    """
    most = math.inf if max_factor is None else max_factor
    require("scheduler", _COUNT, d_model=d_model)
    require("scheduler", POSITIVE, coefficient=coefficient)
    if max_factor is not None:
        require("scheduler", POSITIVE, max_factor=max_factor)
    scale = coefficient / math.sqrt(d_model)
    return LambdaLR(optimizer, lambda step: min(most, scale * _noam(step, warmup_steps)))


def piecewise_constant(
    optimizer: Optimizer,
    boundaries: Sequence[float],
    factors: Sequence[float],
    unit: int = 1,
) -> LRScheduler:
    """The learning rate itself up to the first boundary, then its product with factor after factor.

    Args:
        optimizer: whose groups are scheduled.
        boundaries: in units, rising; the step that begins at a boundary has the new rate.
        factors: one for each boundary, >= 0; all are of the first rate.
        unit: optimizer steps in a unit, >= 1.

    Raises:
        ConfigError: boundaries fall, or are not as many as factors, or an argument is out of its
            range.
    """
    if len(boundaries) != len(factors):
        raise ConfigError(
            f"scheduler.factors: {len(factors)} for {len(boundaries)} boundaries; give one for each"
        )
    if list(boundaries) != sorted(set(boundaries)):
        raise ConfigError(f"scheduler.boundaries={list(boundaries)}: must rise")
    for value in factors:
        require("scheduler", NOT_NEGATIVE, factors=value)
    require("scheduler", _COUNT, unit=unit)
    ends = [_steps(boundary, unit) for boundary in boundaries]
    return LambdaLR(optimizer, lambda step: [1.0, *factors][sum(step >= end for end in ends)])


def _steps(units: float, unit: int) -> float:
    return round(units * unit, 6)  # 0.07 * 100 is 7.000000000000001.


def _noam(step: int, warmup_steps: int) -> float:
    number, warmup = step + 1, max(1, warmup_steps)
    return float(min(number * warmup**-1.5, 1 / math.sqrt(number)))
