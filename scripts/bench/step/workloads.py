"""The models whose steps are raced in every dtype mode, each with one batch of made-up data."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from mpframe.workloads.images import resnet18
from mpframe.workloads.segmentation.model import UNet
from mpframe.workloads.text.language_model import GPT


@dataclass(frozen=True)
class Workload:
    """A model and a batch to train it on."""

    title: str  # what the model is, for a heading
    sizes: str  # of model and batch, in words
    model: nn.Module  # in fp32, the same in every process
    batch: tuple[Any, Tensor]  # inputs and targets
    loss: Callable[[Any, Any], Tensor]  # loss(outputs, targets) -> 0-d tensor

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


def transformer(
    vocab_size: int = 16384, context: int = 128, depth: int = 8, width: int = 512, batch: int = 4
) -> Workload:
    """The GPT that ships, of a size for few cores, with heads of 64."""
    torch.manual_seed(0)
    model = GPT(vocab_size, context, depth=depth, heads=max(1, width // 64), width=width)
    tokens = torch.randint(0, vocab_size, (batch, context + 1))
    sizes = f"{depth} blocks of {width}, {vocab_size} tokens, {batch} texts of {context}"
    return Workload("Transformer", sizes, model, (tokens[:, :-1], tokens[:, 1:]), _next_token)


def recommender(
    tables: int = 4, rows: int = 250_000, width: int = 64, batch: int = 2048
) -> Workload:
    """Large embeddings with dense gradients: most of them are 0, and AdamW moves every row."""
    torch.manual_seed(0)
    model = _Recommender(tables, rows, width)
    data = torch.randint(0, rows, (batch, tables)), torch.rand(batch, 1).round()
    sizes = f"{tables} embeddings of {rows} x {width}, batch {batch}"
    return Workload("Recommender", sizes, model, data, nn.BCEWithLogitsLoss())


def tiny_bert(width: int = 128, layers: int = 2, tokens: int = 32, batch: int = 8) -> Workload:
    """A classifier of texts, of transformers."""
    torch.manual_seed(0)
    model = bert_classifier(width, layers)
    data = torch.randint(0, 1000, (batch, tokens)), torch.randint(0, 2, (batch,))
    sizes = f"{layers} layers of {width}, {batch} texts of {tokens}"
    return Workload("Tiny BERT", sizes, model, data, nn.CrossEntropyLoss())


def residual_net(width: int = 32, batch: int = 32) -> Workload:
    """The ResNet-18 that ships, for images of 32 x 32."""
    torch.manual_seed(0)
    model = resnet18(classes=10, width=width)
    data = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))
    sizes = f"width {width}, {batch} images of 3 x 32 x 32"
    return Workload("ResNet-18", sizes, model, data, nn.CrossEntropyLoss())


def segmenter(width: int = 8, side: int = 32, batch: int = 4) -> Workload:
    """The U-Net that ships."""
    torch.manual_seed(0)
    model = UNet(channels=3, classes=2, width=width)
    data = torch.randn(batch, 3, side, side), torch.randint(0, 2, (batch, side, side))
    sizes = f"width {width}, {batch} images of 3 x {side} x {side}"
    return Workload("U-Net", sizes, model, data, nn.CrossEntropyLoss())


WORKLOADS: dict[str, Callable[..., Workload]] = {
    "linear": linear,
    "transformer": transformer,
    "recommender": recommender,
    "tiny_bert": tiny_bert,
    "resnet18": residual_net,
    "unet": segmenter,
}


def bert_classifier(width: int = 128, layers: int = 2) -> nn.Module:
    """Maps tokens [N, T] below 1000 to logits [N, 2], without dropout's random numbers."""
    package = import_module("transformers")
    config = package.BertConfig(
        vocab_size=1000,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=4 * width,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return _Logits(package.BertForSequenceClassification(config).train())


class _Recommender(nn.Module):
    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.head = nn.Sequential(nn.Linear(tables * width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, ids: Tensor) -> Tensor:
        columns = zip(self.embeddings, ids.unbind(1), strict=True)
        logits: Tensor = self.head(torch.cat([table(column) for table, column in columns], 1))
        return logits


class _Logits(nn.Module):
    """A model of transformers, of whose output a loss takes the logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens).logits
        return logits


def _next_token(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
