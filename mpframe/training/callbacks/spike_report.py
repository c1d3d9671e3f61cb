"""Reports loss spikes."""

import logging

from mpframe.errors import DivergedError
from mpframe.optim.step_result import StepResult
from mpframe.training.callback import Callback
from mpframe.training.loss_spike import spikes_of
from mpframe.training.trainer import Trainer

log = logging.getLogger(__name__)


class SpikeReport(Callback):
    """Warns of each loss spike, and ends the run if the policy is `stop`."""

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        """Warn if the loss is a spike, or raise.

        Raises:
            DivergedError: the loss is a spike and `trainer.on_loss_spike` is stop; the step was
                left out.
        """
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
