"""Models and data with one fault or oddity each, for the doctor, the autopsy and the trace."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from mpframe.core.objective import StepOutput
from mpframe.data.metrics import Accuracy
from mpframe.data.task import Task


def named(**layers: nn.Module) -> nn.Module:
    """A classifier of digits: layers one after another."""
    model = nn.Sequential(nn.Flatten())
    for name, layer in layers.items():
        model.add_module(name, layer)
    return model


class Gain(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def net(head: float = 1.0, form: str = "float32", width: int = 32) -> nn.Module:
    """Two linear layers; the head's weights multiplied by `head` and held in `form`."""
    first, last = nn.Linear(64, width), nn.Linear(width, 10)
    with torch.no_grad():
        last.weight.mul_(head)
        last.weight.copy_(last.weight.to(getattr(torch, form)).float())
    return named(**{"1": first, "2": nn.ReLU(), "head": last})


def loud(gain: float = 1.0) -> nn.Module:
    """A layer in the middle with outputs of about `gain`, brought down again."""
    first, middle = nn.Linear(64, 64), nn.Linear(64, 64)
    nn.init.constant_(middle.bias, gain)
    nn.init.constant_(first.weight, gain / 1000)
    return named(first=first, middle=middle, down=Gain(1 / gain), last=nn.Linear(64, 10))


def outlier(weight: float = 1e6) -> nn.Module:
    """A layer in the middle with one weight beside which the others are small."""
    first, middle = nn.Linear(64, 64), nn.Linear(64, 64)
    nn.init.constant_(middle.weight[0, :1].detach(), weight)
    # The next layer does not see it.
    return named(first=first, middle=middle, squash=nn.Tanh(), last=nn.Linear(64, 10))


def scattered(gain: float = 1e6, layers: int = 20) -> nn.Module:
    """More layers with outputs beyond float16 than pins are tried."""
    linear = [nn.Linear(64, 64) for _ in range(layers)]
    for layer in linear:
        nn.init.constant_(layer.weight, gain / 64)
    each = [part for layer in linear for part in (layer, Gain(1 / gain))]
    return named(layers=nn.Sequential(*each), head=nn.Linear(64, 10))


def normed() -> nn.Module:
    flat, first, relu, head = net().children()
    return nn.Sequential(flat, first, nn.LayerNorm(32), nn.BatchNorm1d(32), relu, head)


class Plain(nn.Module):
    """Parameters of its own beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.layer = nn.Parameter(torch.zeros(64)), nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(images.flatten(1) + self.shift)


def beyond(factor: float = 1e6) -> nn.Module:
    """A gain in the middle that leaves float16, and a norm that takes it back."""
    first, head, norm = nn.Linear(64, 32), nn.Linear(32, 10), nn.BatchNorm1d(32)
    middle = {"relu": nn.ReLU(), "gain": Gain(factor), "dropout": nn.Dropout(0.2)}
    return named(first=first, **middle, norm=norm, head=head)


class Root(nn.Module):
    """A classifier whose outputs have the root of 0 added."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        outputs = self.head(images.flatten(1))
        return outputs + (outputs * 0).float().sqrt()


class Steep(Root):
    """One whose gradients overflow at scales above 64 or so."""

    def forward(self, images: Tensor) -> Tensor:
        outputs = self.head(images.flatten(1))
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: gradient * 2.0**12)
        return outputs


class Product(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


class Foreign(nn.Module):
    """Layers that are not torch.nn's, with random numbers and buffers between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.dropout = Product(64, 32), nn.BatchNorm1d(32), nn.Dropout(0.2)
        self.idle, self.head = Product(32, 32), Product(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.dropout(self.norm(self.first(images.flatten(1))).relu()))


def digits(gain: float = 1.0, size: int = 256) -> Task:
    """Random images; the loss multiplied by `gain`."""
    data = TensorDataset(torch.randn(size, 1, 8, 8), torch.arange(size) % 10)
    return Task(data, data, loss=lambda *pair: gain * F.cross_entropy(*pair), metric=Accuracy)


def faint(model: nn.Module, batch: Any) -> StepOutput:
    """The cross-entropy times 1e-9, whose gradients float16 does not hold."""
    outputs = model(batch[0])
    return StepOutput(F.cross_entropy(outputs, batch[1]) * 1e-9, outputs, batch[1])
