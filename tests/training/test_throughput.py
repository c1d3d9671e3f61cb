"""What counts as training time, how it is summed up, and that it goes on over resumes."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mpframe import Precision, Trainer
from mpframe.core.callback import Batch, Callback
from mpframe.core.objective import supervised
from mpframe.core.step_result import StepResult
from mpframe.data import Loader
from mpframe.training.callbacks.records import Curves
from mpframe.training.callbacks.throughput import Throughput
from mpframe.training.evaluation import Evaluator
from mpframe.training.plan import Plan

BATCH = 4


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Slow(Callback):
    """Lets each part of a run take a time of its own, in seconds that add up in binary."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_step_begin(self, trainer: Trainer, batches: list[Batch]) -> None:
        self._clock.now += 1.0 if trainer.progress.global_step != 2 else 16.0

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        self._clock.now += 0.25  # logging: part of training, and of the next step's time

    def on_prediction_step(self, trainer: Trainer) -> None:
        self._clock.now += 1000.0


class Saving(Callback):
    def __init__(self, clock: Clock, throughput: Throughput) -> None:
        self._clock, self._throughput = clock, throughput

    def on_step_end(self, trainer: Trainer) -> None:
        with self._throughput.pause():
            self._clock.now += 1000.0


class Samples:
    """Seven batches: with windows of two the last one is partial."""

    def __len__(self) -> int:
        return 7

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        yield from [(torch.ones(BATCH, 3), torch.zeros(BATCH, 1))] * (7 - start)


def trained(clock: Clock, throughput: Throughput, plan: Plan) -> Trainer:
    model = nn.Linear(3, 1)
    model, optimizer = Precision().prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    trainer = Trainer(model, optimizer, supervised(nn.MSELoss()), plan=plan, evaluator=Evaluator())
    # As a run orders them: what counts comes first.
    callbacks = [throughput, Slow(clock), Saving(clock, throughput)]
    trainer.callbacks = {type(own).__name__: own for own in callbacks}
    samples: Loader = Samples()  # type: ignore[assignment]
    trainer.fit(samples, samples)
    return trainer


def test_a_partial_window_counts_what_it_had_and_only_training_counts() -> None:
    clock = Clock()
    throughput = Throughput(BATCH, clock=clock)
    trained(clock, throughput, Plan(accumulate=2, eval_every=2))
    assert throughput.samples == 7 * BATCH
    # Four steps, the third of 16 s, and the logging behind the first three.
    assert throughput.train_seconds == 3 * 1.0 + 16.0 + 3 * 0.25
    assert throughput.samples_per_second == 28 / 19.75
    # Half a percent, the half width of a bin.
    assert throughput.median_step_seconds == pytest.approx(1.25, rel=0.005)
    assert throughput.seconds == clock.now - 100.0


def test_times_and_counts_go_on_where_a_checkpoint_was_taken() -> None:
    clock = Clock()
    first = Throughput(BATCH, clock=clock)
    trained(clock, first, Plan())
    state = first.state_dict()
    clock.now += 5000.0  # between the two starts, which is nobody's time
    second = Throughput(BATCH, clock=clock)
    second.load_state_dict(state)
    trained(clock, second, Plan())
    assert second.samples == 2 * state["samples"]
    assert second.train_seconds == 2 * state["train_seconds"]
    assert second.seconds == 2 * state["seconds"]
    assert second.median_step_seconds == first.median_step_seconds


def test_a_start_in_which_nothing_is_left_to_do_adds_no_time() -> None:
    clock = Clock()
    first = Throughput(BATCH, clock=clock)
    trained(clock, first, Plan())
    state, again = first.state_dict(), Throughput(BATCH, clock=clock)
    again.load_state_dict(state)
    clock.now += 0.5
    assert again.seconds == state["seconds"]
    assert again.state_dict() == state


def test_before_the_first_step_only_the_time_is_known() -> None:
    throughput = Throughput(BATCH, began=90.0, clock=Clock())
    assert throughput.seconds == 10.0
    assert throughput.samples_per_second is throughput.median_step_seconds is None


def test_the_share_of_waiting_is_that_of_the_steps_since_the_last_point() -> None:
    clock = Clock()
    throughput, train = Throughput(BATCH, clock=clock), SimpleNamespace(waited=5.0)
    run: Any = SimpleNamespace(tracker=None, throughput=throughput, train=train)
    curves = Curves(log_every=1)
    curves.setup(Trainer.__new__(Trainer), run)  # What was waited before the run counts for none.
    for waited, share in ((3.0, 0.75), (1.0, 0.25)):
        throughput.on_step_begin(Trainer.__new__(Trainer), [torch.ones(BATCH)])
        train.waited += waited
        clock.now += 4.0
        throughput.on_optimizer_step(Trainer.__new__(Trainer), StepResult.__new__(StepResult))
        assert curves._speed() == {
            "speed/samples_per_second": BATCH / 4.0,
            "speed/input_fraction": share,
        }
