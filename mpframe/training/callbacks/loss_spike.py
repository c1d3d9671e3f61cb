"""Loss spikes: a finite loss far above the ones before it.

    spike:  L > factor * median(L of the last 50 applied steps)

The median, unlike the mean, does not let one spike hide the next. No loss is judged before ten
steps have been applied, or while the median is not positive. A loss that is nan or inf is an
overflow and no spike, and its step is skipped anyway.

`warn` only reports a spike, `skip` skips the step as after an overflow (nothing changes but the
loss scale), `stop` skips it and ends the run, `off` judges nothing. The loss of a skipped step
never enters the median, so a model that broke stays above it, and the guard against endless skips
ends the run.
"""

import logging
from typing import Any

import torch
from torch import Tensor

from mpframe.core.callback import Algorithm
from mpframe.core.errors import CheckpointError, ConfigError, DivergedError, nearest
from mpframe.core.ranges import Range, require
from mpframe.core.step_result import StepResult
from mpframe.training.trainer import Trainer

WINDOW = 50
LEAST = 10
POLICIES = ("off", "warn", "skip", "stop")

log = logging.getLogger(__name__)


class LossSpikes(Algorithm):
    """Compares each step's loss with the median of the losses of applied steps.

    Args:
        policy: `off`, `warn`, `skip` or `stop`, else ConfigError.
        factor: how many times the median a loss may be, > 1, else ConfigError.
    """

    def __init__(self, policy: str | bool = "off", factor: float = 5.0) -> None:
        policy = str(policy or "off")  # YAML reads an unquoted off as false.
        if policy not in POLICIES:
            raise ConfigError(
                f"callbacks.loss_spikes.policy={policy}: must be one of {', '.join(POLICIES)}"
                + nearest(policy, POLICIES, before="; ")
            )
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
        """Judge the loss, after reading whether the step before was applied."""
        if self.policy == "off":
            return None
        trainer.read_verdicts()
        return self.judge(losses[0])

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        """Remember an applied loss and report a spike, for `stop` by DivergedError."""
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
