"""The trainer: one step that is all or nothing, and the loop around it.

`Trainer.train_step` is the step, in order: forward under the cast policy, loss in fp32, scaled
backward, gradients to fp32 and unscaled, checked, clipped, masters updated and rounded into the
weights. If the gradients are not finite nothing has changed at the end but the loss scale: not the
weights, the optimizer's state, the buffers, the average, the schedule or the step count.

All parts are arguments; what watches a run (logs, checkpoints, progress) is a `Callback`. The
trainer of several losses is in multi_objective.py, that of LBFGS in closure_trainer.py.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from mpframe.checkpoint.state import conversion, rounding
from mpframe.distributed.world import ALONE, World, weighted
from mpframe.errors import CheckpointError, ConfigError, MpframeError
from mpframe.loss_scaling.interface import LossScaler, Scaling, scale_of, wants_probe
from mpframe.objectives import Objective, compute, count_of, require_objective
from mpframe.optim import MasterWeights, fp32_weights
from mpframe.optim.ema import Ema
from mpframe.optim.gradients import as_count
from mpframe.optim.masters.widening import widen_named, widened
from mpframe.optim.multi_optimizer import MultiOptimizer
from mpframe.optim.schedules import Schedule
from mpframe.optim.step_result import StepResult, any_of, largest, with_verdicts
from mpframe.precision import Precision
from mpframe.training.buffers import Buffers, ExtraState
from mpframe.training.callback import Callbacks, call
from mpframe.training.evaluation import Evaluation, Metrics
from mpframe.training.loader import Batch, Loader
from mpframe.training.loss_spike import LossSpikes
from mpframe.training.named_objective import NamedObjective
from mpframe.training.plan import Plan, Progress
from mpframe.training.probe import probe_amax
from mpframe.tree import device_of, map_tensors
from mpframe.user_code import InBatch, UserCode, blame, name_of, raised

if TYPE_CHECKING:  # It loads torch.distributed.
    from mpframe.distributed.in_backward import InBackward

log = logging.getLogger(__name__)

_MOST_PENDING = 100  # So that a run that only skips steps is noticed.

AnyOptimizer = MasterWeights | MultiOptimizer
CountedLoss = tuple[Tensor, Tensor | int | None]  # 0-d, and its `StepOutput.count`


@dataclass
class Trainer:
    """Trains a model in a dtype mode.

    Attributes:
        model: prepared by `precision`, on the device it is trained on.
        optimizer: what `precision.prepare` returned; or several of those, as a `MultiOptimizer`.
        objective: objective(model, batch) -> StepOutput, its loss the mean over `count` samples of
            a micro-batch; `supervised(loss)` for batches of inputs and targets. The loss of a step
            is the mean over the samples of all its micro-batches and ranks.
        precision: the dtype mode; fp32 by default.
        eval_precision: the mode to validate in, over fp32 weights; None: as trained.
        scaler: scales the loss; None: the loss is not scaled, and overflow still skips the step.
        schedule: advanced after every step that was not skipped, `ReduceLROnPlateau` after every
            validation; of several optimizers one each.
        ema: averaged after every step that was not skipped, and validated with.
        plan: how long to train and how often to look.
        metrics: what makes each metric of a validation, by name; see `evaluation.NamedMetric`.
        monitor: the name of the metric that tells progress, or `loss`; None: the first metric.
        spikes: judges each loss before its step; None: none is judged.
        world: the ranks that train together, each on its part of every batch.
        callbacks: by name, called in this order.
        stop_reason: why the run is to end before its plan does; None: it is not.

    Raises:
        ConfigError: the optimizer evaluates the loss itself, or there is a scaler for each of
            several losses.
        UserCodeError: the objective is none.
    """

    model: nn.Module
    optimizer: AnyOptimizer
    objective: Objective
    precision: Precision = field(default_factory=Precision)
    scaler: Scaling = None
    schedule: Schedule | Mapping[str, Schedule] | None = None
    ema: Ema | None = None
    plan: Plan = field(default_factory=Plan)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    monitor: str | None = None
    eval_precision: Precision | None = None
    spikes: LossSpikes | None = None
    world: World = ALONE
    callbacks: Callbacks = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    stop_reason: str | None = None

    def __post_init__(self) -> None:
        self._refuse_misfits()
        self.optimizer.join(self.world)
        schedules = _by_name(self.schedule)
        self._plateaus = [s for s in schedules.values() if isinstance(s, ReduceLROnPlateau)]
        self._schedules = {n: s for n, s in schedules.items() if s not in self._plateaus}
        self._buffers, self.extra_state = Buffers(self.model), ExtraState(self.model)
        self._unread: list[StepResult] = []
        self._device = device_of(self.model)
        if self.eval_precision is not None:
            self.eval_precision.attach(self.model)
        # What the objective is called with. A compiled model is traced with the casts around it.
        self._model: Any = torch.compile(self.model) if self.plan.compile else self.model
        self._in_backward = self._reducer()

    @property
    def scalers(self) -> dict[str, LossScaler]:
        """The scalers by the name of their loss; the only one, or a shared one, is named ""."""
        return _by_name(self.scaler)

    @property
    def objectives(self) -> list[NamedObjective]:
        """Every loss of a step, in their order, with its scaler and the parameters it moves."""
        scaler: Any = self.scaler  # One loss has one scaler.
        return [NamedObjective("", self.objective, scaler)]

    def train_step(self, *batches: Batch) -> StepResult:
        """One optimizer step on one batch, or on the micro-batches of an accumulation window.

        Args:
            batches: what the objective takes; all of one step are scaled by the same loss scale.

        Returns:
            What was done; its values stay on the device.
        """
        # Not at the end: a CPU's allocator would give the memory back and ask for it again.
        self.optimizer.zero_grad()
        self._buffers.save()
        masks = []
        if self._in_backward is not None and len(batches) == 1:
            loss = self._forward_backward_together(batches[0], self._in_backward)
        elif len(batches) == 1 and self.world.size == 1:
            loss, count = self._forward_backward(batches[0])
            if isinstance(count, Tensor) or count == 0:  # The mean over nothing is no step.
                masks.append(as_count(count, self._device) == 0)
        else:
            loss = self._accumulate(batches)
        if self._unread and (self._schedules or self.spikes is not None):
            # These need the verdict on the step before; the device has this step's passes queued.
            self.read_verdicts()
        if self.spikes is not None and (spiked := self.spikes.judge(loss)) is not None:
            masks.append(spiked)
        try:
            # Gradients to fp32, unscale, check, clip, update or skip, tell the scaler.
            result = self.optimizer.step(
                self.scaler,  # type: ignore[arg-type]
                max_norm=self.plan.clip_norm,
                max_value=self.plan.clip_value,
                skip_if_dropped=self.plan.skip_if_dropped,
                skip_mask=any_of(masks) if masks else None,
            )
        except BaseException:
            blame("optimizer:", getattr(self.optimizer, "optimizer", self.optimizer))
        self._buffers.restore_where(result.any_skipped())
        result = replace(result, loss=loss)
        self._advance(result)
        return result

    def read_verdicts(self) -> None:
        """Let the host know which of the steps so far were skipped, and act on it.

        All that depends on the verdict happens here, and only here: the counts, the schedule and
        the callbacks, for one step after the other. A plain optimizer has read its verdict already,
        and each step comes here at once. An optimizer that skips on the device reads nothing, and
        its steps wait for this call: the host waits for the device once for all of them. `fit`
        calls it when something is due that depends on them, and before the next update if there is
        a schedule; `state_dict` calls it, and so may a callback.
        """
        results, self._unread = self._unread, []
        self.progress.pending = 0
        for result in with_verdicts(results):
            self.progress.count_step(result)
            if self._schedules:
                self._move_schedules(result)
            if self.spikes is not None and result.loss is not None and not result.known.skipped:
                self.spikes.remember(result.loss)
            if self.callbacks:
                self._call("on_optimizer_step", result)

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

    def probe(self, batch: Batch) -> None:
        """Let scalers take their first scale from one backward pass in fp32; all else stays."""
        self.model.train()
        batch = self._on_device(batch)
        for name, scaler in self.scalers.items():
            if wants_probe(scaler):
                scaled = [o.objective for o in self.objectives if name in ("", o.name)]
                amaxes = [probe_amax(self.model, own, self.precision, batch) for own in scaled]
                scaler.start_from(self.world.max(largest(amaxes)))

    def backward(self, batch: Batch, scale: float = 1.0) -> float:
        """Forward and scaled backward of every loss, for measurements: no step follows.

        Gradients are added to the parameters' own, buffers move.

        Returns:
            The unscaled sum of the losses.
        """
        batch, total = self._on_device(batch), 0.0
        for own in self.objectives:
            loss, _ = self._forward(own.objective, batch)
            (loss * scale).backward(inputs=own.parameters)  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total

    def test(self, loader: Loader) -> Evaluation:
        """Evaluate on data that chose nothing, and tell the callbacks."""
        evaluation = self.evaluate(loader, "test")
        self._call("on_test", evaluation)
        return evaluation

    @torch.no_grad()
    def evaluate(self, loader: Loader, split: str = "validation") -> Evaluation:
        """The mean loss per sample and the metrics over one pass; the model is left as it was.

        Each batch's loss counts as often as its objective says (`StepOutput.count`). Of several
        losses it is their sum; the count, and what the metrics see, are those of the first.

        Args:
            loader: the samples.
            split: what they are for, in messages.
        """
        metrics = Metrics(self.metrics, self.monitor, self._device, self.world)
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        with self._weights_for_evaluation(), _mode_restored(self.model):
            self.model.eval()
            for number, batch in enumerate(loader.epoch(0)):
                self._call("on_prediction_step")
                with InBatch(split, 0, number, loader=loader):
                    sums += self._evaluate_batch(batch, metrics)
        return metrics.evaluation(sums)

    def state_dict(self) -> dict[str, Any]:
        """Everything that can change the run's future; weights as their fp32 masters."""
        self.read_verdicts()
        return {
            "weights": self.weights(),
            "extra_state": self.extra_state.state_dict(),
            "widened": widened(self.model),
            "optimizer": self.optimizer.inner_state_dict(),  # Masters stand among the weights.
            "scaler": _state_by_name(self.scaler),
            "schedule": _state_by_name(self.schedule),
            "ema": self.ema.by_name(self.model) if self.ema else None,
            "ema_updates": self.ema.updates if self.ema else 0,
            "spikes": self.spikes.state_dict() if self.spikes else None,
            "precision": str(self.precision),
            "products": self.precision.state_dict(),
            "progress": asdict(self.progress),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            CheckpointError: the state belongs to another model, optimizer or scaler.
        """
        self.extra_state.load_state_dict(state.get("extra_state", {}))
        widen_named(self.model, state.get("widened", ()))
        self.load_weights(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        _load_by_name(self.scaler, state["scaler"], "loss_scaling")
        _load_by_name(self.schedule, state["schedule"], "scheduler")
        if self.ema is not None and state["ema"] is not None:
            # An older checkpoint has no such count, and its decay was never warmed up.
            updates = state.get("ema_updates", state["progress"]["steps"])
            self.ema.load_by_name(self.model, state["ema"], updates)
        if self.spikes is not None and state["spikes"] is not None:
            self.spikes.load_state_dict(state["spikes"])
        self.precision.load_state_dict(state.get("products", {}))
        self.progress, self._unread = Progress.saved(state["progress"]), []
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

        The average starts again from them.

        Raises:
            CheckpointError: a name is missing or unexpected, or a shape differs.
        """
        self.optimizer.load_masters(self.model, weights)
        if self.ema is not None:
            self.ema.restart()

    def _forward_backward(self, batch: Batch, ranks: "InBackward | None" = None) -> CountedLoss:
        """Forward and scaled backward; the unscaled loss, detached, and its count."""
        loss, count = self._forward(self.objective, self._on_device(batch))
        sharding = self.world.sharding
        if ranks is not None:
            ranks.weigh(as_count(count_of(count, batch), loss.device))
        elif sharding is not None:
            sharding.weight = self.world.weight(as_count(count_of(count, batch), loss.device))
        scaler: Any = self.scaler
        try:
            (loss if scaler is None else loss * scaler.scale).backward()
        except BaseException:
            blame("model: the backward pass of", self.model)
        if sharding is not None:
            sharding.refuse_unused()
        return loss.detach(), count

    def _forward_backward_together(self, batch: Batch, ranks: "InBackward") -> Tensor:
        """The same with gradients that the ranks average meanwhile; the mean loss of all."""
        scaler: Any = self.scaler
        scale = None if scaler is None else scaler.scale
        with ranks.summing(self.optimizer.parameters, scale):
            loss, _ = self._forward_backward(batch, ranks)
        end_broadcast = self._buffers.start_broadcast(self.world)  # While gradients are sent.
        means, amax, before, loss = ranks.means(loss)
        end_broadcast()
        self.optimizer.keep_means(means, amax, before)
        return loss

    def _accumulate(self, batches: Sequence[Batch]) -> Tensor:
        """Forward and backward of each micro-batch; the mean loss of those that count."""
        scaler: Any = self.scaler
        buffers, losses, alone = Buffers(self.model), [], len(batches) == 1
        for batch in batches:
            buffers.save()
            loss, count = self._forward_backward(batch)
            count = count_of(count, batch)
            scale: Any = scale_of(scaler)
            good = torch.isfinite(self.optimizer.accumulate(scale, count))
            buffers.restore_where(~good)
            # The verdict on a single one is that on the step.
            losses.append((torch.where(good | alone, loss, torch.nan), count))
        self._buffers.broadcast(self.world)
        return weighted_loss(losses, self.world)

    def _forward(self, objective: Objective, batch: Batch) -> CountedLoss:
        """The loss under the casts, in fp32 or wider, and its count."""
        output = compute(objective, self._model, batch, self.precision.cast())
        return output.loss, output.count

    def _evaluate_batch(self, batch: Batch | None, metrics: Metrics) -> Tensor:
        """The losses times the samples that they are the mean of, and the samples: [2] float64.

        They are those of this rank's part of a batch, None if that is empty.
        """
        nothing = torch.zeros(2, dtype=torch.float64, device=self._device)
        missing = batch is None
        if self.world.sharding is not None:  # A rank without samples gathers with the others.
            batch = self.world.lend(batch)
        if batch is None:
            metrics.update(None)
            return nothing
        batch = self._on_device(batch)
        precision = self.eval_precision or self.precision
        model = self._model if self.eval_precision is None else self.model
        with precision.cast():
            computed = [compute(own.objective, model, batch) for own in self.objectives]
        if missing:
            metrics.update(None)
            return nothing
        first = computed[0]
        metrics.update((first.outputs, first.targets))
        count = as_count(count_of(first.count, batch), self._device)
        losses = [weighted(output.loss.double(), count) for output in computed]
        return torch.stack([torch.stack(losses).sum(), count])

    def _reducer(self) -> "InBackward | None":
        if self.plan.reduce == "after_backward" or self.world.sharding is not None:
            return None  # Shards sum by themselves.
        in_half = self.plan.reduce == "in_backward_half"
        return self.world.in_backward(self.precision.policy.half_dtype if in_half else None)

    def _refuse_misfits(self) -> None:
        require_objective("objective", self.objective)
        if self.optimizer.needs_closure:
            optimizer = type(getattr(self.optimizer, "optimizer", self.optimizer)).__name__
            raise ConfigError(
                f"optimizer={optimizer}: evaluates the loss itself; use ClosureTrainer, or an "
                "optimizer that takes no closure"
            )
        if isinstance(self.scaler, Mapping):
            raise ConfigError(
                "optimizer.scalers=each: there is one loss, and one backward pass has one scale; "
                "use optimizer.scalers=shared"
            )

    @contextmanager
    def _weights_for_evaluation(self) -> Iterator[None]:
        """Within the block the weights are fp32 where evaluation has its own mode, and averaged."""
        full = self.eval_precision is not None
        with (
            fp32_weights(self.model) if full else nullcontext(),
            self.ema.applied() if self.ema else nullcontext(),
        ):
            yield

    def _advance(self, result: StepResult) -> None:
        """Follow a step: the average moves at once, all else once the verdict is known."""
        self.precision.agree(self.world)
        verdict = result.verdict
        if self.ema is not None and not (verdict and verdict.skipped):
            self.ema.update(None if verdict else result.skipped)
        self._unread.append(result)
        self.progress.pending += 1
        if verdict or self.progress.pending >= _MOST_PENDING:
            self.read_verdicts()

    def _move_schedules(self, result: StepResult) -> None:
        """A schedule moves with its optimizer's step, unless that was skipped."""
        parts = result.each()
        for name, schedule in self._schedules.items():
            if not parts[name].known.skipped:
                with UserCode("scheduler:", schedule):
                    schedule.step()

    def _run_epoch(self, train: Loader, val: Loader | None) -> None:
        self.model.train()
        batches = train.epoch(self.progress.epoch, start=self.progress.batch)
        for window in _windows(batches, self.plan.accumulate):
            self._call("on_step_begin", window)
            at = self.progress.epoch, self.progress.batch
            place = InBatch("training", *at, len(window), train)
            self.progress.count_batches(len(window), len(train))
            with place:
                self.train_step(*window)
            if self._validation_due() or self._at_pause():
                self.read_verdicts()
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
        """True after the last step; while steps are pending, if it may be one of them."""
        known, pending = self.progress.steps, self.progress.pending
        last = self.plan.max_steps is not None and known + pending >= self.plan.max_steps
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
        return map_tensors(lambda t: t.to(self._device, non_blocking=True), batch)


def weighted_loss(losses: Sequence[tuple[Tensor, Tensor | int]], world: World) -> Tensor:
    """The mean over the samples of all ranks, 0-d. Of several losses it leaves out what is nan."""
    values = torch.stack([loss for loss, _ in losses])
    counts = torch.stack([as_count(count, values.device) for _, count in losses])
    if len(losses) > 1:
        counts = torch.where(values.isnan(), 0.0, counts)
    weights = (counts / counts.max()).float()  # exactly 1 where all are equal
    mean = weighted(values, weights).sum() / weights.sum()
    return world.mean(weighted(mean, world.weight(counts.sum())))


def _by_name(given: Any) -> dict[str, Any]:
    """By name what may be one thing, several by name, or none; a single one is named ""."""
    if given is None:
        return {}
    return dict(given) if isinstance(given, Mapping) else {"": given}


def _state_by_name(given: Any) -> dict[str, Any]:
    return {name: own.state_dict() for name, own in _by_name(given).items()}


def _load_by_name(given: Any, states: Mapping[str, Any], option: str) -> None:
    """Load what `_state_by_name` gave.

    Raises:
        CheckpointError: there was another number of them, or others, or one refuses its state.
    """
    own = _by_name(given)
    if own and states and set(own) != set(states):
        raise CheckpointError(
            f"{option}: the checkpoint has {_names(states)}, this run {_names(own)}; resume with "
            "the optimizers it was made with"
        )
    for name in own.keys() & states.keys():
        try:
            own[name].load_state_dict(states[name])
        except MpframeError:
            raise
        except Exception as error:  # Whatever a user's class raises.
            raise CheckpointError(
                f"{option}: {name_of(own[name])} cannot continue the saved state: {raised(error)}; "
                "resume with the class it was saved from"
            ) from error


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
