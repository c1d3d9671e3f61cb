"""A data set, a model, a loss and a metric of a user's own, each with a fault that is asked for."""

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, default_collate

from mpframe.core.objective import StepOutput, supervised
from mpframe.data import Accuracy, Task
from mpframe.data.images import digits

CLASSES = 3


class Samples(Dataset[Any]):
    """64 samples of 8 numbers in three classes; `fault` spoils inputs or targets."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def __len__(self) -> int:
        if self.fault == "length":
            raise OSError("no such list")
        return 64

    def __getitem__(self, index: int) -> Any:
        if self.fault == "exit" and index == 37:
            sys.exit(0)
        inputs, target = torch.linspace(0, 1, 8) + index / 64, index % CLASSES
        whole = (64 * inputs).long()
        forms = {"uint8": whole.byte(), "int64": whole, "float64": inputs.double()}
        bad = {"classes": CLASSES, "negative": -3} if index == 37 else {}
        targets = {"float": float(target)} | bad
        return forms.get(self.fault, inputs), targets.get(self.fault, target)


class Batches(Samples):
    """The same samples, whole batches at a time, with a graph behind them."""

    def fetch_batch(self, indices: list[int]) -> Any:
        inputs, targets = default_collate([self[index] for index in indices])
        return inputs.requires_grad_() * 1, targets


def each_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, reduction="none")


def detached_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets).detach()


def tensor_objective(model: nn.Module, batch: Any) -> Any:
    return cross_entropy(model(batch[0]), batch[1])


LOSSES: dict[str, Any] = {"each": each_loss, "detached": detached_loss}
OBJECTIVES: dict[str, Any] = {
    "tensor": tensor_objective,
    "no_outputs": lambda model, batch: StepOutput(tensor_objective(model, batch)),
    "half": lambda model, batch: StepOutput(
        tensor_objective(model, batch).half(), model(batch[0]).float(), batch[1]
    ),
}


class Exits(torch.optim.lr_scheduler.ConstantLR):
    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch == 2:
            sys.exit(0)
        super().step()


class Words(Accuracy):
    def compute(self) -> Any:
        return "good"


def task(
    fault: str = "", loss: str = "", metric: str = "", split: str = "train", whole: bool = False
) -> Task:
    """A task with a fault in its data (of one split or both), its loss or its metric."""
    train = (Batches if whole else Samples)(fault)
    val = Samples(fault if split == "both" else "")
    measure = Words if metric == "words" else Accuracy
    if loss in OBJECTIVES:
        return Task(train, val, OBJECTIVES[loss], measure)
    return Task(train, val, loss=LOSSES.get(loss, nn.CrossEntropyLoss()), metric=measure)


def nan_after(batches: int) -> Task:
    """The digits with a loss that turns nan after so many training batches."""
    left = iter(range(batches))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        turned = torch.is_grad_enabled() and next(left, None) is None
        return cross_entropy(outputs, targets) * (float("nan") if turned else 1)

    return replace(digits(), objective=supervised(loss))


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


class Net(nn.Module):
    """A linear layer that does something else besides."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.head = nn.LazyLinear(CLASSES) if fault == "lazy" else nn.Linear(8, CLASSES)
        self.fault = fault
        if fault == "frozen":
            self.requires_grad_(False)
        if fault == "float64":
            self.double()

    def train(self, mode: bool = True) -> "Net":
        if self.fault == "exit_mode":
            sys.exit(0)
        return super().train(mode)

    def forward(self, inputs: Tensor) -> Any:
        if self.fault == "exit_later" and not self.training:
            sys.exit(0)
        if self.fault == "raises":
            raise KeyError("hidden")
        logits = self.head(inputs)
        if self.fault == "backward":
            probabilities = logits.float().exp()
            kept = probabilities * 1
            probabilities.zero_()
            return kept
        made = {"tuple": (logits, logits), "detached": logits.detach()}
        return made.get(self.fault, logits)


def embedded() -> nn.Module:
    return nn.Sequential(nn.Embedding(128, 4), nn.Flatten(), nn.Linear(32, CLASSES))


class StuckSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise ArithmeticError("no way down")
