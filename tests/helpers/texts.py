"""Texts of different lengths, padded by a collate, and a model that returns its own loss."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from mpframe.core.objective import StepOutput
from mpframe.data import Accuracy, Task
from mpframe.training.objectives import model_loss

WORDS = 12


class Texts(Dataset[Any]):
    """Texts of 3 to 8 words; the class is the first word, modulo 3. Some words are left out."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        words = torch.arange(3 + index % 6).mul(7).add(index) % WORDS
        # The sample's own random numbers leave some out.
        ids = words.masked_fill(torch.rand(len(words)) < 0.1, WORDS)
        return {"input_ids": ids, "labels": index % WORDS % 3, "name": f"text {index}"}


def padded(samples: list[Any]) -> dict[str, Any]:
    """A batch: [N, longest] words, and the rest of each sample."""
    ids = nn.utils.rnn.pad_sequence([s["input_ids"] for s in samples], batch_first=True)
    labels = torch.tensor([sample["labels"] for sample in samples])
    return {"input_ids": ids, "labels": labels, "name": [sample["name"] for sample in samples]}


@dataclass
class Texted:
    """A batch as an object."""

    words: Tensor
    labels: Tensor
    names: list[str]


def padded_object(samples: list[Any]) -> Texted:
    batch = padded(samples)
    return Texted(batch["input_ids"], batch["labels"], batch["name"])


def of_attributes(model: nn.Module, batch: Texted) -> StepOutput:
    """The objective for such objects."""
    result = model(batch.words, batch.labels)
    return StepOutput(result["loss"], result["logits"], batch.labels)


def task(as_object: bool = False) -> Task:
    objective, collate = (of_attributes, padded_object) if as_object else (model_loss, padded)
    return Task(Texts(60), Texts(20), objective, Accuracy, collate=collate)


class Reader(nn.Module):
    """The mean of the words' vectors, times `gain`, through a linear layer."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.embedding, self.gain = nn.Embedding(WORDS + 1, 16), gain
        self.hidden, self.head = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, labels: Tensor, name: Any = None) -> dict[str, Tensor]:
        hidden = self.hidden(self.embedding(input_ids).mean(dim=1)) * self.gain
        logits = self.head(torch.relu(hidden))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}
