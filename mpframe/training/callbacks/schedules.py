"""Learning-rate schedules, sized to the planned number of steps.

Each function makes one of torch's schedules for an optimizer, and has a file in conf/scheduler/.
`poly`, `exponential`, `transformer` and `piecewise_constant` are OpenSeq2Seq's: factors on every
group's learning rate, by the number t of the steps before, 0 for the first one. Arguments that
several have (any one out of its range raises ConfigError):

    total_steps    planned optimizer steps, >= 1
    warmup         share of the steps in which the rate rises, 0 to 1
    min_factor     the lowest learning rate of each group as a fraction of its first, 0 to 1
    unit           optimizer steps in a unit, >= 1

Any other class of torch, timm or Hugging Face works as well.
"""

import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from mpframe.core.callback import Algorithm
from mpframe.core.errors import ConfigError
from mpframe.core.ranges import FRACTION, NOT_NEGATIVE, POSITIVE, Range, require
from mpframe.core.step_result import StepResult
from mpframe.core.user_code import user_code
from mpframe.training.evaluation import Evaluation
from mpframe.training.optimizers.multi_optimizer import load_states
from mpframe.training.plan import Progress
from mpframe.training.trainer import Trainer

log = logging.getLogger(__name__)

_COUNT = Range(low=1)
Numbers = Mapping[str, int]


def constant(optimizer: Optimizer) -> LRScheduler:
    """Keep the optimizer's learning rate throughout."""
    return ConstantLR(optimizer, factor=1.0)


def warmup_cosine(
    optimizer: Optimizer, total_steps: int, warmup: float = 0.1, min_factor: float = 0.0
) -> LRScheduler:
    """Rise linearly to the learning rate, then fall by half a cosine."""
    _require(FRACTION, "a fraction", warmup=warmup, min_factor=min_factor)
    rising = int(total_steps * warmup)
    falling = max(1, total_steps - rising)
    if rising < 1:
        return _cosine(optimizer, falling, min_factor)
    rise = LinearLR(optimizer, start_factor=1.0 / (rising + 1), total_iters=rising)
    fall = _cosine(optimizer, falling, min_factor)
    return SequentialLR(optimizer, [rise, fall], milestones=[rising])


def _cosine(optimizer: Optimizer, steps: int, min_factor: float) -> LRScheduler:
    """Fall by half a cosine from each group's learning rate to a fraction of it."""
    if not min_factor:
        return CosineAnnealingLR(optimizer, T_max=steps)

    def factor(step: int) -> float:
        return min_factor + (1 - min_factor) * (1 + math.cos(math.pi * step / steps)) / 2

    return LambdaLR(optimizer, factor)  # torch's own falls to one rate for all groups.


def onecycle(optimizer: Optimizer, total_steps: int, **options: Any) -> LRScheduler:
    """Follow torch's 1cycle policy (with its `options`), the optimizer's learning rate its peak.

    The momentum, or the first of `betas`, falls while the rate rises.
    """
    peaks = [float(group["lr"]) for group in optimizer.param_groups]
    # One step more than planned: the schedule is advanced after the last step as well.
    return OneCycleLR(optimizer, max_lr=peaks, total_steps=total_steps + 1, **options)


def poly(
    optimizer: Optimizer,
    total_steps: int,
    power: float = 1.0,
    warmup: float = 0.0,
    min_factor: float = 0.0,
    begin: float = 0.0,
) -> LRScheduler:
    """Rise linearly over w steps, then fall from step b on by a power of the rest of the run.

        t < w:  (t + 1) / (w + 1)
        t < b:  1
        else:   min_factor + (1 - min_factor) * (1 - (t - b) / (total_steps - b))^power

    Args:
        power: > 0. 1 falls in a line, 2 steeply at first.
        begin: share of the steps before the rate falls, 0 to 1, at least the warm-up.
    """
    _require(POSITIVE, power=power)
    _require(FRACTION, "a fraction", warmup=warmup, min_factor=min_factor, begin=begin)
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
    """Multiply the rate by `factor` for each `every` that has passed since `begin`.

        t < begin:  1
        else:       max(min_factor, factor^((t - begin) / every))

    Args:
        factor: > 0 and <= 1.
        every, begin: in units, > 0 and >= 0.
        staircase: round the exponent down, so that the rate falls in steps.
    """
    _require(Range(above=0.0, high=1.0), factor=factor)
    _require(POSITIVE, every=every)
    _require(NOT_NEGATIVE, begin=begin)
    _require(_COUNT, unit=unit)
    _require(FRACTION, "a fraction", min_factor=min_factor)
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
    """Follow "Attention Is All You Need" (2017), or noam. A rate of 1 or 2 is usual.

        coefficient / sqrt(d_model) * min((t + 1) / w^1.5, 1 / sqrt(t + 1))    for w = warmup_steps

    Args:
        d_model: width of the model, >= 1.
        warmup_steps: steps in which the rate rises, at least 1.
        coefficient: > 0.
        max_factor: a bound on the whole factor, > 0, or None.
    """
    most = math.inf if max_factor is None else max_factor
    _require(_COUNT, d_model=d_model)
    _require(POSITIVE, coefficient=coefficient)
    if max_factor is not None:
        _require(POSITIVE, max_factor=max_factor)
    scale, warmup = coefficient / math.sqrt(d_model), max(1, warmup_steps)

    def factor(step: int) -> float:
        number = step + 1
        return min(most, scale * float(min(number * warmup**-1.5, 1 / math.sqrt(number))))

    return LambdaLR(optimizer, factor)


def piecewise_constant(
    optimizer: Optimizer, boundaries: Sequence[float], factors: Sequence[float], unit: int = 1
) -> LRScheduler:
    """Keep the learning rate up to the first boundary, then multiply it by factor after factor.

    Args:
        boundaries: in units, rising. The step that begins at a boundary has the new rate.
        factors: one for each boundary, >= 0, of the first rate.
    """
    if len(boundaries) != len(factors):
        raise ConfigError(
            f"scheduler.factors: {len(factors)} for {len(boundaries)} boundaries; give one for each"
        )
    if list(boundaries) != sorted(set(boundaries)):
        raise ConfigError(f"scheduler.boundaries={list(boundaries)}: must rise")
    for value in factors:
        _require(NOT_NEGATIVE, factors=value)
    _require(_COUNT, unit=unit)
    ends = [_steps(boundary, unit) for boundary in boundaries]
    return LambdaLR(optimizer, lambda step: [1.0, *factors][sum(step >= end for end in ends)])


def _require(allowed: Range, kind: str = "a number", /, **values: object) -> None:
    for name, value in values.items():
        require(f"scheduler.{name}", value, allowed, kind=kind)


def _steps(units: float, unit: int) -> float:
    return round(units * unit, 6)  # 0.07 * 100 is 7.000000000000001.


class PlannedSchedule:
    """A schedule that a run resumes, or replays under another plan.

    If an argument differs from the saved one, such as the length, a new schedule takes as many
    steps as were applied: from there on the rates are the new plan's. The optimizer's own learning
    rates stay the saved ones. timm's schedules are told the applied steps and the epochs.

    Args:
        make: make(numbers) returns the optimizer's schedule, and its arguments as text by name.
        optimizer: whose rates it sets.
        plan: plan(progress) returns the numbers (`Plan.numbers`) of the run that goes on there.
    """

    def __init__(
        self,
        make: Callable[[Numbers], tuple[Any, Mapping[str, str]]],
        optimizer: Optimizer,
        plan: Callable[[Progress], Numbers],
    ) -> None:
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._make, self._optimizer, self._plan = make, optimizer, plan
        self._updates, self.progress = 0, Progress()  # where the run begins, or goes on
        self._numbers = plan(self.progress)
        self.schedule, self._arguments = make(self._numbers)
        self.__name__ = type(self.schedule).__name__  # Errors in it name this.

    def step(self) -> None:
        """Follow an applied optimizer step."""
        self._updates += 1
        if hasattr(self.schedule, "step_update"):
            self.schedule.step_update(self._updates)
            epochs, within = divmod(self._updates, self._numbers["steps_per_epoch"])
            if within == 0:
                self.schedule.step(epochs)
        else:
            self.schedule.step()

    def state_dict(self) -> dict[str, Any]:
        return {
            "updates": self._updates,
            "rates": self._rates,
            "arguments": self._arguments,
            "schedule": self.schedule.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at `progress`, with a warning that names the arguments that differ."""
        self._rates = [float(rate) for rate in state_dict["rates"]]
        then, numbers = dict(state_dict["arguments"]), self._plan(self.progress)
        if (numbers, then) == (self._numbers, self._arguments):
            self._updates = int(state_dict["updates"])
            self.schedule.load_state_dict(state_dict["schedule"])
            return
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
        self._numbers, self._updates = numbers, 0
        self.schedule, self._arguments = self._make(numbers)
        with warnings.catch_warnings():
            # The optimizer took these steps before the run was resumed.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            for _ in range(int(state_dict["updates"])):
                self.step()
        now = self._arguments
        changes = [
            f"scheduler.{name}={now.get(name)} (was {then.get(name)})"
            for name in sorted({*then, *now})
            if then.get(name) != now.get(name)
        ]
        if changes:  # There are none if the run was resumed with these batches before.
            said = "warning: %s: from step %d on the learning rate follows this schedule"
            log.warning(said, ", ".join(changes), self._updates)


Schedule = LRScheduler | PlannedSchedule


class Schedules(Algorithm):
    """Advances a schedule, or each optimizer's by its name, after each applied step.

    `ReduceLROnPlateau` is shown each validation: the metric if it has a direction, else the loss.
    """

    def __init__(self, schedule: Schedule | Mapping[str, Schedule]) -> None:
        named = schedule if isinstance(schedule, Mapping) else {"": schedule}
        self.by_name: Mapping[str, Any] = named
        self._plateaus = [s for s in self.by_name.values() if isinstance(s, ReduceLROnPlateau)]
        self._per_step = {n: s for n, s in self.by_name.items() if s not in self._plateaus}

    def before_update(self, trainer: Trainer, losses: list[Tensor]) -> None:
        """Read whether the step before was skipped: this update needs the rate that follows it."""
        if self._per_step:
            trainer.read_verdicts()

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        parts = result.each()
        for name, schedule in self._per_step.items():
            if not parts[name].known.skipped:
                with user_code("scheduler:", schedule):
                    schedule.step()

    def on_evaluate(self, trainer: Trainer, evaluation: Evaluation) -> None:
        for schedule in self._plateaus:
            schedule.step(evaluation.watched)

    def state_dict(self) -> dict[str, Any]:
        return {"schedule": {name: one.state_dict() for name, one in self.by_name.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for schedule in self.by_name.values():
            if isinstance(schedule, PlannedSchedule):
                schedule.progress = Progress.from_state(state["progress"])
        load_states(self.by_name, state.get("schedule", {}), "scheduler")
