"""When a run is ended because its validation no longer improves."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from mpframe.core.errors import ConfigError
from mpframe.training.callbacks.guards import EarlyStopping
from mpframe.training.evaluation import Evaluation
from mpframe.training.plan import Progress


class Stopped:
    """A trainer as far as a callback stops it."""

    def __init__(self) -> None:
        self.stop_reason: str | None = None
        self.progress = Progress()

    def stop(self, reason: str) -> None:
        self.stop_reason = reason


def evaluation(value: float, higher: bool | None = True) -> Evaluation:
    return Evaluation(1.0 - value, {"accuracy": value}, {"accuracy": higher}, "accuracy")


def checks_until_stopped(callback: Any, evaluations: list[Evaluation]) -> int | None:
    trainer: Any = Stopped()
    for number, own in enumerate(evaluations, start=1):
        trainer.progress.steps = 10 * number
        callback.on_evaluate(trainer, own)
        if trainer.stop_reason is not None:
            return number
    return None


@pytest.mark.parametrize(
    ("values", "options", "stops"),
    [
        ([0.1, 0.2, 0.3, 0.4], {"patience": 1}, None),
        ([0.1, 0.2, 0.2, 0.1], {"patience": 2}, 4),
        ([0.1, 0.2, 0.1, 0.3, 0.3, 0.3], {"patience": 2}, 6),
        ([0.0, 0.25, 0.5, 0.75], {"patience": 1, "min_delta": 0.25}, 2),
        ([0.0, 0.5, 1.0], {"patience": 1, "min_delta": 0.25}, None),
        ([math.nan, 0.1, math.nan, math.nan], {"patience": 2}, 4),
    ],
)
def test_more_is_better(values: list[float], options: dict[str, Any], stops: int | None) -> None:
    assert checks_until_stopped(EarlyStopping(**options), list(map(evaluation, values))) == stops


@pytest.mark.parametrize(
    ("values", "higher", "monitor", "stops"),
    [((0.3, 0.2, 0.1, 0.2), False, None, 4), ((0.1, 0.2, 0.1), None, "loss", 3)],
)
def test_less_is_better_if_the_metric_says_so_and_of_the_loss(
    values: tuple[float, ...], higher: bool | None, monitor: str | None, stops: int
) -> None:
    falling = [evaluation(value, higher) for value in values]
    assert checks_until_stopped(EarlyStopping(patience=1, monitor=monitor), falling) == stops


@pytest.mark.parametrize(
    ("values", "best"), [((0.25, 0.5, 0.25, 0.125), "0.5 (step 20)"), ((math.nan, math.nan), "nan")]
)
def test_the_reason_names_the_best_value_and_its_step(values: tuple[float, ...], best: str) -> None:
    trainer: Any = Stopped()
    callback = EarlyStopping(patience=2)
    for number, value in enumerate(values, start=1):
        trainer.progress.steps = 10 * number
        callback.on_evaluate(trainer, evaluation(value))
    assert trainer.stop_reason == (
        f"early stopping: val_accuracy was not better than {best} in the last 2 validations"
    )


def test_a_resumed_run_stays_stopped_unless_the_patience_grew() -> None:
    first = EarlyStopping(patience=2)
    checks_until_stopped(first, [evaluation(value) for value in (0.5, 0.25, 0.25)])
    for patience, stopped in ((2, True), (3, False)):
        trainer: Any = Stopped()
        again = EarlyStopping(patience=patience)
        again.load_state_dict(first.state_dict())
        again.setup(trainer, SimpleNamespace())  # type: ignore[arg-type]
        assert (trainer.stop_reason is not None) is stopped
        assert again.state_dict() == first.state_dict()


@pytest.mark.parametrize(
    ("options", "higher", "line"),
    [
        ({"patience": 0}, True, "patience=0: must be a whole number >= 1"),
        ({"min_delta": -1.0}, True, "min_delta=-1.0: must be a finite number >= 0"),
        ({"monitor": "acuracy"}, True, "monitor=acuracy: no such metric; nearest: accuracy"),
        ({}, None, "monitor=accuracy: the metric does not say which value is better; give it "
         "higher_is_better = True or False, or monitor loss"),
    ],
)  # fmt: skip
def test_what_cannot_be_watched_is_refused(
    options: dict[str, Any], higher: bool | None, line: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        checks_until_stopped(EarlyStopping(**options), [evaluation(0.5, higher)])
    assert str(refused.value) == f"callbacks.early_stopping.{line}"
