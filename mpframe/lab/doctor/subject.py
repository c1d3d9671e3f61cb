"""The doctor's subject: a trainer built as for training, its data, and trials on them.

Each trial leaves weights, buffers, optimizer state and random numbers bit for bit as they were.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mpframe.core.callback import Batch
from mpframe.core.loss_scaling.scaler import LossScaler
from mpframe.core.tree import device_of
from mpframe.lab.autopsy.callback import floors_of
from mpframe.lab.autopsy.diagnosis import Diagnosis, diagnose
from mpframe.lab.autopsy.replay import Case, Setting, replay
from mpframe.lab.hints import PlannedRun
from mpframe.lab.product_noise import Noises, ProductProbe
from mpframe.tracking.dtype_map import Row, dtype_map
from mpframe.training.optimizers.multi_optimizer import largest
from mpframe.training.probe import probe_amax, wants_probe


@dataclass
class Subject(PlannedRun):
    """A planned run, and trials on it."""

    @property
    def device(self) -> torch.device:
        return device_of(self.trainer.model)

    @cached_property
    def rows(self) -> list[Row]:
        return dtype_map(self.trainer.precision, self.trainer.model)

    def half_weights(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (module, parameter, fp32 values) of each weight stored or computed with in half."""
        weights = self.trainer.weights()
        for row in self.rows:
            if self.half and self.half in (row.storage, getattr(torch, row.compute, None)):
                module = self.trainer.model.get_submodule(row.module)
                for name, parameter in module.named_parameters(recurse=False):
                    if parameter.is_floating_point():
                        full = f"{row.module}.{name}".lstrip(".")
                        yield row.module, full, weights[full].detach().float()

    @cached_property
    def batch(self) -> Batch:
        return self.trainer.on_device(next(self.loader.epoch(0)))

    @cached_property
    def amax(self) -> Tensor:
        """The largest gradient of the first batch in fp32, 0-d float32."""
        trainer = self.trainer
        trainer.model.train()
        about = trainer.precision, self.batch
        losses = [loss.objective for loss in trainer.objectives]
        return largest([probe_amax(trainer.model, loss, *about) for loss in losses])

    @cached_property
    def case(self) -> Case:
        """The first step, as the autopsy replays it."""
        trainer = self.trainer
        return Case(
            model=trainer.model,
            precision=trainer.precision,
            objectives=trainer.objectives,
            batches=[self.batch],
            scales={o.name: self.first_scale(o.scaler) for o in trainer.objectives},
            floors=floors_of(trainer),
            scaling=self.scaling,
        )

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """The autopsy's diagnosis of the first step, its remedies tried on the first batch."""
        return diagnose(self.case)

    def noises(self) -> Noises:
        """Count what products below 16 bits lose in the first step."""
        probe = ProductProbe(self.trainer.precision)
        try:
            replay(self.case, Setting())
        finally:
            noises = probe.noises()
        return noises

    def first_scale(self, scaler: LossScaler) -> float:
        """Return the first scale. A scaler that probes takes it from the gradients."""
        tried = copy.deepcopy(scaler)
        if wants_probe(tried):
            tried.start_from(self.amax)
        return float(tried.scale)
