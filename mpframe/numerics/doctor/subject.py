"""What the doctor examines: a trainer built as for training, its data, and trials on them.

After every trial, weights, buffers, optimizer state and random numbers are bit for bit as they were
before it.
"""

import copy
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mpframe.data.loading import Loader
from mpframe.loss_scaling.interface import LossScaler, wants_probe
from mpframe.numerics.autopsy.case import Case
from mpframe.numerics.autopsy.diagnosis import Diagnosis, diagnose
from mpframe.numerics.autopsy.evidence import floors_of, scaling_of
from mpframe.numerics.doctor.dry_run import DryRun, dry_run
from mpframe.numerics.exponents import ExponentHistogram
from mpframe.optim import MasterWeights
from mpframe.optim.multi_optimizer import MultiOptimizer
from mpframe.precision.dtype_map import Row
from mpframe.precision.policy import Policy
from mpframe.training.loader import Batch
from mpframe.training.probe import probe
from mpframe.training.trainer import Trainer
from mpframe.tree import device_of, map_tensors


@dataclass
class Subject:
    """What the doctor examines.

    Attributes:
        trainer: as built for the run, `init_from` taken, before its first step.
        loader: the training data.
        options: every option of the run by its dotted path.
        added: the paths that the command line added with `+`.
        trained_in: the precision that trained the weights of `init_from`, e.g. `mixed(bfloat16)`;
            None if there are none.
    """

    trainer: Trainer
    loader: Loader
    options: Mapping[str, Any]
    added: Set[str] = frozenset()
    trained_in: str | None = None

    @property
    def policy(self) -> Policy:
        """The run's precision policy."""
        return self.trainer.precision.policy

    @property
    def half(self) -> torch.dtype | None:
        """The half format of the run; None if nothing is half."""
        return None if self.policy.mode == "fp32" else self.policy.half_dtype

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return device_of(self.trainer.model)

    @property
    def scaling(self) -> str:
        """The name of the loss scaling."""
        return scaling_of(self.trainer)

    @property
    def optimizers(self) -> dict[str, MasterWeights]:
        """The optimizers by the path of their options."""
        optimizer = self.trainer.optimizer
        if isinstance(optimizer, MultiOptimizer):
            return {f"optimizer.parts.{name}": part for name, part in optimizer.parts.items()}
        return {"optimizer": optimizer}

    def typed(self, path: str, value: object) -> str:
        """The word that sets an option of an open section, as it must be typed."""
        known = path in self.options and path not in self.added
        return f"{'' if known else '++'}{path}={value}"

    @cached_property
    def rows(self) -> list[Row]:
        """The dtype map."""
        return self.trainer.precision.dtype_map(self.trainer.model)

    def half_weights(self) -> Iterator[tuple[str, str, Tensor]]:
        """(module, parameter, fp32 values) of each weight stored or computed with in half."""
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
        """The first batch of the first epoch, on the device."""
        first = next(self.loader.epoch(0))
        return map_tensors(lambda tensor: tensor.to(self.device), first)

    @cached_property
    def gradients(self) -> ExponentHistogram:
        """How the gradients of the first batch spread over the exponents, in fp32."""
        self.trainer.model.train()
        seen = ExponentHistogram()
        for own in self.trainer.objectives:
            model, precision = self.trainer.model, self.trainer.precision
            probe(model, own.objective, precision, self.batch, seen.add)
        return seen

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """The autopsy's diagnosis of the first step, its remedies tried on the first batch."""
        trainer = self.trainer
        return diagnose(
            Case(
                model=trainer.model,
                optimizer=trainer.optimizer,
                precision=trainer.precision,
                objectives=trainer.objectives,
                batches=[self.batch],
                scales={o.name: self.first_scale(o.scaler) for o in trainer.objectives},
                floors=floors_of(trainer),
                scaling=self.scaling,
            )
        )

    def first_scale(self, scaler: LossScaler | None) -> float:
        """The scale of the first loss; for a scaler that probes, what the probe gives."""
        if scaler is None:
            return 1.0
        tried = copy.deepcopy(scaler)
        if wants_probe(tried):
            tried.start_from(torch.tensor(self.gradients.amax))
        return float(tried.scale)

    @cached_property
    def dry_run(self) -> DryRun:
        """The forward pass of the first batch, in the run's precision."""
        return dry_run(self.trainer, self.batch)
