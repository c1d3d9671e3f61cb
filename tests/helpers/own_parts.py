"""Parts of a run as users write them, named in the tests by `_target_`; some lack something."""

import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from mpframe import Trainer
from mpframe.core.callback import Callback
from mpframe.core.objective import StepOutput
from mpframe.data import Accuracy, Task
from mpframe.data.images import digits
from mpframe.training.objectives import model_loss

WORDS = 12


class Breaks(Callback):
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
        self.register_buffer("counts", torch.zeros(2))

    def forward(self) -> None:
        raise AssertionError("a metric is not called")

    def update(self, preds: Tensor, target: Tensor) -> None:
        hits = (preds.argmax(1) == target).sum()
        self.counts = self.counts + torch.stack([hits, hits.new_tensor(len(target))])

    def compute(self) -> Tensor:
        return self.counts[0] / self.counts[1]

    def reset(self) -> None:
        self.counts = torch.zeros(2)


class OnlyCompute:
    def compute(self) -> float:
        return 0.0


def with_objects() -> Task:
    """The digits with a second metric that is an object, by name."""
    return replace(digits(), metric={"accuracy": Accuracy, "hits": LikeTorchmetrics()})


class Module(nn.Module):
    """Nothing of mpframe in it: a module has all of a scaler but `update`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(256.0))

    def update(self, amax: Tensor) -> None:
        self.scale = torch.where(amax < torch.inf, self.scale * 1.5, self.scale / 2)


class NoisyNet(nn.Module):
    """Needs all that a checkpoint carries: batch statistics, and each generator's numbers.

    What it saw is in a buffer that grows, in one that is not persistent, and in a plain number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(64, 16), nn.BatchNorm1d(16)
        self.drop, self.last, self.count = nn.Dropout(0.2), nn.Linear(16, 10), 0
        self.register_buffer("means", torch.zeros(0, 16))
        self.register_buffer("sum", torch.zeros(16), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(images.flatten(1))))
        if self.training:
            hidden = hidden * (1 + 0.1 * random.random()) + 0.1 * float(np.random.normal())
            self.means = torch.cat([self.means, hidden.detach().float().mean(0, keepdim=True)])
            self.sum += self.means[-1] * len(self.means)
            self.count += 1
        memory = self.sum / (self.count + 1) + self.means.sum(0)
        return self.last(self.drop(hidden + 0.01 * memory))


class MonteCarloNet(NoisyNet):
    """Draws when it is evaluated as well, as with Monte Carlo dropout."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images + 0.1 * torch.rand_like(images))


class Made(Dataset[Any]):
    def __init__(self, make: Callable[[int], Any], count: int = 11) -> None:
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def text(index: int) -> dict[str, Any]:
    """3 to 8 words, some left out at random; the class is the first word, modulo 3."""
    words = torch.arange(3 + index % 6).mul(7).add(index) % WORDS
    ids = words.masked_fill(torch.rand(len(words)) < 0.1, WORDS)
    return {"input_ids": ids, "labels": index % WORDS % 3, "name": f"text {index}"}


def padded(samples: list[Any]) -> dict[str, Any]:
    ids = pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    labels = torch.tensor([sample["labels"] for sample in samples])
    return {"input_ids": ids, "labels": labels, "name": [sample["name"] for sample in samples]}


@dataclass
class Texted:
    """A batch of texts as an object."""

    words: Tensor
    labels: Tensor
    names: list[str]


def of_attributes(model: nn.Module, batch: Texted) -> StepOutput:
    result = model(batch.words, batch.labels)
    return StepOutput(result["loss"], result["logits"], batch.labels)


def texts(as_object: bool = False) -> Task:
    """Texts of different lengths, padded by a collate: batches are dicts or objects."""
    train, val = Made(text, 60), Made(text, 20)
    if not as_object:
        return Task(train, val, model_loss, Accuracy, collate=padded)
    return Task(train, val, of_attributes, Accuracy, collate=lambda s: Texted(*padded(s).values()))


class Reader(nn.Module):
    """Returns its own loss, by the mean of the words' vectors, times `gain`."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.embedding, self.gain = nn.Embedding(WORDS + 1, 16), gain
        self.hidden, self.head = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, labels: Tensor, name: Any = None) -> dict[str, Tensor]:
        hidden = self.hidden(self.embedding(input_ids).mean(dim=1)) * self.gain
        logits = self.head(torch.relu(hidden))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}
