"""Models and data with one fault each, for the doctor to find."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from mpframe.core.objective import StepOutput
from mpframe.data.metrics import Accuracy
from mpframe.data.task import Task


def net(head: float = 1.0, form: str = "float32", width: int = 32) -> nn.Module:
    """Two linear layers; the head's weights multiplied by `head` and held in `form`."""
    first, last = nn.Linear(64, width), nn.Linear(width, 10)
    with torch.no_grad():
        last.weight.mul_(head)
        last.weight.copy_(last.weight.to(getattr(torch, form)).float())
    model = nn.Sequential(nn.Flatten(), first, nn.ReLU())
    model.add_module("head", last)
    return model


def numbered(head: float = 1.0) -> nn.Module:
    """The same with modules that have numbers for names."""
    return nn.Sequential(nn.Sequential(nn.Flatten(), net(head)[1]), nn.ReLU(), net(head).head)


def loud(gain: float = 1.0) -> nn.Module:
    """A layer in the middle with outputs of about `gain`, brought down again."""

    class Loud(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last = (nn.Linear(64, n) for n in (64, 64, 10))
            nn.init.constant_(self.middle.bias, gain)
            nn.init.constant_(self.first.weight, gain / 1000)

        def forward(self, images: Tensor) -> Tensor:
            return self.last(self.middle(self.first(images.flatten(1))).float() / gain)

    return Loud()


def outlier(weight: float = 1e6) -> nn.Module:
    """A layer in the middle with one weight beside which the others are small."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64))
    model.add_module("middle", nn.Linear(64, 64))
    model.add_module("squash", nn.Tanh())  # The next layer does not see it.
    model.add_module("last", nn.Linear(64, 10))
    nn.init.constant_(model.middle.weight[0, :1].detach(), weight)
    return model


def scattered(gain: float = 1e6, layers: int = 20) -> nn.Module:
    """More layers with outputs beyond float16 than pins are tried."""

    class Scattered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))
            self.head = nn.Linear(64, 10)
            for layer in self.layers:
                nn.init.constant_(layer.weight, gain / 64)

        def forward(self, images: Tensor) -> Tensor:
            hidden = images.flatten(1)
            for layer in self.layers:
                hidden = layer(hidden).float() / gain
            return self.head(hidden)

    return Scattered()


def normed() -> nn.Module:
    """A layer norm and a batch norm between linear layers."""
    flat, first, relu, head = net().children()
    return nn.Sequential(flat, first, nn.LayerNorm(32), nn.BatchNorm1d(32), relu, head)


def bare_norm() -> nn.Module:
    """A norm without weights of its own."""
    flat, first, _, head = net().children()
    return nn.Sequential(flat, first, nn.BatchNorm1d(32, affine=False), head)


class Plain(nn.Module):
    """Parameters of its own beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.layer = nn.Parameter(torch.zeros(64)), nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(images.flatten(1) + self.shift)


def digits(gain: float = 1.0, size: int = 256) -> Task:
    """Random images; the loss multiplied by `gain`."""
    data = TensorDataset(torch.randn(size, 1, 8, 8), torch.arange(size) % 10)

    def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
        return gain * F.cross_entropy(outputs, targets)

    return Task(data, data, loss=loss_of, metric=Accuracy)


def faint(model: nn.Module, batch: Any) -> StepOutput:
    """The cross-entropy times 1e-9, whose gradients float16 does not hold."""
    outputs = model(batch[0])
    return StepOutput(F.cross_entropy(outputs, batch[1]) * 1e-9, outputs, batch[1])
