"""The trainer: one step that is all or nothing, and the loop around it.

A step, in order: forward under the cast policy, loss in fp32, scaled backward, gradients to fp32
and unscaled, checked, clipped, masters updated and rounded into the weights. Where the gradients
are not finite nothing has changed at the end but the loss scale: not the weights, the optimizer's
state, the buffers, the average, the schedule or the step count.

Everything is handed in; what watches a run (logs, checkpoints, progress) is a `Callback`.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from mpframe.checkpoint.conversion import conversion, rounding
from mpframe.errors import CheckpointError, ConfigError
from mpframe.loss_scaling.interface import LossScaler, Scaling, wants_probe
from mpframe.optim import MasterWeights
from mpframe.optim.closure import refuse_beside_closure
from mpframe.optim.ema import Ema
from mpframe.optim.multi_optimizer import joined
from mpframe.optim.schedules import refuse_overrun
from mpframe.optim.step_result import StepResult, largest
from mpframe.precision import Precision
from mpframe.training.buffers import Buffers
from mpframe.training.callback import Callbacks, call
from mpframe.training.evaluation import Evaluation, Metric, fp32_weights
from mpframe.training.forward import outputs_and_loss
from mpframe.training.loader import Batch, Loader
from mpframe.training.loss_spike import LossSpikes
from mpframe.training.plan import Plan, Progress
from mpframe.training.probe import probe_amax
from mpframe.training.turns import AnyOptimizer, Loss, Objective, Turn, means, turns_of, with_losses
from mpframe.tree import map_tensors
from mpframe.user_code import InBatch, UserCode

log = logging.getLogger(__name__)


@dataclass
class Trainer:
    """Trains a model in a dtype mode.

    Attributes:
        model: prepared by `precision`, on the device it is trained on.
        optimizer: what `precision.prepare` returned; or several of those, as a `MultiOptimizer`.
        loss: loss(outputs, targets) -> 0-d tensor, the mean over the samples of a micro-batch.
            Several losses go by name, each lowered by the optimizer of that name; the model is then
            called with the name as its second argument. See turns.py.
        precision: the dtype mode; fp32 by default.
        eval_precision: the mode to validate in, over fp32 weights; None: as trained.
        scaler: scales the loss; None: the loss is not scaled, and overflow still skips the step.
            Of several losses one that they share, or one each by name.
        schedule: advanced after every step that was not skipped, `ReduceLROnPlateau` after every
            validation; of several optimizers one each.
        ema: averaged after every step that was not skipped, and validated with.
        plan: how long to train and how often to look.
        metric: makes the validation metric.
        spikes: judges each loss before its step; None: none is judged.
        callbacks: by name, called in this order.
        stop_reason: why the run is to end before its plan does; None: it is not.
    """

    model: nn.Module
    optimizer: AnyOptimizer
    loss: Loss | Mapping[str, Loss]
    precision: Precision = field(default_factory=Precision)
    scaler: Scaling = None
    schedule: LRScheduler | Mapping[str, LRScheduler] | None = None
    ema: Ema | None = None
    plan: Plan = field(default_factory=Plan)
    metric: Callable[[], Any] | None = None
    eval_precision: Precision | None = None
    spikes: LossSpikes | None = None
    callbacks: Callbacks = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    stop_reason: str | None = None

    def __post_init__(self) -> None:
        self._turns = turns_of(self.loss, self.optimizer, self.scaler)
        if self.spikes is not None and len(self._turns.objectives) > 1:
            raise ConfigError(
                f"trainer.on_loss_spike={self.spikes.policy}: judges one loss, and the dataset has "
                f"{len(self._turns.objectives)}; use trainer.on_loss_spike=off"
            )
        self._refuse_beside_closure()
        schedules = _by_name(self.schedule)
        self._plateaus = [s for s in schedules.values() if isinstance(s, ReduceLROnPlateau)]
        self._schedules = {n: s for n, s in schedules.items() if s not in self._plateaus}
        self._buffers = Buffers(self.model)
        self._device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        if self.eval_precision is not None:
            self.eval_precision.attach(self.model)
        forward = self._run_model if self.precision.policy.casts else self.model
        self._forward = torch.compile(forward) if self.plan.compile else forward

    @property
    def scalers(self) -> dict[str, LossScaler]:
        """The scalers by the name of their loss; the only one, or a shared one, is named ""."""
        return _by_name(self.scaler)

    @property
    def objectives(self) -> list[Objective]:
        """The losses in their order, each with its scaler and the parameters it moves."""
        return self._turns.objectives

    def train_step(self, *batches: Batch) -> StepResult:
        """One optimizer step on one batch, or on the micro-batches of an accumulation window.

        Args:
            batches: (inputs, targets) each; all of one step are scaled by the same loss scale.

        Returns:
            What was done; its values stay on the device.
        """
        results = [self._take_turn(turn, batches) for turn in self._turns.turns]
        self._turns.settle()
        result = results[0] if len(results) == 1 else self._joined(results)
        self._advance(result)
        return result

    def fit(self, train: Loader, val: Loader | None = None) -> None:
        """Train as planned, from where `progress` stands."""
        if any(map(wants_probe, self.scalers.values())):
            self.probe(next(train.epoch(self.progress.epoch, start=self.progress.batch)))
        self.progress.count_batches(0, len(train))  # There may be less data than there was.
        if self._validation_due():  # The run was stopped in its validation.
            self._validate(val)
            self._call("on_step_end")
        while not self._complete():
            self._run_epoch(train, val)
        self._call("on_train_end")

    def stop(self, reason: str) -> None:
        """End `fit` after this step, as if the plan ended here.

        Args:
            reason: one line, for the summary of the run.
        """
        self.stop_reason = reason

    def refuse_overrun(self, batches: int) -> None:
        """Refuse a schedule that ends before the plan does, at `batches` micro-batches an epoch.

        Raises:
            ConfigError: it would fail in mid-run.
        """
        refuse_overrun(self._schedules.values(), self.plan.total_steps(batches))

    def probe(self, batch: Batch) -> None:
        """Let scalers take their first scale from one backward pass in fp32; no more moves."""
        self.model.train()
        batch = self._on_device(batch)
        for name, scaler in self.scalers.items():
            if wants_probe(scaler):
                scaled = [o for o in self._turns.objectives if name in ("", o.name)]
                scaler.start_from(largest([self._probed(objective, batch) for objective in scaled]))

    def backward(self, batch: Batch, scale: float = 1.0) -> float:
        """Forward and scaled backward of every loss, for measurements: no step follows.

        Gradients are added to the parameters' own, buffers move.

        Returns:
            The unscaled sum of the losses.
        """
        inputs, targets = self._on_device(batch)
        total = 0.0
        for objective in self._turns.objectives:
            _, loss = self._outputs_and_loss(self._forward, objective, inputs, targets)
            (loss * scale).backward(inputs=objective.parameters)  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total

    @torch.no_grad()
    def evaluate(self, loader: Loader) -> Evaluation:
        """The mean loss per sample and the metric over one pass; the model is left as it was.

        Of several losses it is their sum, and the metric sees the outputs of the first.
        """
        metric = Metric(self.metric) if self.metric else None
        total, samples = torch.zeros((), dtype=torch.float64, device=self._device), 0
        with self._weights_for_evaluation(), _mode_restored(self.model):
            self.model.eval()
            for number, batch in enumerate(loader.epoch(0)):
                self._call("on_prediction_step")
                with InBatch("validation", 0, number):
                    total += self._evaluate_batch(self._on_device(batch), metric)
                samples += len(batch[1])
        mean = float(total) / max(samples, 1)
        return metric.evaluation(mean) if metric else Evaluation(mean, "none", math.nan)

    def state_dict(self) -> dict[str, Any]:
        """Everything that can change the run's future; weights as their fp32 masters."""
        return {
            "weights": self.weights(),
            "optimizer": self.optimizer.inner_state_dict(),  # Masters stand among the weights.
            "scaler": _state_by_name(self.scaler),
            "schedule": _state_by_name(self.schedule),
            "ema": self.ema.by_name(self.model) if self.ema else None,
            "ema_updates": self.ema.updates if self.ema else 0,
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
        _load_by_name(self.scaler, state["scaler"], "loss_scaling")
        _load_by_name(self.schedule, state["schedule"], "scheduler")
        if self.ema is not None and state["ema"] is not None:
            # An older checkpoint did not count them, and its decay was never warmed up.
            updates = state.get("ema_updates", state["progress"]["steps"])
            self.ema.load_by_name(self.model, state["ema"], updates)
        if self.spikes is not None and state["spikes"] is not None:
            self.spikes.load_state_dict(state["spikes"])
        self.progress = Progress.saved(state["progress"])
        if state["precision"] != str(self.precision):
            rounded = rounding(self.model, state["weights"])
            scaled = bool(state["scaler"]), self.scaler is not None
            log.info("%s", conversion(state["precision"], str(self.precision), rounded, scaled))

    def weights(self) -> dict[str, Tensor]:
        """Parameters, as their fp32 masters, and buffers by name; not copied."""
        masters = self.optimizer.masters_by_name(self.model)
        return {**self.model.state_dict(), **masters}

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Take parameters (fp32) and buffers by name; masters exactly, half weights rounded.

        The average starts anew from them.

        Raises:
            CheckpointError: a name is missing or unexpected, or a shape differs.
        """
        self.optimizer.load_masters(self.model, weights)
        if self.ema is not None:
            self.ema.restart()

    def _evaluate_batch(self, batch: Batch, metric: Metric | None) -> Tensor:
        """The sum of the losses times the batch's size, 0-d float64."""
        inputs, targets = batch
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for objective in self._turns.objectives:
            outputs, loss = self._outputs_and_loss(self._evaluated, objective, inputs, targets)
            total += loss.double() * len(targets)
            if metric is not None and objective is self._turns.objectives[0]:
                metric.update(outputs, targets)
        return total

    def _take_turn(self, turn: Turn, batches: Sequence[Batch]) -> StepResult:
        """Forward and backward of a turn's losses on all micro-batches, and its step."""
        if turn.optimizer.needs_closure:
            return self._step_with_closure(turn, *batches)
        # Here and not at the end: a CPU's allocator would give the memory back and ask for it anew.
        turn.optimizer.zero_grad()
        self._buffers.save()
        losses = means([self._forward_backward(turn, batch, len(batches) > 1) for batch in batches])
        skip_mask = None if self.spikes is None else self.spikes.judge(losses[0])
        with UserCode("optimizer:", getattr(turn.optimizer, "optimizer", turn.optimizer)):
            result = turn.step(self.plan.clip_norm, self.plan.whole_windows, skip_mask)
        self._buffers.restore_where(result.any_skipped())
        return with_losses(result, losses)

    def _step_with_closure(self, turn: Turn, batch: Batch) -> StepResult:
        """The step of an optimizer that evaluates the loss itself, as often as it likes."""
        inputs, targets = self._on_device(batch)
        (objective,) = turn.objectives

        def closure() -> Tensor:
            turn.optimizer.zero_grad()
            return self._pass(objective, inputs, targets)

        result = turn.step(self.plan.clip_norm, self.plan.whole_windows, None, closure)
        if self.spikes is not None and result.loss is not None:
            self.spikes.judge(result.loss)
        return result

    def _refuse_beside_closure(self) -> None:
        if isinstance(self.optimizer, MasterWeights) and self.optimizer.needs_closure:
            refuse_beside_closure(
                self.optimizer.optimizer,
                half=self.precision.policy.mode == "mixed",
                cast=self.precision.policy.casts,
                scaled=self.scaler is not None,
                clipped=self.plan.clip_norm is not None,
                accumulated=self.plan.accumulate > 1,
                vetoed=self.spikes is not None and self.spikes.policy != "warn",
            )

    def _forward_backward(self, turn: Turn, batch: Batch, accumulating: bool) -> list[Tensor]:
        """Forward and scaled backward; the unscaled losses, detached, nan where it was dropped."""
        buffers = Buffers(self.model) if accumulating else None
        if buffers is not None:
            buffers.save()
        inputs, targets = self._on_device(batch)
        losses = [self._pass(objective, inputs, targets) for objective in turn.objectives]
        if buffers is None:
            return losses
        good = torch.isfinite(turn.optimizer.accumulate(turn.scale))
        buffers.restore_where(~good)
        return [torch.where(good, loss, torch.nan) for loss in losses]

    def _pass(self, objective: Objective, inputs: Any, targets: Any) -> Tensor:
        """One loss, forward and backward; detached."""
        _, loss = self._outputs_and_loss(self._forward, objective, inputs, targets)
        with UserCode("model: the backward pass of", self.model):
            objective.backward(loss)
        return loss.detach()

    def _joined(self, results: list[StepResult]) -> StepResult:
        names = [objective.name for objective in self._turns.objectives]
        return joined(dict(zip(names, results, strict=True)))

    def _probed(self, objective: Objective, batch: Batch) -> Tensor:
        arguments = (batch[0], *objective.arguments)
        return probe_amax(self.model, objective.loss, self.precision, arguments, batch[1])

    def _run_model(self, *arguments: Any) -> Any:
        with self.precision.cast():
            return self.model(*arguments)

    def _evaluated(self, *arguments: Any) -> Any:
        if self.eval_precision is None:
            return self._forward(*arguments)
        with self.eval_precision.cast():
            return self.model(*arguments)

    @contextmanager
    def _weights_for_evaluation(self) -> Iterator[None]:
        """Within the block the weights are fp32 where evaluation has its own mode, and averaged."""
        full = self.eval_precision is not None
        with (
            fp32_weights(self.optimizer, self.model) if full else nullcontext(),
            self.ema.applied() if self.ema else nullcontext(),
        ):
            yield

    def _outputs_and_loss(
        self, forward: Callable[..., Any], objective: Objective, inputs: Any, targets: Any
    ) -> tuple[Any, Tensor]:
        arguments = (inputs, *objective.arguments)
        return outputs_and_loss(self.model, forward, objective.loss, arguments, targets)

    def _advance(self, result: StepResult) -> None:
        """Count the step, and move schedules and average along unless it was skipped."""
        skips, dropped = _verdict(result)
        self.progress.tried(skips, dropped)
        for name, schedule in self._schedules.items():
            if not skips[name]:
                with UserCode("scheduler:", schedule):
                    schedule.step()
        if all(skips.values()):
            return
        if self.ema is not None:
            self.ema.update()
        if self.spikes is not None and result.loss is not None:
            self.spikes.remember(result.loss)

    def _run_epoch(self, train: Loader, val: Loader | None) -> None:
        self.model.train()
        batches = train.epoch(self.progress.epoch, start=self.progress.batch)
        for window in _windows(batches, self.plan.accumulate):
            self._call("on_step_begin", window)
            with InBatch("training", self.progress.epoch, self.progress.batch, len(window)):
                result = self.train_step(*window)
            self.progress.count_batches(len(window), len(train))
            self._call("on_optimizer_step", result)
            if self._validation_due():
                self._validate(val)
            if self._at_pause():
                self._call("on_epoch_end")
            self._call("on_step_end")
            if self._complete():
                break

    def _complete(self) -> bool:
        return self.progress.epoch >= self.plan.epochs or self._at_last_step()

    def _at_last_step(self) -> bool:
        last = self.plan.max_steps is not None and self.progress.steps >= self.plan.max_steps
        return last or self.stop_reason is not None

    def _at_pause(self) -> bool:
        """True after the last step of an epoch or of the run."""
        return self.progress.batch == 0 or self._at_last_step()

    def _validation_due(self) -> bool:
        global_step = self.progress.global_step
        if global_step == self.progress.validated:
            return False
        every = self.plan.eval_every
        at_step = global_step % every == 0 if every else self.progress.batch == 0
        return at_step or self._complete()

    def _validate(self, val: Loader | None) -> None:
        if val is not None:
            evaluation = self.evaluate(val)
            self.progress.validated = self.progress.global_step
            for schedule in self._plateaus:
                schedule.step(evaluation.watched)
            self._call("on_evaluate", evaluation)

    def _call(self, event: str, *values: Any) -> None:
        call(self.callbacks, event, self, *values)

    def _on_device(self, batch: Batch) -> Batch:
        if self._device.type == "cpu":
            return batch
        return map_tensors(lambda t: t.to(self._device, non_blocking=True), batch)  # type: ignore[no-any-return]


def _verdict(result: StepResult) -> tuple[dict[str, bool], int]:
    """Which optimizers skipped the step, by name, and how many micro-batches it left out.

    The one place where the trainer itself waits for the device, once in every step and for one
    transfer. Before it waits an optimizer whose kernels cannot skip by themselves; after it what
    watches the run and reads a number: a guard of loss spikes in every step, curves when they log.
    """
    parts = result.each()
    numbers = [part.skipped.long() for part in parts.values()]
    numbers += [] if result.dropped is None else [result.dropped]
    read = torch.stack(numbers).tolist()
    skips = dict(zip(parts, map(bool, read), strict=False))
    return skips, 0 if result.dropped is None else read[-1]


def _by_name(given: Any) -> dict[str, Any]:
    """Something of which there may be one, several by name, or none; the only one is named ""."""
    if given is None:
        return {}
    return dict(given) if isinstance(given, Mapping) else {"": given}


def _state_by_name(given: Any) -> dict[str, Any]:
    return {name: own.state_dict() for name, own in _by_name(given).items()}


def _load_by_name(given: Any, states: Mapping[str, Any], option: str) -> None:
    """Load what `_state_by_name` gave.

    Raises:
        CheckpointError: there was another number of them, or others.
    """
    own = _by_name(given)
    if own and states and set(own) != set(states):
        raise CheckpointError(
            f"{option}: the checkpoint has {_names(states)}, this run {_names(own)}; resume with "
            "the optimizers it was made with"
        )
    for name in own.keys() & states.keys():
        own[name].load_state_dict(states[name])


def _names(given: Iterable[str]) -> str:
    return ", ".join(name or "a single one" for name in sorted(given))


@contextmanager
def _mode_restored(model: nn.Module) -> Iterator[None]:
    training = model.training
    try:
        yield
    finally:
        model.train(training)


def _windows(batches: Iterator[Batch], size: int) -> Iterable[list[Batch]]:
    while window := list(islice(batches, size)):
        yield window
