"""Callbacks and metrics as a user would write them, named in the tests by `_target_`."""

import os
import signal
from typing import Any

import torch
from torch import Tensor, nn

from mpframe import Trainer
from mpframe.core.callback import Callback
from mpframe.data.images import digits
from mpframe.data.task import Task
from mpframe.training.run_context import RunContext


class Losses(Callback):
    """Keeps the losses of all steps, over resumes; writes them at the end."""

    losses: list[float]

    def __init__(self, name: str) -> None:
        self._name, self.losses = name, []

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        self._path = context.folder / f"{self._name}.txt"

    def on_step_end(self, trainer: Trainer) -> None:
        self.losses.append(float(trainer.progress.global_step))

    def teardown(self, trainer: Trainer, error: BaseException | None) -> None:
        self._path.write_text(" ".join(map(str, self.losses)))

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])


class Breaks(Callback):
    """Raises at a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_optimizer_step(self, trainer: Trainer, result: object) -> None:
        if trainer.progress.global_step == self._step:
            raise ConnectionError("no route to the server")


class Stop(Callback):
    """Sends its process the signal that the variable STOP names, in a sweep's job with seed 2."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_step_end(self, trainer: Trainer) -> None:
        name = os.environ.get("STOP")
        if name and self.seed == 2 and trainer.progress.global_step == 4:
            os.kill(os.getpid(), signal.Signals[name])


class LikeTorchmetrics(nn.Module):
    """A metric with torchmetrics' interface: preds and target, reset, compute, and to()."""

    higher_is_better = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("hits", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self) -> None:
        raise AssertionError("a metric is not called")

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.hits = self.hits + (preds.argmax(1) == target).sum()
        self.seen = self.seen + len(target)

    def compute(self) -> Tensor:
        return self.hits / self.seen

    def reset(self) -> None:
        self.hits, self.seen = torch.zeros(()), torch.zeros(())


class Vector(LikeTorchmetrics):
    """One value for each class."""

    def compute(self) -> Any:
        return torch.ones(10)


class OnlyCompute:
    """No metric."""

    def compute(self) -> float:
        return 0.0


def with_objects() -> Task:
    """The digits with a metric that is an object, by name."""
    task = digits()
    return Task(task.train, task.val, task.objective, {"hits": LikeTorchmetrics()})
