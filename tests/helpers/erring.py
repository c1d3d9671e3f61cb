"""A data set, a model, a loss and a metric of a user's own, each with a fault that is asked for."""

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from mpframe.core.objective import StepOutput
from mpframe.data import Accuracy, Task
from mpframe.training.objectives import model_loss

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
        forms = {
            "uint8": (64 * inputs).to(torch.uint8),
            "float64": inputs.double(),
            "bool": inputs > 1,
            "int64": (64 * inputs).long(),
            "array": np.linspace(0, 1, 8) + index / 64,
        }
        targets = {
            "classes": CLASSES if index == 37 else target,
            "negative": -3 if index == 37 else target,
            "float": float(target),
            "row": torch.tensor([target]),
            "text": "abc"[target],
        }
        return forms.get(self.fault, inputs), targets.get(self.fault, target)


class Batches(Samples):
    """The same samples, whole batches at a time."""

    def fetch_batch(self, indices: list[int]) -> Any:
        """Inputs and targets of one batch."""
        inputs = torch.stack([torch.linspace(0, 1, 8) + index / 64 for index in indices])
        targets = torch.tensor([index % CLASSES for index in indices])
        if self.fault == "words":
            return "words"
        if self.fault == "fewer":
            return inputs, targets[1:]
        if self.fault == "one":
            return inputs, targets[0]
        if self.fault == "grad":
            return inputs.requires_grad_() * 1, targets
        return (inputs,)


def each_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def no_loss(outputs: Tensor, targets: Tensor) -> None:
    nn.functional.cross_entropy(outputs, targets)


def detached_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets).detach()


def number_loss(outputs: Tensor, targets: Tensor) -> float:
    return float(nn.functional.cross_entropy(outputs, targets).detach())


def raising_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    raise KeyError("weights")


class Exits(torch.optim.lr_scheduler.ConstantLR):
    """Ends the program after two steps."""

    def step(self, epoch: int | None = None) -> None:
        """Counts."""
        if self.last_epoch == 2:
            sys.exit(0)
        super().step()


def one_number(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets).reshape(1)


def tensor_objective(model: nn.Module, batch: Any) -> Any:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def no_outputs_objective(model: nn.Module, batch: Any) -> StepOutput:
    return StepOutput(tensor_objective(model, batch))


def count_objective(model: nn.Module, batch: Any) -> StepOutput:
    return StepOutput(tensor_objective(model, batch), count=-1)


def half_objective(model: nn.Module, batch: Any) -> StepOutput:
    outputs = model(batch[0]).float()
    return StepOutput(tensor_objective(model, batch).half(), outputs, batch[1])


def raising_objective(model: nn.Module, batch: Any) -> StepOutput:
    raise KeyError("images")


LOSSES: dict[str, Any] = {
    "one_number": one_number,
    "each": each_loss,
    "none": no_loss,
    "detached": detached_loss,
    "number": number_loss,
    "raises": raising_loss,
    "class": nn.CrossEntropyLoss,
    "not_callable": 3,
}

OBJECTIVES: dict[str, Any] = {
    "empty": {},
    "one_not_callable": {"first": model_loss, "second": "mse"},
    "as_objective": nn.CrossEntropyLoss(),
    "tensor": tensor_objective,
    "count": count_objective,
    "no_outputs": no_outputs_objective,
    "half": half_objective,
    "raising": raising_objective,
    "model_loss": model_loss,
}


class Nameless(Accuracy):
    """Has a number for a name."""

    name = 7  # type: ignore[assignment]


class Unnamed:
    """Has no name."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Nothing."""


class Raises(Accuracy):
    """Cannot count."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Fails."""
        raise ZeroDivisionError("nothing seen")


class Words(Accuracy):
    """Tells how it went."""

    def compute(self) -> Any:
        """A word."""
        return "good"


class Many(Accuracy):
    """Has a value for each class."""

    def compute(self) -> Tensor:
        """Three numbers."""
        return torch.zeros(CLASSES)


METRICS: dict[str, Any] = {
    "number": Nameless,
    "unnamed": Unnamed,
    "raises": Raises,
    "words": Words,
    "many": Many,
    "instance": Accuracy(),
}


def task(
    fault: str = "", loss: str = "", metric: str = "", split: str = "train", whole: bool = False
) -> Task:
    """A task with a fault in its data (of one split), its loss or its metric."""
    kind = Batches if whole else Samples
    train, val = (kind(fault if split in (name, "both") else "") for name in ("train", "val"))
    if whole:
        val = Samples()
    measure = METRICS.get(metric, Accuracy)
    if loss in OBJECTIVES:
        return Task(train, val, OBJECTIVES[loss], measure)
    return Task(train, val, loss=LOSSES.get(loss, nn.CrossEntropyLoss()), metric=measure)


class Net(nn.Module):
    """A linear layer that does something else besides."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.head = nn.Linear(8, CLASSES)
        self.fault = fault
        if fault == "frozen":
            self.requires_grad_(False)
        if fault == "half_frozen":
            self.head.bias.requires_grad_(False)
        if fault == "meta":
            self.to("meta")
        if fault == "lazy":
            self.head = nn.LazyLinear(CLASSES)
        if fault == "float64":
            self.double()
        if fault == "init":
            raise AttributeError("no such layer")

    def train(self, mode: bool = True) -> "Net":
        """Ends the program, if that is the fault."""
        if self.fault == "exit_mode":
            sys.exit(0)
        return super().train(mode)

    def forward(self, inputs: Tensor) -> Any:
        """Logits [N, classes], or what the fault makes of them."""
        if self.fault == "exit":
            sys.exit(0)
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
        made: dict[str, Any] = {
            "tuple": (logits, logits),
            "dict": {"logits": logits},
            "none": None,
            "detached": logits.detach(),
        }
        return made.get(self.fault, logits)


class Embedded(nn.Module):
    """Takes whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(128, 4)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits [N, classes] of numbers [N, 8]."""
        return self.head(self.table(inputs).flatten(1))


class StuckSGD(torch.optim.SGD):
    """Cannot step."""

    def step(self, closure: Any = None) -> None:
        """Fails."""
        raise ArithmeticError("no way down")
