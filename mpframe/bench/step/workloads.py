"""The models whose steps are raced in every dtype mode, each with one batch of made-up data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Workload:
    """A model and a batch to train it on.

    Attributes:
        title: what the model is, for a heading.
        sizes: of model and batch, in words.
        model: in fp32, the same in every process.
        batch: inputs and targets.
        loss: loss(outputs, targets) -> 0-d tensor.
    """

    title: str
    sizes: str
    model: nn.Module
    batch: tuple[Any, Tensor]
    loss: Callable[[Any, Any], Tensor]

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def linear(width: int = 2048, layers: int = 16, batch: int = 32) -> Workload:
    """Nothing but weights: each of them is used in few products, and has a full optimizer step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    data = torch.randn(batch, width), torch.randn(batch, width)
    sizes = f"{layers} linear layers of {width}, batch {batch}"
    return Workload("Linear layers", sizes, model, data, nn.MSELoss())


WORKLOADS: dict[str, Callable[..., Workload]] = {"linear": linear}
