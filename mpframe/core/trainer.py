"""The trainer: one step that is all or nothing, and the loop around it.

`Trainer.train_step` is the step, in order: forward under the cast policy, loss in fp32, scaled
backward, gradients to fp32 and unscaled, checked, clipped, masters updated and rounded into the
weights. If the gradients are not finite nothing has changed at the end but the loss scale: not the
weights, the optimizer's state, the buffers, the average, the schedule or the step count.

All parts are arguments; what watches a run (logs, checkpoints, progress) is a `Callback`. The
trainers of several losses and of LBFGS are in training/, over the same verbs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mpframe.core.buffers import Buffers, ExtraState
from mpframe.core.callback import Algorithm, Batch, Callbacks, Loader, call
from mpframe.core.comm import SINGLE_PROCESS, Comm
from mpframe.core.errors import CheckpointError, ConfigError, MpframeError
from mpframe.core.loss_scaling.probe import probe_amax
from mpframe.core.loss_scaling.scaler import (
    LossScaler,
    NoScaling,
    Scaling,
    scalers_by_name,
    wants_probe,
)
from mpframe.core.objective import NamedObjective, Objective, StepOutput, compute, require_objective
from mpframe.core.plan import Plan, Progress
from mpframe.core.precision import Precision
from mpframe.core.step_result import StepResult, either, largest, with_verdicts
from mpframe.core.tree import device_of, map_tensors
from mpframe.core.user_code import InBatch, blame, name_of, raised
from mpframe.core.widening import widen_named, widened
from mpframe.core.window import InBackwardWindow, LocalWindow, Loss, Window


def by_name(given: Any) -> dict[str, Any]:
    """One thing, several by name, or None, as a dict; a single one is named ""."""
    if given is None:
        return {}
    return dict(given) if isinstance(given, Mapping) else {"": given}


def states_of(named: Mapping[str, Any]) -> dict[str, Any]:
    """The state of each."""
    return {name: one.state_dict() for name, one in named.items()}


def load_states(named: Mapping[str, Any], states: Mapping[str, Any], option: str) -> None:
    """Load what `states_of` gave.

    Raises:
        CheckpointError: there was another number of them, or others, or one refuses its state.
    """
    if named and states and set(named) != set(states):
        raise CheckpointError(
            f"{option}: the checkpoint has {_names(states)}, this run {_names(named)}; resume with "
            "the optimizers it was made with"
        )
    for name in named.keys() & states.keys():
        try:
            named[name].load_state_dict(states[name])
        except MpframeError:
            raise
        except Exception as error:  # Whatever a user's class raises.
            raise CheckpointError(
                f"{option}: {name_of(named[name])} cannot continue the saved state: "
                f"{raised(error)}; resume with the class it was saved from"
            ) from error


def _names(given: Iterable[str]) -> str:
    return ", ".join(name or "a single one" for name in sorted(given))


_MOST_PENDING = 100  # So that a run that only skips steps is noticed.


class StepOptimizer(Protocol):
    """An optimizer as the trainer sees it: `MasterWeights`, or several that make one step."""

    needs_closure: bool

    @property
    def param_groups(self) -> list[Any]:
        """The groups, as torch's optimizers have them."""

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that it moves."""

    def set_requires_grad(self, parameters: Iterable[Tensor], requires_grad: bool) -> None:
        """Freeze some of the parameters, or train them from the next step on."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""

    def set_comm(self, comm: Comm) -> None:
        """Step together with other ranks."""

    def master_of(self, parameter: Tensor) -> Tensor:
        """The fp32 tensor that the update acts on."""

    def inner_state_dict(self) -> dict[str, Any]:
        """The state of the wrapped optimizers, without masters."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state."""

    def masters_by_name(self, model: nn.Module) -> dict[str, Tensor]:
        """The fp32 tensor behind each parameter of the model."""

    def load_masters(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Take parameters and buffers by name."""


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
        scaler: scales the loss; None: the loss is not scaled, and overflow still skips the step.
        algorithms: by name, what changes the training beside the step: a schedule, an average of
            the weights, what skips steps; called in this order, before the callbacks.
        plan: how long to train and how often to look.
        evaluator: evaluates the model; None: it cannot be validated.
        comm: the ranks that train together, each on its part of every batch.
        callbacks: by name, called in this order.
        stop_reason: why the run is to end before its plan does; None: it is not.

    Raises:
        ConfigError: the optimizer evaluates the loss itself, or there is a scaler for each of
            several losses.
        UserCodeError: the objective is none.
    """

    model: nn.Module
    optimizer: StepOptimizer
    objective: Objective
    precision: Precision = field(default_factory=Precision)
    scaler: Scaling = None
    algorithms: Mapping[str, Algorithm] = field(default_factory=dict)
    plan: Plan = field(default_factory=Plan)
    evaluator: Any = None
    comm: Comm = SINGLE_PROCESS
    callbacks: Callbacks = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    stop_reason: str | None = None

    def __post_init__(self) -> None:
        self._refuse_misfits()
        self.scaler = NoScaling() if self.scaler is None else self.scaler
        self.optimizer.set_comm(self.comm)
        self._buffers, self.extra_state = Buffers(self.model), ExtraState(self.model)
        self._unread: list[StepResult] = []
        self._device = device_of(self.model)
        # The objective is called with it; the model itself if it is not compiled.
        self.compiled_model: Any = torch.compile(self.model) if self.plan.compile else self.model
        self._window, self._window_of_one = Window(self), self._make_window_of_one()

    @property
    def scalers(self) -> dict[str, LossScaler]:
        """The scalers by the name of their loss; the only one, or a shared one, is named ""."""
        return scalers_by_name(self.scaler)

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
        scaler: Any = self.scaler  # One loss has one scaler.
        parts = [NamedObjective("", self.objective, scaler)]
        result, (loss,) = self._update(parts, self.optimizer, scaler, batches)
        return self._finish(replace(result, loss=loss))

    def _update(
        self, parts: list[NamedObjective], optimizer: Any, scaler: Any, batches: Sequence[Batch]
    ) -> tuple[StepResult, list[Tensor]]:
        """One update by the losses of some parts; the result, and the mean of each loss."""
        # Not at the end: a CPU's allocator would give the memory back and ask for it again.
        optimizer.zero_grad()
        self._buffers.save()
        window, losses = self._window_of_one if len(batches) == 1 else self._window, []
        for batch in batches:
            window.begin()
            found = self._forward_backward(parts, batch, window)
            losses.append(window.accumulate(optimizer, scaler, found))
        means, skip = window.mean(losses)
        for algorithm in self.algorithms.values():
            skip = either(skip, algorithm.before_update(self, means))
        try:
            # Gradients to fp32, unscale, check, clip, update or skip, tell the scaler.
            result: StepResult = optimizer.step(
                scaler,
                max_norm=self.plan.clip_norm,
                max_value=self.plan.clip_value,
                skip_if_dropped=self.plan.skip_if_dropped,
                skip_mask=skip,
            )
        except BaseException:
            blame("optimizer:", getattr(optimizer, "optimizer", optimizer))
        self._buffers.restore_where(result.any_skipped())
        return result, means

    def _forward_backward(
        self, parts: list[NamedObjective], batch: Batch, window: Window
    ) -> list[Loss]:
        """Forward under the casts, in fp32 or wider, and scaled backward of each part."""
        if self._device.type != "cpu":
            batch = self.on_device(batch)
        losses = []
        for part in parts:
            output = self._forward(part.objective, batch)
            try:
                losses.append(window.backward(part, output, batch))
            except BaseException:
                blame("model: the backward pass of", self.model)
        return losses

    def _finish(self, result: StepResult) -> StepResult:
        """Follow a step: algorithms at once, all else once it is known whether it was skipped."""
        self.precision.agree(self.comm)
        for algorithm in self.algorithms.values():
            algorithm.after_update(self, result)
        self._unread.append(result)
        self.progress.pending += 1
        if result.verdict or self.progress.pending >= _MOST_PENDING:
            self.read_verdicts()
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
        known = len(results) == 1 and results[0].verdict
        for result in results if known else with_verdicts(results):
            self.progress.count_step(result)
            if self.algorithms or self.callbacks:
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
        batch = self.on_device(batch)
        for name, scaler in self.scalers.items():
            if wants_probe(scaler):
                scaled = [o.objective for o in self.objectives if name in ("", o.name)]
                amaxes = [probe_amax(self.model, own, self.precision, batch) for own in scaled]
                scaler.start_from(self.comm.max(largest(amaxes)))

    def backward(self, batch: Batch, scale: float = 1.0) -> float:
        """Forward and scaled backward of every loss, for measurements: no step follows.

        Gradients are added to the parameters' own, buffers move.

        Returns:
            The unscaled sum of the losses.
        """
        batch, total = self.on_device(batch), 0.0
        for own in self.objectives:
            loss = self._forward(own.objective, batch).loss
            (loss * scale).backward(inputs=own.parameters)  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total

    def test(self, loader: Loader) -> Any:
        """Evaluate on data that chose nothing, and tell the callbacks."""
        evaluation = self.evaluate(loader, "test")
        self._call("on_test", evaluation)
        return evaluation

    def evaluate(self, loader: Loader, split: str = "validation") -> Any:
        """What the evaluator makes of one pass over data; the model is left as it was.

        Args:
            loader: the samples.
            split: what they are for, in messages.

        Raises:
            ConfigError: there is no evaluator.
        """
        if self.evaluator is None:
            raise ConfigError(
                "Trainer.evaluator=None: nothing evaluates the model; give Trainer an "
                "evaluator=Evaluator() of mpframe.training.evaluation"
            )
        return self.evaluator(self, loader, split)

    def state_dict(self) -> dict[str, Any]:
        """Everything that can change the run's future; weights as their fp32 masters."""
        self.read_verdicts()
        state = {
            "weights": self.weights(),
            "extra_state": self.extra_state.state_dict(),
            "widened": widened(self.model),
            "optimizer": self.optimizer.inner_state_dict(),  # Masters stand among the weights.
            "scaler": states_of(self.scalers),
            "precision": str(self.precision),
            "products": self.precision.state_dict(),
            "progress": asdict(self.progress),
        }
        for algorithm in self.algorithms.values():
            state |= algorithm.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            CheckpointError: the state belongs to another model, optimizer or scaler.
        """
        self.extra_state.load_state_dict(state.get("extra_state", {}))
        widen_named(self.model, state.get("widened", ()))
        self.load_weights(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        load_states(self.scalers, state["scaler"], "loss_scaling")
        for algorithm in self.algorithms.values():
            algorithm.load_state_dict(state)
        self.precision.load_state_dict(state.get("products", {}))
        self.progress, self._unread = Progress.saved(state["progress"]), []

    def weights(self) -> dict[str, Tensor]:
        """Parameters, as their fp32 masters, and buffers by name; not copied."""
        masters = self.optimizer.masters_by_name(self.model)
        return {**self.model.state_dict(), **masters}

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Take parameters (fp32) and buffers by name; masters exactly, half weights rounded.

        Raises:
            CheckpointError: a name is missing or unexpected, or a shape differs.
        """
        self.optimizer.load_masters(self.model, weights)
        for algorithm in self.algorithms.values():
            algorithm.on_load_weights(self)

    def _forward(self, objective: Objective, batch: Batch) -> StepOutput:
        """The loss under the casts, in fp32 or wider."""
        return compute(objective, self.compiled_model, batch, self.precision.cast())

    def _make_window_of_one(self) -> Window:
        """What takes a step of a single micro-batch."""
        if self.comm.size == 1:
            return LocalWindow(self)
        early = self.comm.in_backward() if self.plan.reduce == "in_backward" else None
        return Window(self) if early is None else InBackwardWindow(self, early)

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
            self._call("on_evaluate", evaluation)

    def _call(self, event: str, *values: Any) -> None:
        call(self.algorithms, event, self, *values)
        call(self.callbacks, event, self, *values)

    def on_device(self, batch: Batch) -> Batch:
        """A batch on the model's device."""
        return map_tensors(lambda t: t.to(self._device, non_blocking=True), batch)


def _windows(batches: Iterator[Batch], size: int) -> Iterable[list[Batch]]:
    while window := list(islice(batches, size)):
        yield window
