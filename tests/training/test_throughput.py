"""What counts as training time, how it is summed up, and that it goes on over resumes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prepared import Batches, prepared
from torch import nn

from mpframe import Trainer
from mpframe.core.callback import Batch, Callback
from mpframe.core.step_result import StepResult
from mpframe.training.callbacks.records import Curves
from mpframe.training.callbacks.results import Throughput
from mpframe.training.evaluation import Evaluator
from mpframe.training.plan import Plan

BATCH = 4


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Slow(Callback):
    """Lets each part of a run take a time of its own, in seconds that add up in binary."""

    def __init__(self, clock: Clock, throughput: Throughput) -> None:
        self._clock, self._throughput = clock, throughput

    def on_step_begin(self, trainer: Trainer, batches: list[Batch]) -> None:
        self._clock.now += 1.0 if trainer.progress.global_step != 2 else 16.0

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        self._clock.now += 0.25  # logging: part of training, and of the next step's time

    def on_prediction_step(self, trainer: Trainer) -> None:
        self._clock.now += 1000.0

    def on_step_end(self, trainer: Trainer) -> None:
        with self._throughput.pause():  # saving
            self._clock.now += 1000.0


def trained(clock: Clock, throughput: Throughput, **options: int) -> None:
    own: dict[str, Any] = {"plan": Plan(**options), "evaluator": Evaluator()}  # type: ignore[arg-type]
    trainer = prepared(nn.Linear(3, 1), nn.MSELoss(), **own)
    # As a run orders them: what counts comes first.
    trainer.callbacks = {"throughput": throughput, "slow": Slow(clock, throughput)}
    # Seven batches: with windows of two the last one is partial.
    samples: Any = Batches([(torch.ones(BATCH, 3), torch.zeros(BATCH, 1))] * 7)
    trainer.fit(samples, samples)


def test_a_partial_window_counts_what_it_had_and_only_training_counts() -> None:
    clock = Clock()
    throughput = Throughput(BATCH, began=90.0, clock=clock)
    assert throughput.seconds == 10.0
    assert throughput.samples_per_second is throughput.median_step_seconds is None
    trained(clock, throughput, accumulate=2, eval_every=2)
    assert throughput.samples == 7 * BATCH
    # Four steps, the third of 16 s, and the logging behind the first three.
    assert throughput.train_seconds == 3 * 1.0 + 16.0 + 3 * 0.25
    assert throughput.samples_per_second == 28 / 19.75
    # Half a percent, the half width of a bin.
    assert throughput.median_step_seconds == pytest.approx(1.25, rel=0.005)
    assert throughput.seconds == clock.now - 90.0


def test_times_and_counts_go_on_where_a_checkpoint_was_taken() -> None:
    clock = Clock()
    first = Throughput(BATCH, clock=clock)
    trained(clock, first)
    state, idle = first.state_dict(), Throughput(BATCH, clock=clock)
    idle.load_state_dict(state)
    clock.now += 5000.0  # A start in which nothing is left to do adds no time.
    assert (idle.seconds, idle.state_dict()) == (state["seconds"], state)
    second = Throughput(BATCH, clock=clock)
    second.load_state_dict(state)
    assert second.since_last_call() == (0, 0.0)
    trained(clock, second)
    for name in ("samples", "train_seconds", "seconds"):
        assert getattr(second, name) == 2 * state[name]
    assert second.median_step_seconds == first.median_step_seconds


def test_the_share_of_waiting_is_that_of_the_steps_since_the_last_point() -> None:
    clock, trainer, done = Clock(), Trainer.__new__(Trainer), StepResult.__new__(StepResult)
    throughput, loader = Throughput(BATCH, clock=clock), SimpleNamespace(waited=5.0)
    run: Any = SimpleNamespace(tracker=None, throughput=throughput, train=loader)
    curves = Curves(log_every=1)
    curves.setup(trainer, run)  # What was waited before the run counts for none.
    for waited, share in ((3.0, 0.75), (1.0, 0.25)):
        throughput.on_step_begin(trainer, [torch.ones(BATCH)])
        loader.waited += waited
        clock.now += 4.0
        throughput.on_optimizer_step(trainer, done)
        speed = {"speed/samples_per_second": BATCH / 4.0, "speed/input_fraction": share}
        assert curves._speed() == speed
