"""The trainer: one step that is all or nothing, and the loop around it.

A step, in order: forward under the cast policy, loss in fp32, scaled backward, gradients to fp32
and unscaled, checked, clipped, masters updated and rounded into the weights. Where the gradients
are not finite nothing has changed at the end but the loss scale: not the weights, the optimizer's
state, the buffers, the average, the schedule or the step count.

Everything is handed in; what watches a run (logs, checkpoints, progress) is a `Callback`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from mpframe.buffers import Buffers
from mpframe.ema import Ema
from mpframe.evaluation import Evaluation, fp32_weights
from mpframe.loss_spike import LossSpikes
from mpframe.plan import Plan, Progress
from mpframe.precision import MasterWeights, Precision
from mpframe.precision.tree import map_tensors
from mpframe.probe import probe_amax
from mpframe.step import LossScaler, StepResult, wants_probe

Batch = tuple[Any, Any]
Loss = Callable[[Any, Any], Tensor]


class Loader(Protocol):
    """Batches of a dataset in an order that depends on the epoch alone."""

    def __len__(self) -> int:
        """Batches per epoch."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from batch number `start` on."""


class Callback:
    """Watches a run; each method is called after what it names and does nothing here."""

    def after_step(self, trainer: "Trainer", result: StepResult) -> None:
        """A step was tried; `trainer.progress` already counts it."""

    def after_evaluation(self, trainer: "Trainer", evaluation: Evaluation) -> None:
        """The model was validated."""

    def after_epoch(self, trainer: "Trainer") -> None:
        """A pass over the training data is complete (and validated, where that is due)."""


@dataclass
class Trainer:
    """Trains a model in a dtype mode.

    Attributes:
        model: prepared by `precision`, on the device it is trained on.
        optimizer: what `precision.prepare` returned.
        loss: loss(outputs, targets) -> 0-d tensor, the mean over the samples of a micro-batch.
        precision: the dtype mode; fp32 by default.
        eval_precision: the mode to validate in, over fp32 weights; None: as trained.
        scaler: scales the loss; None: the loss is not scaled, and overflow still skips the step.
        schedule: advanced after every step that was not skipped.
        ema: averaged after every step that was not skipped, and validated with.
        plan: how long to train and how often to look.
        metric: makes the validation metric.
        spikes: judges each loss before its step; None: none is judged.
        callbacks: called in this order.
    """

    model: nn.Module
    optimizer: MasterWeights
    loss: Loss
    precision: Precision = field(default_factory=Precision)
    scaler: LossScaler | None = None
    schedule: LRScheduler | None = None
    ema: Ema | None = None
    plan: Plan = field(default_factory=Plan)
    metric: Callable[[], Any] | None = None
    eval_precision: Precision | None = None
    spikes: LossSpikes | None = None
    callbacks: Sequence[Callback] = ()
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        self._buffers = Buffers(self.model)
        self._device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        if self.eval_precision is not None:
            self.eval_precision.attach(self.model)
        forward = self._run_model if self.precision.policy.casts else self.model
        self._forward = torch.compile(forward) if self.plan.compile else forward

    def train_step(self, *batches: Batch) -> StepResult:
        """One optimizer step on one batch, or on the micro-batches of an accumulation window.

        Args:
            batches: (inputs, targets) each; all of one step are scaled by the same loss scale.

        Returns:
            What was done; its values stay on the device.
        """
        # Here and not at the end: a CPU's allocator would give the memory back and ask for it anew.
        self.optimizer.zero_grad()
        self._buffers.save()
        losses = [self._forward_backward(batch, len(batches) > 1) for batch in batches]
        loss = _mean_of_finite(losses)
        veto = None if self.spikes is None else self.spikes.judge(loss)
        result = self.optimizer.step(self.scaler, max_norm=self.plan.clip_norm, veto=veto)
        result = replace(result, loss=loss)
        self._buffers.restore_where(result.skipped)
        self._advance(result)
        return result

    def fit(self, train: Loader, val: Loader | None = None) -> None:
        """Train as planned, from where `progress` stands."""
        if wants_probe(self.scaler):
            self.probe(next(train.epoch(self.progress.epoch, start=self.progress.batch)))
        while self.progress.epoch < self.plan.epochs and not self._at_last_step():
            self._run_epoch(train, val)

    def probe(self, batch: Batch) -> None:
        """Let the scaler take its first scale from one backward pass in fp32; no more moves."""
        if wants_probe(self.scaler):
            self.model.train()
            batch = self._on_device(batch)
            self.scaler.start_from(probe_amax(self.model, self.loss, self.precision, batch))

    @torch.no_grad()
    def evaluate(self, loader: Loader) -> Evaluation:
        """The mean loss per sample and the metric over one pass; the model is left as it was."""
        training = self.model.training
        self.model.eval()
        metric = self.metric() if self.metric else None
        total, samples = torch.zeros((), dtype=torch.float64), 0
        with self._weights_for_evaluation():
            for batch in loader.epoch(0):
                inputs, targets = self._on_device(batch)
                outputs = self._predict(inputs, self._evaluated)
                count = len(targets)
                total = total.to(outputs.device) + self.loss(outputs, targets).double() * count
                samples += count
                if metric is not None:
                    metric.update(outputs, targets)
        self.model.train(training)
        name, value = (metric.name, float(metric.value())) if metric else ("none", math.nan)
        return Evaluation(float(total) / max(samples, 1), name, value)

    def state_dict(self) -> dict[str, Any]:
        """Everything that can change the run's future; weights as their fp32 masters."""
        optimizer = self.optimizer.state_dict()
        del optimizer["masters"]  # They stand among the weights, by name.
        return {
            "weights": self._weights(),
            "optimizer": optimizer,
            "scaler": self.scaler.state_dict() if self.scaler else None,
            "schedule": self.schedule.state_dict() if self.schedule else None,
            "ema": self.ema.by_name(self.model) if self.ema else None,
            "spikes": self.spikes.state_dict() if self.spikes else None,
            "precision": str(self.precision),
            "progress": asdict(self.progress),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            CheckpointError: the state belongs to another model, optimizer or scaler.
        """
        self.load_weights(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        for own, saved in (
            (self.scaler, state["scaler"]),
            (self.schedule, state["schedule"]),
            (self.spikes, state["spikes"]),
        ):
            if own is not None and saved is not None:
                own.load_state_dict(saved)
        if self.ema is not None and state["ema"] is not None:
            self.ema.load_by_name(self.model, state["ema"])
        self.progress = Progress(**state["progress"])

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Take parameters (fp32) and buffers by name; masters exactly, half weights rounded.

        Raises:
            CheckpointError: a name is missing or unexpected, or a shape differs.
        """
        self.optimizer.load_masters(self.model, weights)

    def _forward_backward(self, batch: Batch, accumulating: bool) -> Tensor:
        """Forward and scaled backward; the unscaled loss, detached, nan where it was dropped."""
        buffers = Buffers(self.model) if accumulating else None
        if buffers is not None:
            buffers.save()
        inputs, targets = self._on_device(batch)
        loss = self.loss(self._predict(inputs, self._forward), targets)
        scale = 1.0 if self.scaler is None else self.scaler.scale
        (loss if self.scaler is None else loss * scale).backward()  # type: ignore[no-untyped-call]
        if buffers is not None:
            amax = self.optimizer.accumulate(scale)
            buffers.restore_where(~torch.isfinite(amax))
            return torch.where(torch.isfinite(amax), loss.detach(), torch.nan)
        return loss.detach()

    def _run_model(self, inputs: Any) -> Any:
        with self.precision.cast():
            return self.model(inputs)

    def _evaluated(self, inputs: Any) -> Any:
        if self.eval_precision is None:
            return self._forward(inputs)
        with self.eval_precision.cast():
            return self.model(inputs)

    @contextmanager
    def _weights_for_evaluation(self) -> Iterator[None]:
        """Within the block the weights are fp32 where evaluation has its own mode, and averaged."""
        full = self.eval_precision is not None
        with (
            fp32_weights(self.optimizer, self.model) if full else nullcontext(),
            self.ema.applied() if self.ema else nullcontext(),
        ):
            yield

    def _predict(self, inputs: Any, forward: Callable[[Any], Any]) -> Any:
        """The model's outputs in fp32 or wider, so that losses and metrics are computed there."""
        return map_tensors(_widened, forward(inputs))

    def _advance(self, result: StepResult) -> None:
        """Count the step, and move schedule and average along unless it was skipped."""
        if result.dropped is not None:
            self.progress.dropped += int(result.dropped)
        if bool(result.skipped):
            self.progress.skipped += 1
            self.progress.skipped_in_a_row += 1
            return
        self.progress.steps += 1
        self.progress.skipped_in_a_row = 0
        if self.spikes is not None and result.loss is not None:
            self.spikes.remember(result.loss)
        if self.schedule is not None:
            self.schedule.step()
        if self.ema is not None:
            self.ema.update()

    def _run_epoch(self, train: Loader, val: Loader | None) -> None:
        self.model.train()
        batches = train.epoch(self.progress.epoch, start=self.progress.batch)
        for window in _windows(batches, self.plan.accumulate):
            result = self.train_step(*window)
            self.progress.batch += len(window)
            self._call("after_step", result)
            if self.plan.eval_every and self.progress.attempts % self.plan.eval_every == 0:
                self._validate(val)
            if self._at_last_step():
                break
        if self.progress.batch >= len(train):
            self.progress.epoch, self.progress.batch = self.progress.epoch + 1, 0
        if not self.plan.eval_every or self._at_last_step():
            self._validate(val)
        self._call("after_epoch")

    def _at_last_step(self) -> bool:
        return self.plan.max_steps is not None and self.progress.steps >= self.plan.max_steps

    def _validate(self, val: Loader | None) -> None:
        if val is not None:
            self._call("after_evaluation", self.evaluate(val))

    def _call(self, event: str, *values: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, *values)

    def _weights(self) -> dict[str, Tensor]:
        masters = self.optimizer.masters_by_name(self.model)
        return {**self.model.state_dict(), **masters}

    def _on_device(self, batch: Batch) -> Batch:
        if self._device.type == "cpu":
            return batch
        return map_tensors(lambda t: t.to(self._device, non_blocking=True), batch)  # type: ignore[no-any-return]


def _windows(batches: Iterator[Batch], size: int) -> Iterable[list[Batch]]:
    while window := list(islice(batches, size)):
        yield window


def _mean_of_finite(losses: list[Tensor]) -> Tensor:
    """The mean of the losses that count; of a single one, itself."""
    return losses[0] if len(losses) == 1 else torch.stack(losses).nanmean()


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
