"""Trainers whose steps are recorded as one graph, and what they are given in the tests of that."""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from prepared import prepared
from torch import Tensor, nn

from mpframe.training.plan import Plan
from mpframe.training.trainers.compiled_step import CompiledTrainer

OVERFLOW = 4  # the number of a batch
# A product with such a rate is exact, so it makes no difference that a recorded step takes the rate
# as a tensor, multiplies by it and adds, where a plain one does both at once.
SGD = partial(torch.optim.SGD, lr=2.0**-4, momentum=0.9)


def net(outputs: int = 4) -> nn.Module:
    """A model with all that a step may move besides weights: statistics, and random numbers."""
    torch.manual_seed(0)
    normed = nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2)
    return nn.Sequential(*normed, nn.Linear(16, outputs))


def trainer(
    cls: Any, mode: str = "fp32", objective: Any = None, model: Any = None, **rest: Any
) -> Any:
    """A trainer of the class, which compiles its steps if it is the one that can."""
    plan = {"compile": "step" if cls is CompiledTrainer else False, **rest.pop("plan", {})}
    rest = {"optimizer": SGD, **rest}
    loss = objective or nn.CrossEntropyLoss()
    return prepared(model or net(), loss, mode, cls=cls, plan=Plan(**plan), **rest)


def batches(steps: int = 9, rows: int = 32) -> list[Any]:
    """Inputs and classes; the batch OVERFLOW holds an inf, so its step is skipped."""
    draw = torch.Generator().manual_seed(1)
    made = [
        (torch.randn(rows, 8, generator=draw), torch.randint(0, 4, (rows,), generator=draw))
        for _ in range(steps)
    ]
    for inputs, _ in made[OVERFLOW : OVERFLOW + 1]:
        inputs[0, 0] = torch.inf
    return made


def run(trained: Any, windows: list[Any]) -> list[Any]:
    """Every value of the results; then the trainer's state is the end of the steps."""
    torch.manual_seed(2)
    trained.model.train()
    found = [trained.train_step(*window) for window in windows]
    return [{f.name: getattr(result, f.name) for f in fields(result)} for result in found]


def calm(steps: int) -> list[Any]:
    """Windows of one batch each, at most as many as come before the one that overflows."""
    return [[batch] for batch in batches(steps)[:OVERFLOW]]


class Model(nn.Module):
    """Its forward pass ends with a function of the model, its inputs and its outputs."""

    def __init__(self, end: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.end, self.calls = nn.Linear(8, 4), end, 0
        self.words = nn.Embedding(64, 4, sparse=True)
        self.seen = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self, x, self.layer(x))
