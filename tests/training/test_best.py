"""The best validation so far, and when the last one is called much worse."""

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest

from mpframe.training.callbacks.results import Results
from mpframe.training.evaluation import Best, Evaluation, much_worse


@pytest.mark.parametrize(
    ("values", "higher", "best"),
    [
        ([0.1, 0.3, 0.2], True, (0.3, 2)),
        ([0.1, 0.3, 0.2], False, (0.1, 1)),
        ([0.3, 0.3], True, (0.3, 1)),  # Of equal ones the first.
        ([math.nan, 0.2, math.nan], True, (0.2, 2)),
        ([math.nan], True, (None, None)),
        ([], True, (None, None)),
    ],
)
def test_the_best_value_and_its_step(values: list[float], higher: bool, best: object) -> None:
    kept = Best()
    for step, value in enumerate(values, start=1):
        before = kept.value
        assert kept.offer("m", value, step, higher) is (kept.value != before)
    assert (kept.value, kept.step) == best
    assert Best.from_state(kept.state_dict()) == kept


def test_another_metric_begins_anew() -> None:
    kept = Best("accuracy", 0.9, 10)
    assert kept.offer("loss", 2.0, 20, higher_is_better=False)
    assert kept == Best("loss", 2.0, 20)


FALLING = [2.0 * 0.8**n + 0.1 for n in range(20)]


@pytest.mark.parametrize(
    ("values", "worse"),
    [
        ([1.0, 9.0], False),  # Two values: nobody knows how far they scatter.
        ([1.0, 1.1, 0.9, 1.0, 9.0], True),
        ([1.0, 1.1, math.nan], True),
        ([1.0, math.nan, 1.1, 1.0, 1.0], False),
        (FALLING, False),
        ([*FALLING, *(FALLING[-1] + 0.05 * n for n in range(30))], True),  # Trained too long.
        ([0.97] * 20 + [0.90], True),
    ],
)
def test_what_is_much_worse(values: list[float], worse: bool) -> None:
    best = min(values) if values[0] >= 1.0 else max(values)
    assert much_worse(best, values) is worse
    assert much_worse(-best, [-value for value in values]) is worse


@pytest.mark.parametrize("count", [3, 4, 8, 50])
def test_noise_is_no_decline(count: int) -> None:
    """In at most 2 % of the runs: measured 1.0 % of 3000 at 4 validations, less at any other."""
    draw = random.Random(0)
    runs = [[draw.gauss(0.0, 1.0) for _ in range(count)] for _ in range(500)]
    # 2 % and four standard deviations of a count of 500 at that rate: 10 + 4 * 3.1.
    assert sum(much_worse(min(run), run) for run in runs) <= 22


def results_of(values: list[float], higher: bool | None = True) -> Results:
    results = Results()
    for step, value in enumerate(values, start=1):
        trainer: Any = SimpleNamespace(progress=SimpleNamespace(global_step=step))
        results.on_evaluate(trainer, Evaluation(0.0, {"acc": value}, {"acc": higher}, "acc"))
    return results


def test_the_line_says_both_values_and_the_step() -> None:
    values = [0.1, 0.4, 0.6, 0.7, 0.72, 0.71, 0.72, 0.73, 0.1]
    assert results_of(values).worsening == (
        "the last val_acc, 0.1, is much worse than the best, 0.73 (step 8)"
    )
    assert results_of(values[:-1]).worsening is None


def test_a_metric_without_direction_has_no_best() -> None:
    results = results_of([0.1, 0.2], higher=None)
    assert (results.best.value, results.worsening) == (None, None)


def test_results_go_on_from_their_state() -> None:
    first = results_of([0.9, 0.91, 0.9, 0.2])
    second = Results()
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert second.worsening == first.worsening is not None
