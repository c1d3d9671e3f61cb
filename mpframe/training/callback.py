"""What watches a run is a `Callback`: the trainer calls it after what each method names."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mpframe.optim import StepResult
from mpframe.training.evaluation import Evaluation
from mpframe.training.loader import Batch

if TYPE_CHECKING:
    from mpframe.training.trainer import Trainer


class Callback:
    """Watches a run; each method is called after what it names and does nothing here."""

    def on_step_begin(self, trainer: "Trainer", batches: Sequence[Batch]) -> None:
        """A step is about to be tried on these micro-batches."""

    def on_optimizer_step(self, trainer: "Trainer", result: StepResult) -> None:
        """A step was tried; `trainer.progress` already counts it."""

    def on_prediction_step(self, trainer: "Trainer") -> None:
        """A batch is about to be validated; raising abandons the validation, to be redone."""

    def on_evaluate(self, trainer: "Trainer", evaluation: Evaluation) -> None:
        """The model was validated."""

    def on_epoch_end(self, trainer: "Trainer") -> None:
        """A pass over the training data is complete (and validated, where that is due)."""

    def on_step_end(self, trainer: "Trainer") -> None:
        """All that was due after a step is done: where a run is saved, and may be stopped."""

    def on_train_end(self, trainer: "Trainer") -> None:
        """The planned end is reached, and nothing stopped the run before."""

    def on_save(self, trainer: "Trainer") -> None:
        """A checkpoint is about to be taken: bring what is written elsewhere up to it."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know of this one: numbers, strings, lists, dicts, tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""


def by_key(callbacks: Iterable[Callback]) -> dict[str, Callback]:
    """The callbacks by the key of their state: the class's name, `NAME 2` for the second of it."""
    keyed: dict[str, Callback] = {}
    seen: Counter[str] = Counter()
    for callback in callbacks:
        name = type(callback).__name__
        seen[name] += 1
        keyed[name if seen[name] == 1 else f"{name} {seen[name]}"] = callback
    return keyed
