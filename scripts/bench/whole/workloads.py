"""The workloads of whole runs: data, model and length."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from bench.step.workloads import bert_classifier
from mpframe import data
from mpframe.data import Task, classification
from mpframe.workloads.images import cnn, mlp, resnet18

_FASHION = ("/usr/share/datasets/fashion-mnist", "data")  # Debian's folder, and the default


@dataclass(frozen=True)
class Workload:
    """A run: classes are learnt with cross-entropy and AdamW, fp32."""

    title: str  # what is trained, for a heading
    data: "partial[Task]"  # makes the data: whole samples (inputs, class)
    model: "partial[nn.Module]"  # makes the model
    batch_size: int  # samples per step, without a last incomplete batch
    lr: float  # of AdamW
    epochs: int = 1  # each ends with a validation
    # The run ends, with a validation, after so many, or None: after the epochs.
    max_steps: int | None = None


def digits_mlp(epochs: int = 40) -> Workload:
    """Steps of a millisecond and many short validations: what a trainer adds shows most here."""
    model = partial(mlp, in_features=64, classes=10)
    return Workload("Digits, MLP", partial(untested_digits), model, 64, 1e-3, epochs)


def fashion_cnn(batch_size: int = 128, max_steps: int = 30, width: int = 16) -> Workload:
    """Real images and one long validation."""
    found = [root for root in _FASHION if Path(root).is_dir()]
    data = partial(untested_fashion_mnist, root=found[0] if found else _FASHION[-1])
    model = partial(cnn, channels=1, classes=10, width=width)
    return Workload("Fashion-MNIST, CNN", data, model, batch_size, 1e-3, max_steps=max_steps)


def residual_net(count: int = 1280, batch_size: int = 64, width: int = 16) -> Workload:
    """ResNet-18 on made-up images of CIFAR's size."""
    model = partial(resnet18, classes=10, width=width)
    return Workload("ResNet-18", partial(pictures, count=count), model, batch_size, 1e-3)


def tiny_bert(count: int = 1600, batch_size: int = 16, width: int = 128) -> Workload:
    """A classifier of made-up texts, of transformers."""
    data, model = partial(texts, count=count), partial(bert_classifier, width=width)
    return Workload("Tiny BERT", data, model, batch_size, 1e-4)


WORKLOADS: dict[str, Callable[..., Workload]] = {
    "digits_mlp": digits_mlp,
    "fashion_cnn": fashion_cnn,
    "resnet18": residual_net,
    "tiny_bert": tiny_bert,
}


def untested_digits() -> Task:
    """The digits without their test part: nothing comes after the last validation."""
    return replace(data.digits(), test=None)


def untested_fashion_mnist(root: str) -> Task:
    """Fashion-MNIST without its test part."""
    return replace(data.fashion_mnist(root), test=None)


def pictures(count: int) -> Task:
    """Noise of 3 x 32 x 32 in ten classes. As many images as a fifth of `count` validate."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    targets = torch.randint(0, 10, (count,), generator=generator)
    normalize = data.Normalize.measured(images)
    train, val = (
        data.ArrayImages(images[:part], targets[:part], normalize) for part in (count, count // 5)
    )
    return classification(train, val)


def texts(count: int, tokens: int = 32) -> Task:
    """Texts of random tokens in two classes. A fifth of them validate as well."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, 1000, (count, tokens), generator=generator)
    classes = torch.randint(0, 2, (count,), generator=generator)
    part = count // 5
    return classification(
        TensorDataset(words, classes), TensorDataset(words[:part], classes[:part])
    )
