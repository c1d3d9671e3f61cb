"""Warns of half weights at the end of their range."""

import logging

import torch
from torch import nn

from mpframe.training.callback import Callback
from mpframe.training.trainer import AnyOptimizer, Trainer
from mpframe.tree import HALF

log = logging.getLogger(__name__)


class SaturationWarning(Callback):
    """Warns after each epoch of half weights at the end of their format's range."""

    def on_epoch_end(self, trainer: Trainer) -> None:
        """Warn if there are any; this takes one transfer from the device."""
        message = saturation_warning(trainer.optimizer, trainer.model)
        if message:
            log.warning("warning: %s", message)


def saturation_warning(optimizer: AnyOptimizer, model: nn.Module) -> str | None:
    """Return a line on the half weights beyond their range; None if there are none.

    Waits for the device: ask at reports, not in steps.
    """
    trained, beyond = set(optimizer.parameters), {}
    for name, parameter in model.named_parameters():
        if parameter in trained and parameter.dtype in HALF:
            master = optimizer.master_of(parameter)
            if master.dtype not in HALF:
                beyond[name] = (master.abs() > torch.finfo(parameter.dtype).max).sum()
    numbers = torch.stack(list(beyond.values())).tolist() if beyond else []
    counts = {name: number for name, number in zip(beyond, numbers, strict=True) if number}
    if not counts:
        return None
    worst = sorted(counts, key=lambda name: -counts[name])
    return (
        f"{sum(counts.values())} weights lie beyond the half range and are held at its end "
        f"({', '.join(worst[:3])}{', ...' if len(worst) > 3 else ''}); their masters go on: "
        "lower optimizer.lr, use dtype.half=bfloat16, or pin the module with ops.modules=...:fp32"
    )
