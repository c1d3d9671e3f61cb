"""The trainer: the engine's step, and the loop around it. Logs and checkpoints are callbacks."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, ClassVar, Protocol

from torch import Tensor

from mpframe.checkpoint.state import rng_state
from mpframe.core.callback import Batch, Callback
from mpframe.core.errors import ConfigError, UserCodeError
from mpframe.core.loss_scaling.scaler import LossScaler, NoScaling
from mpframe.core.optim.widening import list_widened, widen_named
from mpframe.core.step_result import StepResult
from mpframe.core.trainer import StepTrainer
from mpframe.core.user_code import blame, name_of
from mpframe.precision.precision import Precision
from mpframe.tracking.summary import Status
from mpframe.training.extra_state import ExtraState
from mpframe.training.optimizers.multi_optimizer import largest, load_states, with_verdicts
from mpframe.training.plan import Plan, Progress
from mpframe.training.probe import probe_amax, wants_probe

log = logging.getLogger(__name__)
Callbacks = Mapping[str, Callback]

_MOST_PENDING = 100  # So that a run that only skips steps is noticed.


class Loader(Protocol):
    """Batches of a dataset in an order that depends only on the epoch."""

    def __len__(self) -> int:
        """Batches per epoch."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from batch number `start` on."""


def run_callbacks(callbacks: Callbacks, event: str, *arguments: Any) -> dict[str, Any]:
    """Call a method of each callback, in order, and return their results by name.

    UserCodeError: a user's callback, which it names, raised.
    """
    results = {}
    for name, callback in callbacks.items():
        try:
            results[name] = getattr(callback, event)(*arguments)
        except BaseException:
            if type(callback).__module__.startswith("mpframe."):  # Ours name themselves.
                raise
            blame(f"callbacks.{name}:", callback)
    return results


@dataclass
class Trainer(StepTrainer):
    """Trains a model in a dtype mode, as long as planned.

    Attributes:
        precision: the dtype mode, fp32 by default.
        plan: how long to train, how often to look, and the options of each step.
        evaluator: evaluates the model. None: it cannot be validated.
        callbacks: by name, called in this order, after the algorithms.
        progress: how far the run has come.
        stop_reason: why the run ends before its plan does, or None.
        stop_status: the status of a run that ends for this reason.
        rng_before_validation: the random generators before a validation that has not ended, for a
            checkpoint: a resumed run validates from its beginning. Else None.
    """

    compiles_steps: ClassVar[bool] = False  # `trainer.compile=step` is for CompiledTrainer.

    precision: Precision = field(default_factory=Precision)
    plan: Plan = field(default_factory=Plan)
    evaluator: Any = None
    callbacks: Callbacks = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    stop_reason: str | None = None
    stop_status: Status = Status.FINISHED
    rng_before_validation: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not hasattr(self.optimizer, "needs_closure"):
            raise ConfigError(
                f"optimizer={name_of(self.optimizer)}: is not prepared; give the trainer what "
                "precision.prepare(model, optimizer) returned"
            )
        prepared = getattr(self.optimizer, "policy", None)
        if prepared not in (None, self.precision.policy):
            raise ConfigError(
                f"precision={self.precision}: the optimizer was prepared by another one, "
                f"{prepared}; give the trainer that precision"
            )
        if self.plan.compile == "step" and not self.compiles_steps:
            raise ConfigError(
                f"trainer.compile=step: {type(self).__name__} does not compile its steps, which "
                "takes one loss and one optimizer without a closure; use trainer.compile=true"
            )
        super().__post_init__()
        self.extra_state = ExtraState(self.model)
        self._unread: list[StepResult] = []

    @property
    def scalers(self) -> dict[str, LossScaler]:
        """The scalers by the name of their loss, "" for a single or shared one."""
        named = self.scaler if isinstance(self.scaler, Mapping) else {"": self.scaler}
        return {n: one for n, one in named.items() if one and not isinstance(one, NoScaling)}

    def finish_step(self, result: StepResult) -> StepResult:
        """Do all that follows a step, once it is known whether it was skipped."""
        self._unread.append(super().finish_step(result))
        self.progress.pending += 1
        if result.verdict or self.progress.pending >= _MOST_PENDING:
            self.read_verdicts()
        return result

    def read_verdicts(self) -> None:
        """Read on the host which of the steps so far were skipped, and act on it.

        The counts, the schedule and the callbacks follow here, and only here, step by step: at once
        if the optimizer knows its verdict. If it skips on the device, the host waits here once for
        all steps. `fit` calls it when something due depends on them, and before the next update if
        there is a schedule. `state_dict` calls it, and so may a callback.
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
        self.rng_before_validation = None
        if any(map(wants_probe, self.scalers.values())):
            self.probe(next(train.epoch(self.progress.epoch, start=self.progress.batch)))
        self.progress.count_batches(0, len(train))  # There may be less data than there was.
        if self._validation_due():  # The run was stopped in its validation.
            self._validate(val)
            self._call("on_step_end")
        while not self._complete():
            self._run_epoch(train, val)
        self._call("on_train_end")

    def stop(self, reason: str, status: Status = Status.FINISHED) -> None:
        """End `fit` after this step. The reason is one line for the run's summary."""
        self.stop_reason, self.stop_status = reason, status

    def probe(self, batch: Batch) -> None:
        """Set the first scale of scalers that want a probe from one backward pass in fp32."""
        self.model.train()
        batch = self.on_device(batch)
        for name, scaler in self.scalers.items():
            if wants_probe(scaler):
                scaled = [o.objective for o in self.objectives if name in ("", o.name)]
                about = self.precision, batch, self.comm
                amaxes = [probe_amax(self.model, one, *about) for one in scaled]
                amax = self.comm.max(largest(amaxes))
                scaler.start_from(amax)
                log.info("probe: largest gradient %.4g, first loss scale %g", amax, scaler.scale)

    def backward(self, batch: Batch, scale: float = 1.0) -> float:
        """Run forward and scaled backward of every loss, for measurements: no step follows.

        Gradients are added to those that are there. Returns the unscaled sum of the losses.
        """
        batch, total = self.on_device(batch), 0.0
        for part in self.objectives:
            loss = part(self.compiled_model, batch, self.precision.cast()).loss
            (loss * scale).backward(inputs=part.parameters)  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total

    def test(self, loader: Loader) -> Any:
        """Evaluate on data that no choice depended on, and tell the callbacks."""
        evaluation = self.evaluate(loader, "test")
        self._call("on_test", evaluation)
        return evaluation

    def evaluate(self, loader: Loader, split: str = "validation") -> Any:
        """Evaluate one pass over `split` data, the model unchanged. ConfigError if nothing can."""
        if self.evaluator is None:
            raise ConfigError(
                "Trainer.evaluator=None: nothing evaluates the model; give Trainer an "
                "evaluator=Evaluator() of mpframe.training.evaluation"
            )
        return self.evaluator(self, loader, split)

    def state_dict(self) -> dict[str, Any]:
        """Return all that can change the run's future, the weights as their fp32 masters."""
        self.read_verdicts()
        state = {
            "weights": self.weights(),
            "extra_state": self.extra_state.state_dict(),
            "widened": list_widened(self.model),
            "optimizer": self.optimizer.inner_state_dict(),  # Masters are among the weights.
            "scaler": {name: scaler.state_dict() for name, scaler in self.scalers.items()},
            "precision": str(self.precision),
            "products": self.precision.state_dict(),
            "progress": asdict(self.progress),
        }
        for algorithm in self.algorithms.values():
            state |= algorithm.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned. CheckpointError if it is of other parts."""
        self.extra_state.load_state_dict(state["extra_state"])
        widen_named(self.model, state["widened"])
        self.load_weights(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        load_states(self.scalers, state["scaler"], "loss_scaling")
        for algorithm in self.algorithms.values():
            algorithm.load_state_dict(state)
        self.precision.load_state_dict(state["products"])
        self.progress, self._unread = Progress.from_state(state["progress"]), []

    def weights(self) -> dict[str, Tensor]:
        """Return parameters, as their fp32 masters, and buffers by name, not copied."""
        masters = self.optimizer.masters_by_name(self.model)
        return {**self.model.state_dict(), **masters}

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Load fp32 parameters and buffers by name, masters exactly. CheckpointError if unfit."""
        self.optimizer.load_masters(self.model, weights)
        for algorithm in self.algorithms.values():
            algorithm.on_load_weights(self)

    def _run_epoch(self, train: Loader, val: Loader | None) -> None:
        self.model.train()
        batches = iter(train.epoch(self.progress.epoch, start=self.progress.batch))
        while window := list(islice(batches, self.plan.accumulate)):
            self._call("on_step_begin", window)
            at = self.progress.epoch, self.progress.batch
            self.progress.count_batches(len(window), len(train))
            with in_batch("training", *at, train, len(window)):
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
        """True after the last step, and while steps are pending if it may be one of them."""
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
            self.rng_before_validation = rng_state()
            evaluation = self.evaluate(val)
            self.progress.validated = self.progress.global_step
            self.rng_before_validation = None
            self._call("on_evaluate", evaluation)

    def _call(self, event: str, *values: Any) -> None:
        run_callbacks(self.algorithms, event, self, *values)
        run_callbacks(self.callbacks, event, self, *values)


@contextmanager
def in_batch(split: str, epoch: int, number: int, loader: Any, count: int = 1) -> Iterator[None]:
    """Context manager in which an error in a user's code names the first of `count` batches.

    If the loader has `batch_ids`, the error names the sample as well.
    """
    try:
        yield
    except UserCodeError as error:
        last = f" to {number + count - 1}" if count > 1 else ""
        if error.row is not None and count == 1 and hasattr(loader, "batch_ids"):
            (row, rows), ids = error.row, loader.batch_ids(epoch, number)
            last = f", sample {ids[row]}" if len(ids) == rows else ""
        error.args = (f"{error} ({split}, epoch {epoch}, batch {number}{last})",)
        raise
