"""Ends a run that only skips."""

import torch

from mpframe.errors import DivergedError
from mpframe.loss_scaling import Static
from mpframe.optim.step_result import StepResult
from mpframe.training.callback import Callback
from mpframe.training.loss_spike import spikes_of
from mpframe.training.trainer import Trainer


class SkipGuard(Callback):
    """Ends a run that only skips, and reports one that came to its end in that way.

    Args:
        limit: skipped steps in a row that end it.
        tried: skips in a row that a scaler may make to try a higher scale: its hysteresis.
    """

    def __init__(self, limit: int, tried: int = 1) -> None:
        self._limit = limit
        self._tried = tried
        self._last: StepResult | None = None

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        """Raise if the limit is reached.

        Raises:
            DivergedError: says whether the forward pass or only the gradients were not finite.
        """
        self._last = result
        if trainer.progress.skipped_in_a_row >= self._limit:
            raise self._diverged(trainer, f"trainer.max_consecutive_skips={self._limit} reached")

    def on_train_end(self, trainer: Trainer) -> None:
        """Raise if the model learnt nothing, or did not learn until the end.

        Raises:
            DivergedError: no step was applied, though no scaler still searched for its first
                scale; the last ones were all skipped; or the last one was applied at a loss that is
                not finite, as an optimizer with a closure does.
        """
        in_a_row, global_step = trainer.progress.skipped_in_a_row, trainer.progress.global_step
        if 0 < in_a_row == global_step:
            if not _still_searches(trainer, self._last):
                raise self._diverged(trainer, f"no step was applied, {in_a_row} were skipped")
        elif in_a_row > self._tried:
            raise self._diverged(trainer, f"the last {in_a_row} steps were skipped")
        loss = None if self._last is None else self._last.loss
        if not in_a_row and loss is not None and not bool(torch.isfinite(loss)):
            raise self._diverged(trainer, "the last step was applied at a loss that is not finite")

    def _diverged(self, trainer: Trainer, what: str) -> DivergedError:
        where, part = "", self._last
        if part is not None and part.parts is not None:
            in_a_row = trainer.progress.part_skips_in_a_row
            worst = max(in_a_row, key=lambda name: in_a_row[name])
            where, part = f" by optimizer.parts.{worst}", part.parts[worst]
        why = "" if part is None else f": {_cause(trainer, part)}"
        return DivergedError(f"{what}{where}{why}")


def _cause(trainer: Trainer, result: StepResult) -> str:
    """Why the last step was skipped, and what may help."""
    spikes = spikes_of(trainer)
    if spikes is not None and bool(spikes.spiked):
        return (
            f"the loss stays above {spikes.factor:g} times the median of the applied "
            "steps: lower optimizer.lr, raise trainer.loss_spike_factor, or resume from an older "
            "checkpoint"
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
    """Whether every scaler may still go down to a scale at which nothing overflows."""
    floors = [(own.scale, getattr(own, "floor", torch.inf)) for own in trainer.scalers.values()]
    above = bool(floors) and all(float(scale) > floor for scale, floor in floors)
    return above and result is not None and _finite(result)


def _finite(result: StepResult) -> bool:
    return result.loss is None or bool(torch.isfinite(result.loss))
