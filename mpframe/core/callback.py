"""The interface `Callback`: it watches a run, and the trainer calls its methods.

A run has its callbacks by name and in an order. A checkpoint keeps the state of each by that name.

    load_state_dict    if the run goes on from a checkpoint
    setup              once, before the training
    on_...             while it trains
    teardown           once, after it, the last callback first, however the training ended
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from mpframe.core.step_result import StepResult

Batch = Any
"""Any tree of tensors that the run's objective takes, e.g. (inputs, targets) or a dict."""


class Callback:
    """Watches a run. Each method is called at the event of its name, and does nothing here.

    All but one are called at once. If the optimizer skips steps on the device (a fused one),
    `on_optimizer_step` may come some steps later: for every step, in order, with `trainer.progress`
    (except `epoch` and `batch`) and the schedule of that step, but with newer weights and scaler.
    To see these as a step left them, call `trainer.read_verdicts()` in `on_step_end`. It waits.
    """

    def setup(self, trainer: Any, context: Any) -> None:
        """The run is about to train. If it is resumed, `load_state_dict` was called before."""

    def teardown(self, trainer: Any, error: BaseException | None) -> None:
        """The training has ended, at its planned end or by an error: close what `setup` opened."""

    def on_step_begin(self, trainer: Any, batches: Sequence[Batch]) -> None:
        """A step is about to be tried on these micro-batches."""

    def on_optimizer_step(self, trainer: Any, result: StepResult) -> None:
        """A step was tried, and `result.known` says whether it was skipped."""

    def on_prediction_step(self, trainer: Any) -> None:
        """A batch is about to be validated or tested. An error here ends that."""

    def on_prediction_end(self, trainer: Any, number: int, batch: Batch, output: Any) -> None:
        """Batch `number` of the pass is measured: this rank's part, and its `StepOutput`."""

    def on_evaluate(self, trainer: Any, evaluation: Any) -> None:
        """The model was validated."""

    def on_test(self, trainer: Any, evaluation: Any) -> None:
        """The finished run was tested, with its best weights or its last ones."""

    def on_epoch_end(self, trainer: Any) -> None:
        """A pass over the training data is complete (and validated, if that is due)."""

    def on_step_end(self, trainer: Any) -> None:
        """All that was due after a step is done. Here a run is saved, and here it may stop."""

    def on_train_end(self, trainer: Any) -> None:
        """The planned end is reached, and nothing stopped the run before."""

    def on_save(self, trainer: Any) -> None:
        """A checkpoint is about to be taken: files that belong to it must be complete now."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs: numbers, strings, lists, dicts, tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""


class Algorithm(Callback):
    """A callback that changes the training itself, as an average of the weights or a schedule does.

    A trainer calls its algorithms before its other callbacks. Their states are entries of the
    trainer's own state: `state_dict` returns them, and `load_state_dict` is given all of it.
    """

    def before_update(self, trainer: Any, losses: list[Tensor]) -> Tensor | None:
        """The gradients are there, and the optimizer is about to use them.

        `losses` are 0-d on the device, one for each objective that shares the update. Return a 0-d
        bool on the device, true to skip the step, or None.
        """
        return None

    def after_update(self, trainer: Any, result: StepResult) -> None:
        """The optimizer has stepped, or not: the host may not know yet (`result.verdict`)."""

    def evaluating(self, trainer: Any) -> AbstractContextManager[None]:
        """Return a context manager around each evaluation."""
        return nullcontext()

    def on_load_weights(self, trainer: Any) -> None:
        """The weights were replaced by loaded ones."""
