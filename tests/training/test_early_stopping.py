"""The best validation so far, and when a run is ended because none is better."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from fixtures import refused

from mpframe.core.errors import ConfigError
from mpframe.training.callbacks.guards import EarlyStopping
from mpframe.training.callbacks.results import Results
from mpframe.training.evaluation import Best, Evaluation
from mpframe.training.plan import Progress

NAN = math.nan


@pytest.mark.parametrize(("values", "higher", "best"), [
    ([0.1, 0.3, 0.2], True, (0.3, 2)),
    ([0.1, 0.3, 0.2], False, (0.1, 1)),
    ([0.3, 0.3], True, (0.3, 1)),  # Of equal ones the first.
    ([NAN, 0.2, NAN], True, (0.2, 2)),
    ([NAN], True, (None, None)),
])  # fmt: skip
def test_the_best_value_and_its_step(values: list[float], higher: bool, best: object) -> None:
    kept = Best()
    for step, value in enumerate(values, start=1):
        before = kept.value
        assert kept.offer("m", value, step, higher) is (kept.value != before)
    assert (kept.value, kept.step) == best
    assert Best.from_state(kept.state_dict()) == kept
    assert kept.offer("loss", 2.0, 20, higher_is_better=False)  # Another metric begins anew.
    assert kept == Best("loss", 2.0, 20)


def told(callback: Any, values: list[float], higher: bool | None = True) -> Any:
    trainer: Any = SimpleNamespace(progress=Progress(), stop_reason=None)
    trainer.stop = lambda reason: vars(trainer).update(stop_reason=reason)
    for trainer.progress.steps, value in enumerate(values, start=1):
        done = Evaluation(1.0 - value, {"accuracy": value}, {"accuracy": higher}, "accuracy")
        callback.on_evaluate(trainer, done)
        if trainer.stop_reason is not None:
            break
    return trainer


def test_the_best_one_of_a_run_is_kept_and_resumed() -> None:
    first, second, without = Results(), Results(), Results()
    told(first, [0.1, 0.73, 0.1])
    assert first.best == Best("accuracy", 0.73, 2)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    told(without, [0.1, 0.2], higher=None)  # A metric without a direction has no best.
    assert without.best.value is None


@pytest.mark.parametrize(("values", "options", "higher", "stops"), [
    ([0.1, 0.2, 0.3, 0.4], {"patience": 1}, True, None),
    ([0.1, 0.2, 0.2, 0.1], {"patience": 2}, True, 4),
    ([0.1, 0.2, 0.1, 0.3, 0.3, 0.3], {"patience": 2}, True, 6),
    ([0.0, 0.25, 0.5, 0.75], {"patience": 1, "min_delta": 0.25}, True, 2),
    ([0.0, 0.5, 1.0], {"patience": 1, "min_delta": 0.25}, True, None),
    ([NAN, 0.1, NAN, NAN], {"patience": 2}, True, 4),
    ([0.3, 0.2, 0.1, 0.2], {"patience": 1}, False, 4),
    ([0.1, 0.2, 0.1], {"patience": 1, "monitor": "loss"}, None, 3),
])  # fmt: skip
def test_more_is_better_or_less_as_said(values: Any, options: Any, higher: Any, stops: Any) -> None:
    trainer = told(EarlyStopping(**options), values, higher)
    assert (trainer.stop_reason and trainer.progress.steps) == stops


def test_the_reason_names_the_best_and_a_resumed_run_stays_stopped_unless_patience_grew() -> None:
    words = "early stopping: val_accuracy was not better than {}, validations since then: 2"
    assert told(EarlyStopping(patience=2), [NAN, NAN]).stop_reason == words.format("nan")
    first = EarlyStopping(patience=2)
    assert told(first, [0.25, 0.5, 0.25, 0.125]).stop_reason == words.format("0.5 (step 2)")
    for patience, stopped in ((2, True), (3, False)):
        trainer, again = told(None, []), EarlyStopping(patience=patience)
        again.load_state_dict(first.state_dict())
        again.setup(trainer, SimpleNamespace())  # type: ignore[arg-type]
        assert (trainer.stop_reason is not None) is stopped
        assert again.state_dict() == first.state_dict()


@pytest.mark.parametrize(("options", "higher", "line"), [
    ({"patience": 0}, True, "patience=0: must be a whole number >= 1"),
    ({"min_delta": -1.0}, True, "min_delta=-1.0: must be a finite number >= 0"),
    ({"monitor": "acuracy"}, True, "monitor=acuracy: no such metric; nearest: accuracy"),
    ({}, None, "monitor=accuracy: the metric does not say which value is better; give it "
     "higher_is_better = True or False, or monitor loss"),
])  # fmt: skip
def test_what_cannot_be_watched_is_refused(options: Any, higher: bool | None, line: str) -> None:
    said = refused(ConfigError, lambda: told(EarlyStopping(**options), [0.5], higher))
    assert said == f"callbacks.early_stopping.{line}"
