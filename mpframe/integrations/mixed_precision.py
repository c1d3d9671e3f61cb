"""What every other trainer needs of a dtype mode: casts, a scaled loss, a step, buffers, a state.

And an autopsy: of the last of so many skipped steps in a row, if the trainer tells the batches.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpframe.checkpoint.state import RandomState
from mpframe.core.buffers import NO_BUFFERS, Buffers
from mpframe.core.loss_scaling.scaler import LossScaler, name_of, scale_of
from mpframe.core.objective import NamedObjective, StepOutput, samples_in
from mpframe.core.optim.master_weights import MasterWeights
from mpframe.core.step_result import StepResult
from mpframe.core.tree import HALF, device_of
from mpframe.precision.precision import Precision
from mpframe.training.probe import auto

log = logging.getLogger(__name__)

LossOf = Callable[[Any, Any], Tensor]
"""loss_of(model, batch): the loss of a batch, 0-d, that the trainer computes."""


class MixedPrecision:
    """A dtype mode and a loss scaler, for a model that another trainer trains.

    Args:
        mode: `fp32`, `mixed` (half weights with fp32 masters) or `amp` (fp32 weights).
        half: `float16` or `bfloat16`.
        scaler: a loss scaler of mpframe. None: `Backoff` for float16, else the loss is not scaled.
        autopsy: skipped steps in a row after which the last one is examined. 0: none. The host
            then waits for the verdict on each step.
        **options: the other arguments of `Precision`, such as `ops` and `products`.

    Raises:
        ConfigError: a value is not one of those that `Precision` takes.

    Attributes:
        precision: the dtype mode.
        scaler: the one in use.
        result: of the last step; its values stay on the device until they are read.
        report: of the last autopsy, as text, or None. It is also logged, as a warning.
    """

    def __init__(
        self,
        mode: str = "mixed",
        half: str = "float16",
        scaler: LossScaler | None = None,
        *,
        autopsy: int = 10,
        **options: Any,
    ) -> None:
        self.precision = Precision(mode, half, **options)
        self.scaler: LossScaler = auto(mode, half) if scaler is None else scaler
        self.result: StepResult | None = None
        self.report: str | None = None
        self._optimizers: list[MasterWeights] = []
        self._model: nn.Module = nn.Module()
        self._buffers, self._in_window = NO_BUFFERS, False
        self._autopsy, self._steps, self._skips = autopsy, 0, 0
        self._seen: list[tuple[Any, LossOf, RandomState, int, int]] = []

    def prepare(self, model: nn.Module, *optimizers: Optimizer) -> list[MasterWeights]:
        """Store the weights as the mode says, and return the optimizers over their masters.

        The model is on its device. It is changed in place, and so are the optimizers.
        """
        self._optimizers = [self.precision.prepare(model, one)[1] for one in optimizers]
        self._model, self._buffers, self._in_window = model, Buffers(model), False
        self.scaler.to(device_of(model))
        return self._optimizers

    def note_batch(self, batch: Any, loss_of: LossOf, epoch: int = 0, number: int = 0) -> None:
        """Note a micro-batch that is about to be trained on, for an autopsy.

        Its report names the batch by its epoch and its number there.
        """
        if self._autopsy:
            random = RandomState.now(device_of(self._model))
            self._seen.append((batch, loss_of, random, epoch, number))

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Context manager for the forward pass and the loss of a micro-batch in training."""
        if not self._in_window:  # A skip undoes all that its micro-batches did.
            self._buffers.save()
            self._in_window = True
        with self.precision.cast():
            yield

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss, 0-d, times the scale. Call it before each backward pass."""
        for optimizer in self._optimizers:
            _widen(optimizer)
        scale = scale_of(self.scaler)
        return loss * scale if isinstance(scale, Tensor) else loss

    def step(self, optimizer: Any, **bounds: float) -> StepResult:
        """Unscale, check, clip to `max_norm` or `max_value` if one is given, and update or skip."""
        result: StepResult = optimizer.step(self.scaler, **bounds)
        self._buffers.restore_if_skipped(result)
        self.result, self._in_window = result, False
        self._steps += 1
        if self._autopsy:
            self._skips = self._skips + 1 if bool(result.skipped) else 0
            if self._skips == self._autopsy and self._seen:
                self.report = self._examine(result)
                log.warning("warning: %d steps in a row were skipped\n%s", self._skips, self.report)
            self._seen.clear()
        return result

    def _examine(self, result: StepResult) -> str:
        """Replay the step, and return the report on it."""
        from mpframe.lab.autopsy.diagnosis import diagnose
        from mpframe.lab.autopsy.evidence import Evidence
        from mpframe.lab.autopsy.replay import Case
        from mpframe.lab.autopsy.report import report_on

        _, loss_of, random, epoch, number = self._seen[0]
        batches, scaling = [seen[0] for seen in self._seen], name_of(self.scaler)
        rows = [range(samples_in(batch)) for batch in batches]
        floors = {} if scaling == "none" else {"": getattr(self.scaler, "floor", 1.0)}
        scales = {"": float(result.scale)}
        objective = NamedObjective("", lambda model, batch: StepOutput(loss_of(model, batch)))
        parts = self._model, self.precision, [objective], batches
        case = Case(*parts, scales, floors, scaling, rows, random)
        facts = self._steps, f"{self._skips} steps in a row were skipped", batches, rows
        step = Evidence(*facts, epoch, number, scales, floors, scaling, random)
        return report_on(diagnose(case), case, step).text()

    def state_dict(self) -> dict[str, Any]:
        """Return what the next steps depend on, beside weights and optimizers."""
        return {"scaler": self.scaler.state_dict(), "precision": self.precision.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.scaler.load_state_dict(state["scaler"])
        self.precision.load_state_dict(state["precision"])


@torch.no_grad()
def _widen(optimizer: MasterWeights) -> None:
    """Add half gradients of earlier micro-batches to those of their masters, in fp32."""
    for parameter in optimizer.parameters:
        gradient, master = parameter.grad, optimizer.optimizer_param(parameter)
        if gradient is not None and gradient.dtype in HALF and master is not parameter:
            wide = gradient.float()
            master.grad = wide if master.grad is None else master.grad + wide
            parameter.grad = None
