"""What counts as training time, over resumes too; the operations of a step, and their rate."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures import Log, Patch, refused
from in_process import scalars, train
from prepared import Batches, prepared
from torch import nn

from mpframe import Curves, Evaluator, Plan, StepResult, Trainer, checkpoint
from mpframe.core.callback import Batch, Callback
from mpframe.core.errors import ConfigError
from mpframe.training import results
from mpframe.training.callbacks import utilization
from mpframe.training.callbacks.utilization import Utilization
from mpframe.training.results import Throughput

BATCH = 4


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: Patch) -> Clock:
    """The clock of the throughput, which only a test moves."""
    moved = Clock()
    monkeypatch.setattr(results, "time", SimpleNamespace(perf_counter=moved))
    return moved


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


def test_a_partial_window_counts_what_it_had_and_only_training_counts(clock: Clock) -> None:
    throughput = Throughput(BATCH, began=90.0)
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


def test_times_and_counts_go_on_where_a_checkpoint_was_taken(clock: Clock) -> None:
    first = Throughput(BATCH)
    trained(clock, first)
    state, idle = first.state_dict(), Throughput(BATCH)
    idle.load_state_dict(state)
    clock.now += 5000.0  # A start in which nothing is left to do adds no time.
    assert (idle.seconds, idle.state_dict()) == (state["seconds"], state)
    second = Throughput(BATCH)
    second.load_state_dict(state)
    trained(clock, second)
    for name in ("samples", "train_seconds", "seconds"):
        assert getattr(second, name) == 2 * state[name]
    assert second.median_step_seconds == first.median_step_seconds


def test_the_share_of_waiting_is_that_of_the_steps_since_the_last_point(clock: Clock) -> None:
    trainer, done = Trainer.__new__(Trainer), StepResult.__new__(StepResult)
    throughput, loader = Throughput(BATCH), SimpleNamespace(waited=5.0)
    throughput.load_state_dict({"samples": 8, "train_seconds": 2.0, "seconds": 2, "step_times": {}})
    run: Any = SimpleNamespace(tracker=None, throughput=throughput, train=loader)
    curves = Curves(log_every=1)
    curves.setup(trainer, run)  # What was before, or in an earlier start, counts for none.
    for waited, share in ((3.0, 0.75), (1.0, 0.25)):
        throughput.on_step_begin(trainer, [torch.ones(BATCH)])
        loader.waited += waited
        clock.now += 4.0
        throughput.on_optimizer_step(trainer, done)
        speed = {"speed/samples_per_second": BATCH / 4.0, "speed/input_fraction": share}
        assert curves._speed() == speed


@pytest.mark.parametrize(("options", "accumulate"), [
    ("dtype=fp32", 1),
    ("dtype=mixed", 2),
    pytest.param("dtype=amp_bf16 trainer.compile=true", 1, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_steps_operations_are_those_of_its_products(
    options: str, accumulate: int, tmp_path: Path, caplog: Log
) -> None:
    """Forward one product for each layer, backward one for weights and, after the first, inputs."""
    own = ["model=mlp", "model.hidden=16", "model.depth=1", "dataset.batch_size=32"]
    own += ["trainer.max_steps=4", "trainer.log_every=2", "trainer.eval_every=1"]
    own += [*options.split(), f"trainer.accumulate={accumulate}"]
    caplog.set_level("INFO", "mpframe")
    train(tmp_path / "plain", *own)
    own += ["callbacks.utilization.peak_flops=1e9", "callbacks.utilization.tokens=true"]
    train(tmp_path / "run", *own, "callbacks=[default,utilization]")
    first, second = 2 * 32 * 64 * 16, 2 * 32 * 16 * 10
    step = accumulate * (2 * first + 3 * second)
    assert f"a step takes {step:.4g} floating-point operations" in caplog.text
    curves = scalars(tmp_path / "run")
    speed, rates = dict(curves["speed/samples_per_second"]), curves["speed/flops_per_second"]
    assert [at for at, _ in rates] == [2, 4]
    for at, rate in rates:  # The same time, and event files store fp32.
        assert rate == pytest.approx(speed[at] * step / (32 * accumulate), rel=1e-6)
        assert dict(curves["speed/utilization"])[at] == pytest.approx(rate / 1e9, rel=1e-6)
        # The labels are the whole numbers of a batch.
        assert dict(curves["speed/tokens_per_second"])[at] == pytest.approx(speed[at], rel=1e-6)
    one, other = (
        checkpoint.load(tmp_path / name)["trainer"]["weights"] for name in ("plain", "run")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_tokens_are_counted_and_a_peak_is_known_by_name(monkeypatch: Patch) -> None:
    assert utilization._tokens_in((torch.rand(2), torch.zeros(3, 4).long())) == 12
    half, cuda = SimpleNamespace(mode="amp", half="bfloat16"), torch.device("cuda")
    peaks = {"NVIDIA H100 PCIe": 756e12, "NVIDIA H200": 989.4e12, "Tesla V100": None}
    for name, peak in peaks.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, own=name: own)
        assert utilization._peak_of(cuda, half) == peak
    assert utilization._peak_of(torch.device("cpu"), half) is None
    said = refused(ConfigError, Utilization, peak_flops=0.0)
    assert said.startswith("callbacks.utilization.peak_flops=0.0: must be ")
