"""Loss spikes: a finite loss far above the ones before it.

    spike:  L > factor * median(L of the last 50 applied steps)

The median is used and not the mean, so that one spike does not hide the next. No loss is judged
before ten steps have been applied, or if the median is not positive, because a factor of it means
nothing then. A loss that is nan or inf is an overflow and no spike, and its step is skipped anyway.

The policy decides what follows: `warn` only reports the spike, `skip` skips the step as after an
overflow (nothing changes but the loss scale), `stop` skips it and ends the run. The loss of a
skipped step never enters the median, so a model that broke stays above it, and the guard against
endless skips ends the run.
"""

import logging
from typing import Any

import torch
from torch import Tensor

from mpframe.core.callback import Algorithm, Callback
from mpframe.core.errors import CheckpointError, DivergedError
from mpframe.core.step_result import StepResult
from mpframe.core.trainer import Trainer

WINDOW = 50
LEAST = 10


class LossSpikes(Algorithm):
    """Compares each step's loss with the median of the losses of applied steps.

    Args:
        policy: `warn`, `skip` or `stop`; the last two leave the step out.
        factor: how many times the median a loss may be, > 1.

    Attributes:
        median: 0-d float32, the last loss was compared with it; nan if too few were known.
        spiked: 0-d bool, the verdict on that loss.
    """

    def __init__(self, policy: str, factor: float) -> None:
        self.policy = policy
        self.factor = factor
        self.median = torch.tensor(torch.nan)
        self.spiked = torch.tensor(False)
        self._losses = torch.empty(0)

    def judge(self, loss: Tensor) -> Tensor | None:
        """Whether a loss (0-d) is a spike and its step is to be skipped; None if none ever is."""
        known = self._losses.to(loss.device)
        few = len(known) < LEAST
        self.median = torch.full_like(loss, torch.nan) if few else known.nanmedian()
        high = (self.median > 0) & (loss > self.factor * self.median)
        self.spiked = high & torch.isfinite(loss)
        return None if self.policy == "warn" else self.spiked

    def remember(self, loss: Tensor) -> None:
        """Take in the loss (0-d) of a step that was applied."""
        kept = self._losses[1 - WINDOW :].to(loss.device)
        self._losses = torch.cat([kept, loss.detach().reshape(1)])

    def before_update(self, trainer: Trainer, losses: list[Tensor]) -> Tensor | None:
        """Judge the loss, once it is known whether the step before was applied."""
        trainer.read_verdicts()
        return self.judge(losses[0])

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        """Remember the loss, unless the step was skipped."""
        if result.loss is not None and not result.known.skipped:
            self.remember(result.loss)

    def state_dict(self) -> dict[str, Any]:
        """The losses the median is taken of, the oldest first: [n], n up to 50."""
        return {"spikes": self._losses.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from saved losses; a checkpoint of a run that judged none has none."""
        losses = state.get("spikes")
        if losses is None:
            return
        if not isinstance(losses, Tensor) or losses.dim() != 1 or len(losses) > WINDOW:
            raise CheckpointError(
                f"trainer.on_loss_spike: the saved losses are not up to {WINDOW} numbers; "
                "resume from another checkpoint"
            )
        self._losses = losses.clone()


def spikes_of(trainer: Trainer) -> LossSpikes | None:
    """The judge of a trainer's losses; None if it has none."""
    return next((a for a in trainer.algorithms.values() if isinstance(a, LossSpikes)), None)


log = logging.getLogger(__name__)


class SpikeReport(Callback):
    """Warns of each loss spike, and ends the run if the policy is `stop`."""

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        """Warn if the loss is a spike; raise DivergedError if the policy is `stop`."""
        spikes = spikes_of(trainer)
        if spikes is None or result.loss is None or not bool(spikes.spiked):
            return
        text = (
            f"step {trainer.progress.global_step}: loss {float(result.loss):.4g} is a spike, more "
            f"than {spikes.factor:g} times the median {float(spikes.median):.4g} of the last steps"
        )
        if spikes.policy == "stop":
            raise DivergedError(
                f"trainer.on_loss_spike=stop: {text}; look at the batch, lower optimizer.lr, or "
                "use trainer.on_loss_spike=skip"
            )
        log.warning("warning: %s%s", text, "; skipped" if spikes.policy == "skip" else "")
