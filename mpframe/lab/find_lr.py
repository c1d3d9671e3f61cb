"""A learning rate, by a range test (Smith 2015): the rate grows from step to step until it fails.

    rate of step k = low * (high / low)^(k / (steps - 1))

At the first, tiny rates the loss only shows its noise from batch to batch. Then it falls, and at
last it blows up. The suggestion is the rate at which half of the fall is done, in the middle of the
steep part. A derivative would find nearly the same place, and follow the noise.

With several groups of parameters all rates grow by the same factor. A step whose gradients overflow
is skipped, as in training, and has no part in the curve.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mpframe.core.callback import Batch
from mpframe.core.errors import ConfigError
from mpframe.core.ranges import POSITIVE, require, require_whole
from mpframe.lab.pictures import new_figure, save
from mpframe.training.probe import wants_probe
from mpframe.training.rollback import rollback
from mpframe.training.trainer import Loader, Trainer

log = logging.getLogger(__name__)

_DECAY = 0.9  # of the running mean that ends the test
_LOST = 5  # losses in a row that are not finite, which end it as well
_WIDTH = 0.03  # of the smoothed curve's window, as a share of the steps
_FIRST = 0.15  # the share of the steps whose losses show the noise
_SURE = 4.0  # A fall of so many standard errors is no noise.


@dataclass(frozen=True)
class RangeTest:
    """The steps of a range test, and what they suggest."""

    rates: NDArray[np.float64]  # [steps tried], rising
    losses: NDArray[np.float64]  # unscaled, of each step; may be inf or nan
    skipped: NDArray[np.bool_]  # whether its gradients overflowed
    planned: int  # steps
    blew_up: bool  # before all of them were tried

    @property
    def smooth(self) -> NDArray[np.float64]:
        """The losses of applied steps, smoothed on both sides; nan where there is none."""
        known = ~self.skipped & np.isfinite(self.losses)
        width = max(1.0, _WIDTH * self.planned)
        away = np.subtract.outer(np.arange(len(known)), np.arange(len(known))) / width
        weights = np.exp(-0.5 * away**2) * known
        with np.errstate(invalid="ignore"):
            means = weights @ np.where(known, self.losses, 0.0) / weights.sum(axis=1)
        return np.where(known, means, np.nan)

    @property
    def start(self) -> tuple[float, float]:
        """The mean loss at the first rates, and its standard deviation from step to step."""
        first = self.losses[~self.skipped & np.isfinite(self.losses)]
        first = first[: max(3, math.ceil(_FIRST * self.planned))]
        return (float(first.mean()), float(first.std())) if len(first) else (math.nan, math.nan)

    @property
    def best(self) -> int:
        """The number of the step at which the smoothed loss is lowest, -1 if no step was applied.

        The last steps of a curve that blew up count as well, since they are high.
        """
        smooth = self.smooth
        return -1 if np.isnan(smooth).all() else int(np.nanargmin(smooth))

    @property
    def suggestion(self) -> float | None:
        """The rate at which half of the fall is done, 2 digits, or None if nothing fell."""
        (start, noise), smooth, best = self.start, self.smooth, self.best
        # The smoothed loss is a mean over about this many steps.
        error = noise / math.sqrt(max(1.0, 3.5 * _WIDTH * self.planned))
        if best < 0 or not start - smooth[best] > _SURE * error:
            return None
        middle = (start + smooth[best]) / 2
        above = np.flatnonzero(smooth[: best + 1] > middle)  # The curve crosses it after the last.
        return float(f"{self.rates[min(best, above[-1] + 1 if len(above) else 0)]:.1e}")

    def describe(self) -> str:
        """Say how sure it is: the steps, the loss at the start, at best, and at the end."""
        (start, noise), best = self.start, self.best
        tried, skipped = len(self.rates), int(self.skipped.sum())
        said = [f"{tried} of {self.planned} steps from {self.rates[0]:.2g}"]
        said += [f"loss {start:.4g} at the start, give or take {noise:.2g}"]
        if best >= 0:
            said += [f"{self.smooth[best]:.4g} at best, at {self.rates[best]:.2g}"]
        said += [f"{'blown up' if self.blew_up else 'not blown up'} at {self.rates[-1]:.2g}"]
        said += [f"{skipped} overflowed and were skipped"] * (skipped > 0)
        return ", ".join(said)


def find_lr(
    trainer: Trainer,
    train: Loader,
    lr: float | None = None,
    low: float = 1e-7,
    high: float = 10.0,
    steps: int = 100,
) -> RangeTest:
    """Try rising learning rates on the training data, and leave the trainer as it was.

    Args:
        trainer: before its training. Its schedule is left out.
        train: its batches, epoch after epoch.
        lr: the rate that the tried ones stand for, by default the first group's. Each group keeps
            its ratio to it.
        low, high: the first and the last rate, > 0.
        steps: >= 10.

    Raises:
        ConfigError: an argument is out of range, the optimizer evaluates the loss itself or has no
            learning rate, or there are several losses.
    """
    _check(trainer, low, high, steps)
    with rollback(trainer):
        trainer.model.train()
        groups = trainer.optimizer.param_groups
        first = [float(g.get("max_lr", g.get("initial_lr", g["lr"]))) for g in groups]
        batches = _windows(train, trainer.plan.accumulate)
        if any(map(wants_probe, trainer.scalers.values())):
            trainer.probe(next(batches)[0])
        rates, losses, skipped, watch = np.geomspace(low, high, steps), [], [], _Watch()
        for rate in rates:
            for group, initial in zip(trainer.optimizer.param_groups, first, strict=True):
                _set_rate(group, initial * float(rate) / (lr or first[0]))
            applied, loss = _step(trainer, next(batches))
            skipped.append(not applied)
            losses.append(loss)
            if watch.ends(loss, applied):
                break
    known = np.array(losses), np.array(skipped)
    return RangeTest(rates[: len(losses)], *known, steps, watch.blew_up)


def _check(trainer: Trainer, low: float, high: float, steps: int) -> None:
    require_whole("find_lr: steps", steps, least=10)
    for name, value in {"low": low, "high": high}.items():
        require(f"find_lr: {name}", value, POSITIVE, kind="a finite number")
    if low >= high:
        raise ConfigError(f"find_lr: low={low:g}: must be below high={high:g}")
    if trainer.optimizer.needs_closure:
        raise ConfigError(
            "trainer.find=lr: the optimizer evaluates the loss itself and searches along a line; "
            "use an optimizer that takes no closure, or try a few optimizer.lr in a sweep"
        )
    if len(trainer.objectives) > 1:
        raise ConfigError(
            "trainer.find=lr: there are several losses, and a fall of their sum says nothing; try "
            "a few learning rates in a sweep"
        )
    if any("lr" not in group for group in trainer.optimizer.param_groups):
        raise ConfigError("trainer.find=lr: the optimizer has no lr; use one that has")


def _windows(train: Loader, accumulate: int) -> Iterator[list[Batch]]:
    """Yield the micro-batches of each step, epoch after epoch."""
    for epoch in count():
        batches = train.epoch(epoch)
        while window := list(islice(batches, accumulate)):
            yield window


def _set_rate(group: dict[str, Any], rate: float) -> None:
    group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate


def _step(trainer: Trainer, window: list[Batch]) -> tuple[bool, float]:
    """Train a step, and return whether it was applied, and its loss."""
    applied = trainer.progress.steps
    result = trainer.train_step(*window)
    trainer.read_verdicts()
    loss = math.nan if result.loss is None else float(result.loss)
    return trainer.progress.steps > applied, loss


class _Watch:
    """Watches for the end: a loss far above the first ones, or none that is finite.

    Far is half the first loss, or as much as the loss had fallen, if that is more. It holds for
    losses below 0 as well.
    """

    def __init__(self) -> None:
        self.blew_up = False
        self._mean, self._weight, self._lost = 0.0, 0.0, 0
        self._first, self._best = math.nan, math.inf

    def ends(self, loss: float, applied: bool) -> bool:
        """Return whether the test ends with this step, which no skip at a finite loss does."""
        self._lost = 0 if math.isfinite(loss) else self._lost + 1
        if applied and math.isfinite(loss):
            self._mean = _DECAY * self._mean + (1 - _DECAY) * loss
            self._weight = _DECAY * self._weight + 1 - _DECAY
            mean = self._mean / self._weight
            self._first = mean if math.isnan(self._first) else self._first
            self._best = min(self._best, mean)
            far = max(abs(self._first) / 2, self._first - self._best)
            self.blew_up = mean > self._first + far
        self.blew_up |= self._lost >= _LOST
        return self.blew_up


def draw_range_test(test: RangeTest, word: str, path: Path) -> None:
    """Draw the losses over the rates as a PNG. `word` is the option that the rates are of."""
    figure = new_figure(width=6.6, height=4.2)
    axes = figure.subplots()
    applied, (start, _) = ~test.skipped, test.start
    axes.plot(test.rates[applied], test.losses[applied], ".", color="0.7", label="loss of a step")
    axes.plot(test.rates, test.smooth, color="C0", lw=2, label="smoothed")
    if test.skipped.any():
        at = np.full(int(test.skipped.sum()), 0.02)
        how = {"color": "C1", "transform": axes.get_xaxis_transform(), "clip_on": False}
        axes.plot(test.rates[test.skipped], at, "x", label="overflowed, skipped", **how)
    if test.suggestion is not None:
        label = f"{word}={test.suggestion:g}"
        axes.axvline(test.suggestion, color="C2", linestyle="dashed", lw=2, label=label)
    if test.best >= 0:
        low = test.smooth[test.best]
        room = max(start - low, 0.1 * abs(start), 1e-12)
        axes.set_ylim(low - 0.3 * room, start + 0.8 * room)  # Where it blows up, it leaves.
    axes.set_xscale("log")
    axes.set_xlim(test.rates[0], test.rates[-1])
    axes.set_xlabel(f"learning rate ({word})")
    axes.set_ylabel("training loss")
    blown = f", blown up at {test.rates[-1]:.2g}" if test.blew_up else ""
    axes.set_title(f"range test, {len(test.rates)} of {test.planned} steps{blown}", fontsize=12)
    axes.legend(loc="best", fontsize=10)
    axes.grid(alpha=0.3)
    for part in (axes.xaxis.label, axes.yaxis.label):
        part.set_fontsize(12)
    save(figure, path)
