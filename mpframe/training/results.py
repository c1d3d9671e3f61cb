"""Keeps a run's results: the last loss, the last and the best validation, the test, and its speed.

Training time is from step to step: loading, the step, its logging, and compiling at first, without
validating and saving. A step's time is a median, which neither the first one nor a pause changes.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from torch import Tensor

from mpframe.core.callback import Batch, Callback
from mpframe.core.step_result import StepResult
from mpframe.training.evaluation import Best, Evaluation
from mpframe.training.trainer import Trainer

_BIN = math.log(1.01)
_SHORTEST = 1e-9  # seconds, for a clock that stood still


class Results(Callback):
    """Keeps the last loss, the last validation, the best one and the test."""

    def __init__(self) -> None:
        self.loss: float | Tensor | None = None  # unscaled, of the last step
        self.evaluation: Evaluation | None = None  # the last validation
        self.best = Best()  # without a value if the monitored metric has no direction
        self.test: Evaluation | None = None  # in no checkpoint

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        if result.loss is not None:
            self.loss = result.loss

    def on_evaluate(self, trainer: Trainer, evaluation: Evaluation) -> None:
        self.evaluation = evaluation
        higher = evaluation.direction(evaluation.monitor)
        if higher is not None:
            step = trainer.progress.global_step
            self.best.offer(evaluation.monitor, evaluation.value, step, higher)

    def on_test(self, trainer: Trainer, evaluation: Evaluation) -> None:
        self.test = evaluation

    def state_dict(self) -> dict[str, Any]:
        return {
            "loss": None if self.loss is None else float(self.loss),
            "evaluation": None if self.evaluation is None else asdict(self.evaluation),
            "best": asdict(self.best),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss = None if state["loss"] is None else float(state["loss"])
        held = state["evaluation"]
        if held is not None:
            self.evaluation = Evaluation(
                float(held["loss"]),
                {str(name): float(value) for name, value in held["metrics"].items()},
                dict(held["higher_is_better"]),
                str(held["monitor"]),
            )
        self.best = Best(**state["best"])


class Throughput(Callback):
    """Counts samples, and the seconds it took to train on them, over all starts of a run.

    A checkpoint holds the sums, and a resumed run adds to them. The steps that a killed start took
    after its last checkpoint are taken again, and count once. Step times are counted in bins of one
    percent, so that a run of any length keeps few numbers.

    Args:
        batch_size: samples per micro-batch.
        began: `time.perf_counter()` when this start of the run began. None: now.
    """

    def __init__(self, batch_size: int, began: float | None = None) -> None:
        self.samples, self.train_seconds = 0, 0.0  # of the steps tried
        self._batch_size, self._lap_began = batch_size, time.perf_counter()
        self._began = self._lap_began if began is None else began
        self._paused: float | None = None
        self._untold: deque[int] = deque()
        self._step_times: Counter[int] = Counter()
        self._earlier, self._idle = 0.0, False

    @property
    def samples_per_second(self) -> float | None:
        """Training samples over training time, or None before the first step."""
        return self.samples / self.train_seconds if self.train_seconds else None

    @property
    def median_step_seconds(self) -> float | None:
        """The median time of a step, to half a percent, or None before the first one."""
        passed, half = 0, self._step_times.total() / 2
        for number, steps in sorted(self._step_times.items()):
            passed += steps
            if passed >= half:
                return math.exp(number * _BIN)
        return None

    @property
    def seconds(self) -> float:
        """Wall time of all starts, evaluation included. A start that did nothing counts 0."""
        return self._earlier + (0.0 if self._idle else time.perf_counter() - self._began)

    def on_step_begin(self, trainer: Trainer, batches: Sequence[Batch]) -> None:
        self._untold.append(len(batches) * self._batch_size)

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        """Count the step and its time. Steps that are reported together share it evenly."""
        lap = max((time.perf_counter() - self._lap_began) / len(self._untold), _SHORTEST)
        self._lap_began += lap
        self.samples += self._untold.popleft()
        self.train_seconds += lap
        self._step_times[round(math.log(lap) / _BIN)] += 1
        self._idle = False

    def on_prediction_step(self, trainer: Trainer) -> None:
        """Stop the clock: a validation or the test began."""
        self._stop_clock()

    def on_evaluate(self, trainer: Trainer, evaluation: object) -> None:
        self._start_clock()
        self._idle = False

    def on_test(self, trainer: Trainer, evaluation: object) -> None:
        """Start the clock. A finished run that is only tested once more keeps its time."""
        self._start_clock()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Within the block the clock stands still, because the run is being saved."""
        self._stop_clock()
        try:
            yield
        finally:
            self._start_clock()

    def state_dict(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "train_seconds": self.train_seconds,
            "seconds": self.seconds,
            "step_times": dict(self._step_times),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples, self.train_seconds = int(state["samples"]), float(state["train_seconds"])
        self._earlier, self._idle = float(state["seconds"]), True
        self._step_times = Counter({int(k): int(v) for k, v in state["step_times"].items()})

    def _stop_clock(self) -> None:
        if self._paused is None:
            self._paused = time.perf_counter()

    def _start_clock(self) -> None:
        if self._paused is not None:
            self._lap_began += time.perf_counter() - self._paused
            self._paused = None
