"""`trainer.find=lr`, a range test (Smith 2015): the rate grows from step to step until it fails.

At the first, tiny rates the loss only shows its noise from batch to batch. Then it falls, and at
last it blows up. The suggestion is the rate at which half of the fall is done, in the middle of
the steep part. A step whose gradients overflow is skipped, and has no part in the curve.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from mpframe.config.schema import Config
from mpframe.core.callback import Batch
from mpframe.core.errors import ConfigError
from mpframe.data.task import Task
from mpframe.lab.find import rollback
from mpframe.lab.pictures import new_figure, save
from mpframe.tracking.tags import Tag
from mpframe.tracking.tracker import Tracker
from mpframe.training.probe import wants_probe
from mpframe.training.trainer import Loader, Trainer

_WINDOW = 5  # steps: so many bad losses end the test, and a smoothed one is a mean of about so many
_SURE = 4.0  # A fall by so many standard errors of the first losses is no noise.


@dataclass(frozen=True)
class RangeTest:
    """The steps of a range test, and the suggested rate, 2 digits, or None if no loss fell."""

    rates: Any  # [steps tried], rising
    losses: Any  # unscaled, of each step, may be inf or nan
    applied: Any  # whether a step was not skipped
    smooth: Any  # the losses of applied steps, smoothed on both sides, else nan
    suggestion: float | None
    says: str  # how sure it is


def find_lr(
    trainer: Trainer,
    train: Loader,
    lr: float,
    low: float = 1e-7,
    high: float = 10,
    steps: int = 100,
) -> RangeTest:
    """Try rising learning rates on the training data, and leave the trainer as it was.

    `low` and `high` (> 0) are the first and the last value of the option that is `lr` now. All
    groups of parameters keep their ratio to it.

    ConfigError: the optimizer evaluates the loss itself, or there are several losses.
    """
    for obstacle, there in {
        "the optimizer evaluates the loss itself": trainer.optimizer.needs_closure,
        "there are several losses": len(trainer.objectives) > 1,
    }.items():
        if there:
            raise ConfigError(f"trainer.find=lr: {obstacle}; try a few rates in a sweep instead")
    tried, rates = list[tuple[float, bool]](), np.geomspace(low, high, steps)
    with rollback(trainer):
        groups, windows = trainer.optimizer.param_groups, _windows(train, trainer.plan.accumulate)
        first = [float(g.get("max_lr", g.get("initial_lr", g["lr"]))) for g in groups]
        if any(map(wants_probe, trainer.scalers.values())):
            trainer.probe(next(windows)[0])
        while len(tried) < steps and not _blew_up(tried):
            for group, initial in zip(groups, first, strict=True):
                rate = initial * float(rates[len(tried)]) / lr
                group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
            before = trainer.progress.steps
            result = trainer.train_step(*next(windows))
            trainer.read_verdicts()
            loss = math.nan if result.loss is None else float(result.loss)
            tried.append((loss, trainer.progress.steps > before))
    return analyse(rates, tried)


def _windows(train: Loader, accumulate: int) -> Iterator[list[Batch]]:
    """Yield the micro-batches of each step, epoch after epoch."""
    for epoch in count():
        batches = train.epoch(epoch)
        while window := list(islice(batches, accumulate)):
            yield window


def _blew_up(tried: list[tuple[float, bool]]) -> bool:
    """Return whether the last losses are lost, or above the first by half of it or all they fell.

    An overflow at a finite loss is the scale's, and no end.
    """
    lost = [not math.isfinite(loss) for loss, _ in tried[-_WINDOW:]]
    losses = [loss for loss, applied in tried if applied and math.isfinite(loss)]
    if len(losses) < _WINDOW or all(lost):
        return all(lost) and len(lost) == _WINDOW
    means = np.convolve(losses, np.full(_WINDOW, 1 / _WINDOW), "valid")
    return bool(means[-1] > means[0] + max(abs(means[0]) / 2, means[0] - means.min()))


def analyse(rates: Any, tried: list[tuple[float, bool]]) -> RangeTest:
    """Smooth the losses of the steps tried, of all the planned `rates`, and suggest a rate."""
    losses, applied = (np.array(column) for column in zip(*tried, strict=True))
    known, at = applied & np.isfinite(losses), np.arange(len(losses))
    weights = np.exp(-0.5 * (np.subtract.outer(at, at) / (0.03 * len(rates))) ** 2) * known
    means = weights @ np.where(known, losses, 0.0) / np.maximum(weights.sum(axis=1), 1e-300)
    smooth, first = np.where(known, means, np.nan), losses[known][: max(3, len(rates) // 7)]
    says = f"{len(tried)} of {len(rates)} steps from {rates[0]:.2g} to {rates[len(tried) - 1]:.2g}"
    says += f", {(~applied).sum()} of them skipped, {'' if _blew_up(tried) else 'not '}blown up"
    if not len(first):
        return RangeTest(rates[: len(at)], losses, applied, smooth, None, says)
    best, start, noise = int(np.nanargmin(smooth)), first.mean(), first.std()
    says += f", loss {start:.4g} +- {noise:.2g} at first, {smooth[best]:.4g} at {rates[best]:.2g}"
    above = np.flatnonzero(smooth[:best] > (start + smooth[best]) / 2)
    fell = start - smooth[best] > _SURE * noise / math.sqrt(_WINDOW) and len(above) > 0
    rate = float(f"{rates[above[-1] + 1]:.1e}") if fell else None
    return RangeTest(rates[: len(at)], losses, applied, smooth, rate, says)


def draw(test: RangeTest, option: str, path: Path) -> None:
    figure = new_figure(width=6.6, height=4.2)
    axes = figure.subplots()
    rates, losses = test.rates[test.applied], test.losses[test.applied]
    axes.plot(rates, losses, ".", color="0.7", label="loss of a step")
    axes.plot(test.rates, test.smooth, color="C0", lw=2, label="smoothed")
    skipped = test.rates[~test.applied]
    if len(skipped):
        axes.plot(skipped, np.full(len(skipped), 0.02), "x", color="C1", clip_on=False,
                  label="overflowed, skipped", transform=axes.get_xaxis_transform())  # fmt: skip
    if test.suggestion is not None:
        label = f"{option}={test.suggestion:g}"
        axes.axvline(test.suggestion, color="C2", ls="dashed", lw=2, label=label)
        low, start = np.nanmin(test.smooth), losses[0]
        fall = start - low  # Not the whole axis: the curve leaves it at the end.
        axes.set_ylim(low - 0.3 * fall, start + 0.8 * fall)
    axes.set(xscale="log", xlim=(test.rates[0], test.rates[-1]))
    axes.set_xlabel(f"learning rate ({option})", fontsize=12)
    axes.set_ylabel("training loss, unscaled", fontsize=12)
    axes.set_title(f"range test, {len(test.rates)} steps, {len(skipped)} skipped", fontsize=12)
    axes.legend(fontsize=10)
    axes.grid(alpha=0.3)
    save(figure, path)


def find(config: Config, trainer: Trainer, task: Task, train: Loader, folder: Path) -> str:
    """Find a run's learning rate, draw the test, and return what to type and how sure it is."""
    parts = config.joint.parts if config.joint else {}
    nodes = {"optimizer.lr": config.optimizer.get("lr")} if not parts else {}
    nodes |= {f"optimizer.parts.{name}.lr": part.options.lr for name, part in parts.items()}
    nodes |= {f"optimizer.groups.{name}.lr": one.options.lr for name, one in config.groups.items()}
    rates = {name: float(rate) for name, rate in nodes.items() if isinstance(rate, float | int)}
    if not rates:
        raise ConfigError("trainer.find=lr: no optimizer.lr is set; give it a first value")
    (option, present), path = next(iter(rates.items())), folder / "find_lr.png"
    test = find_lr(trainer, train, present)
    draw(test, option, path)
    tracker = Tracker(folder, 1)
    tracker.image(Tag.FIND_LR, path.read_bytes(), 0)
    tracker.flush()
    factor = None if test.suggestion is None else test.suggestion / present
    words = [f"{name}={rate * factor:.2g}" for name, rate in rates.items() if factor]
    return f"{' '.join(words) or 'no rate lowers the loss'} ({test.says}; see {path})"
