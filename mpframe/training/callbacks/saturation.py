"""Warns of half weights at the end of their range."""

import logging

from mpframe.training.callback import Callback
from mpframe.training.trainer import Trainer

log = logging.getLogger(__name__)


class SaturationWarning(Callback):
    """Says after each epoch which half weights stand at the end of their format's range."""

    def on_epoch_end(self, trainer: Trainer) -> None:
        """Warn if there are any; this takes one transfer from the device."""
        message = trainer.optimizer.saturation_warning(trainer.model)
        if message:
            log.warning("warning: %s", message)
