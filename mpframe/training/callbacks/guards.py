"""Callbacks that end a run, or skip a step, or warn before a run is lost.

training/interruption.py ends a run that a signal asked to stop.
"""

import logging
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from mpframe.core.callback import Algorithm, Callback
from mpframe.core.errors import CheckpointError, ConfigError, DivergedError
from mpframe.core.loss_scaling import Static
from mpframe.core.ranges import NOT_NEGATIVE, Range, make_range_error, require, require_whole
from mpframe.core.step_result import StepResult
from mpframe.core.tree import HALF
from mpframe.files.text import few
from mpframe.training.evaluation import LOSS, Best, Evaluation
from mpframe.training.run_context import RunContext
from mpframe.training.trainer import Trainer

log = logging.getLogger(__name__)

_EARLY = "callbacks.early_stopping"
WINDOW, LEAST = 50, 10  # losses in the median, at most and at least


class SkipGuard(Callback):
    """Ends a run that only skips, also if it reached its end like that.

    Args:
        limit: skipped steps in a row that end it.
        tried: skips in a row that a scaler may make to try a higher scale: its hysteresis.
    """

    def __init__(self, limit: int, tried: int = 1) -> None:
        self._limit, self._tried = limit, tried
        self._last: StepResult | None = None

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        """Raise DivergedError, with the cause, if the limit is reached."""
        self._last = result
        if trainer.progress.skipped_in_a_row >= self._limit:
            raise self._make_error(trainer, f"trainer.max_consecutive_skips={self._limit} reached")

    def on_train_end(self, trainer: Trainer) -> None:
        """Raise DivergedError if the run learnt nothing, or not until its end."""
        in_a_row, global_step = trainer.progress.skipped_in_a_row, trainer.progress.global_step
        if 0 < in_a_row == global_step:
            if not _still_searches(trainer, self._last):  # For the first scale.
                raise self._make_error(trainer, f"no step was applied, {in_a_row} were skipped")
        elif in_a_row > self._tried:
            raise self._make_error(trainer, f"the last {in_a_row} steps were skipped")
        if not in_a_row and self._last is not None and not _finite(self._last):
            what = "the last step was applied at a loss that is not finite"
            raise self._make_error(trainer, what)

    def _make_error(self, trainer: Trainer, what: str) -> DivergedError:
        where, part = "", self._last
        if part is not None and part.parts is not None:
            in_a_row = trainer.progress.part_skips_in_a_row
            worst = max(in_a_row, key=lambda name: in_a_row[name])
            where, part = f" by optimizer.parts.{worst}", part.parts[worst]
        why = "" if part is None else f": {_cause(trainer, part)}"
        return DivergedError(f"{what}{where}{why}")


def _cause(trainer: Trainer, result: StepResult) -> str:
    """Say why the last step was skipped, and what may help."""
    spikes = spikes_of(trainer)
    if spikes is not None and bool(spikes.spiked):
        return (
            f"the loss stays above {spikes.factor:g} times the median of the applied "
            "steps: lower optimizer.lr, raise callbacks.loss_spikes.factor, or resume from an "
            "older checkpoint"
        )
    if not _finite(result):
        return (
            "the loss itself is not finite, so scaling cannot help: lower optimizer.lr, look at "
            "the data, or pin the overflowing module to fp32 in ops.modules"
        )
    said = f"the loss is finite and its gradients overflow at scale {float(result.scale):g}"
    if _still_searches(trainer, result):
        return f"{said}, from where it still goes down: lower loss_scaling.init_scale"
    static = any(isinstance(scaler, Static) for scaler in trainer.scalers.values())
    option = "loss_scaling.scale" if static else "loss_scaling.min_scale"
    return f"{said}: lower {option} or pin the overflowing module to fp32 in ops.modules"


def _still_searches(trainer: Trainer, result: StepResult | None) -> bool:
    """Return whether every scaler may still reach a scale at which nothing overflows."""
    scalers = trainer.scalers.values()
    floors = [(scaler.scale, getattr(scaler, "floor", torch.inf)) for scaler in scalers]
    above = bool(floors) and all(float(scale) > floor for scale, floor in floors)
    return above and result is not None and _finite(result)


def _finite(result: StepResult) -> bool:
    return result.loss is None or bool(torch.isfinite(result.loss))


class EarlyStopping(Callback):
    """Ends a run after a number of validations in a row without a better finite value.

    Args:
        patience: validations in a row without a better value, >= 1.
        min_delta: how much better a value must be, >= 0.
        monitor: the metric's name, or `loss`. None: the metric of `trainer.monitor`.

    Raises:
        ConfigError: an argument is out of its range, or later, the metric is not known or does
            not say which value is better (`higher_is_better`).
    """

    def __init__(
        self, patience: int = 10, min_delta: float = 0.0, monitor: str | None = None
    ) -> None:
        require_whole(f"{_EARLY}.patience", patience)
        require(f"{_EARLY}.min_delta", min_delta, NOT_NEGATIVE, kind="a finite number")
        self._patience, self._min_delta, self._monitor = patience, min_delta, monitor
        self._best, self._waited = Best(), 0

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        """End a resumed run that was stopped here before, unless the patience grew."""
        self._stop_if_due(trainer)

    def on_evaluate(self, trainer: Trainer, evaluation: Evaluation) -> None:
        name = evaluation.monitor if self._monitor is None else self._monitor
        known, higher = {**evaluation.metrics, LOSS: evaluation.loss}, evaluation.direction(name)
        if name not in known:
            raise make_range_error(f"{_EARLY}.monitor", name, f"one of {', '.join(known)}")
        if higher is None:
            raise ConfigError(
                f"{_EARLY}.monitor={name}: the metric does not say which value is "
                "better; give it higher_is_better = True or False, or monitor loss"
            )
        step = trainer.progress.global_step
        better = self._best.offer(name, known[name], step, higher, by=self._min_delta)
        self._waited = 0 if better else self._waited + 1
        self._stop_if_due(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"best": asdict(self._best), "waited": self._waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._best, self._waited = Best(**state["best"]), int(state["waited"])

    def _stop_if_due(self, trainer: Trainer) -> None:
        if self._waited >= self._patience:
            trainer.stop(
                f"early stopping: val_{self._best.name} was not better than {self._best}"
                + f" by {self._min_delta:g}" * bool(self._min_delta)
                + f", validations since then: {self._waited}"
            )


class SaturationWarning(Callback):
    """Warns after each epoch of half weights at the end of their format's range."""

    def on_epoch_end(self, trainer: Trainer) -> None:
        """Warn if there are any, after one transfer from the device."""
        optimizer, beyond = trainer.optimizer, {}
        trained = set(optimizer.parameters)
        for name, parameter in trainer.model.named_parameters():
            if parameter in trained and parameter.dtype in HALF:
                master = optimizer.master_of(parameter)
                if master.dtype not in HALF:
                    beyond[name] = (master.abs() > torch.finfo(parameter.dtype).max).sum()
        numbers = torch.stack(list(beyond.values())).tolist() if beyond else []
        counts = {name: number for name, number in zip(beyond, numbers, strict=True) if number}
        if counts:
            log.warning(
                "warning: %d weights lie beyond the half range and are held at its end (%s); their "
                "masters go on: lower optimizer.lr, use dtype.half=bfloat16, or pin the module "
                "with ops.modules=...:fp32",
                sum(counts.values()),
                few(sorted(counts, key=lambda name: -counts[name])),
            )


class LossSpikes(Algorithm):
    """Compares each step's loss with the median of the losses of applied steps.

        spike:  L > factor * median(L of the last 50 applied steps)

    The median, unlike the mean, does not let one spike hide the next. No loss is judged before ten
    steps have been applied, or while the median is not positive. A loss of nan or inf is no spike.

    `warn` only reports a spike, `skip` skips the step as after an overflow (nothing changes but the
    loss scale), `stop` skips it and ends the run, `off` judges nothing. The loss of a skipped step
    never enters the median, so a model that broke stays above it, and the guard against endless
    skips ends the run.

    Args:
        policy: `off`, `warn`, `skip` or `stop`, else ConfigError.
        factor: how many times the median a loss may be, > 1, else ConfigError.
    """

    def __init__(self, policy: str | bool = "off", factor: float = 5.0) -> None:
        policy = str(policy or "off")  # YAML reads an unquoted off as false.
        allowed = Range(choices=("off", "warn", "skip", "stop"))
        if not allowed.holds(policy):
            raise make_range_error("callbacks.loss_spikes.policy", policy, str(allowed))
        require("callbacks.loss_spikes.factor", factor, Range(above=1.0))
        self.policy, self.factor = policy, factor
        self.median = torch.tensor(torch.nan)  # compared with the last loss, or nan
        self.spiked = torch.tensor(False)  # the verdict on that loss
        self._losses = torch.empty(0)

    def judge(self, loss: Tensor) -> Tensor | None:
        """Return whether a 0-d loss is a spike to be skipped (0-d bool), or None for `warn`."""
        known = self._losses.to(loss.device)
        few = len(known) < LEAST
        self.median = torch.full_like(loss, torch.nan) if few else known.nanmedian()
        high = (self.median > 0) & (loss > self.factor * self.median)
        self.spiked = high & torch.isfinite(loss)
        return None if self.policy == "warn" else self.spiked

    def remember(self, loss: Tensor) -> None:
        """Add the 0-d loss of an applied step to the median's."""
        kept = self._losses[1 - WINDOW :].to(loss.device)
        self._losses = torch.cat([kept, loss.detach().reshape(1)])

    def before_update(self, trainer: Trainer, losses: list[Tensor]) -> Tensor | None:
        if self.policy == "off":
            return None
        trainer.read_verdicts()
        return self.judge(losses[0])

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        if self.policy == "off" or result.loss is None:
            return
        if not result.known.skipped:
            self.remember(result.loss)
        if not bool(self.spiked):
            return
        text = (
            f"step {trainer.progress.global_step}: loss {float(result.loss):.4g} is a spike, more "
            f"than {self.factor:g} times the median {float(self.median):.4g} of the last steps"
        )
        if self.policy == "stop":
            raise DivergedError(
                f"callbacks.loss_spikes.policy=stop: {text}; look at the batch, lower "
                "optimizer.lr, or use callbacks.loss_spikes.policy=skip"
            )
        log.warning("warning: %s%s", text, "; skipped" if self.policy == "skip" else "")

    def state_dict(self) -> dict[str, Any]:
        """Return the losses that the median is over, oldest first: [n], n up to 50."""
        return {} if self.policy == "off" else {"spikes": self._losses.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from saved losses, which a run that judged none did not save."""
        losses = state.get("spikes")
        if losses is None:
            return
        if not isinstance(losses, Tensor) or losses.dim() != 1 or len(losses) > WINDOW:
            raise CheckpointError(
                f"callbacks.loss_spikes: the saved losses are not up to {WINDOW} numbers; "
                "resume from another checkpoint"
            )
        self._losses = losses.clone()


def spikes_of(trainer: Trainer) -> LossSpikes | None:
    """Return the part that judges a trainer's losses, or None."""
    spikes = (a for a in trainer.algorithms.values() if isinstance(a, LossSpikes))
    return next((s for s in spikes if s.policy != "off"), None)
