"""A feed-forward network with entity embeddings (Guo and Berkhahn 2016, and fastai's recipe).

A categorical column of n categories, including the unknown one, has vectors of min(600,
round(1.6 n^0.56)) numbers. With the continuous columns, which pass a batch norm, they go through
blocks of linear layer, ReLU, batch norm and dropout. The objective learns the logarithm of a
positive number, such as a count or a price.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpframe.core.casts import outside_casts
from mpframe.core.objective import StepOutput
from mpframe.core.ranges import POSITIVE, Range, require
from mpframe.core.tree import to_fp32
from mpframe.core.user_code import user_code
from mpframe.data.metrics import require_same_shape
from mpframe.workloads.images import hidden_layer, require_dropout, require_sizes


class Tabular(nn.Module):
    """One output for the categories and the values of a row.

    `categories` are counted without the unknown one of each column. See conf/model/tabular.yaml.
    """

    def __init__(
        self,
        categories: Mapping[str, int],
        continuous: Sequence[str],
        hidden: Sequence[int] = (200, 100),
        dropout: float = 0.0,
        embedding_dropout: float = 0.04,
    ) -> None:
        super().__init__()
        require_sizes(**{f"categories.{name}": count for name, count in categories.items()})
        require_sizes(**{f"hidden.{place}": width for place, width in enumerate(hidden)})
        require_dropout(dropout)
        require_dropout(embedding_dropout, "embedding_dropout")
        rows = [count + 1 for count in categories.values()]  # with the unknown one
        tables = [(count, min(600, round(1.6 * math.pow(count, 0.56)))) for count in rows]
        self.embeddings = nn.ModuleList(nn.Embedding(*sizes) for sizes in tables)
        self.embedding_dropout = nn.Dropout(embedding_dropout)
        self.values_norm = nn.BatchNorm1d(len(continuous)) if continuous else None
        self.blocks = nn.Sequential()
        wide = sum(width for _, width in tables) + len(continuous)
        for number, width in enumerate(hidden, start=1):
            self.blocks.add_module(f"block{number}", hidden_layer(wide, width, dropout, norm=True))
            wide = width
        self.head = nn.Linear(wide, 1)
        for embedding in self.embeddings:
            assert isinstance(embedding, nn.Embedding)
            nn.init.trunc_normal_(embedding.weight, std=0.01)

    def forward(self, categorical: Tensor, continuous: Tensor) -> Tensor:
        """Return [N, 1] of categories [N, columns] int64 (0: unknown) and values [N, columns]."""
        parts = [embed(categorical[:, column]) for column, embed in enumerate(self.embeddings)]
        if parts:
            parts = [self.embedding_dropout(torch.cat(parts, dim=1))]
        if self.values_norm is not None:
            parts.append(self.values_norm(continuous))
        outputs: Tensor = self.head(self.blocks(torch.cat(parts, dim=1)))
        return outputs


class LogRegression:
    """The objective of a logarithm, for dicts of `target` and the arguments of the model.

    `mean` and `std` > 0 belong to the natural logarithm of the training targets.
    """

    def __init__(self, mean: float, std: float) -> None:
        self.mean = require("objective.mean", mean, Range())
        self.std = require("objective.std", std, POSITIVE)

    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        """Return the loss, and ŷ and y for metrics, both [N] and in the target's unit.

        The model is called with the batch without `target` ([N], > 0) and returns [N] or [N, 1].
        """
        inputs = dict(batch)
        targets = inputs.pop("target")
        with user_code("model:", model, batch=batch):
            outputs = model(**inputs)
        with outside_casts():
            targets = to_fp32(targets)
            logs = to_fp32(outputs).flatten()
            require_same_shape("objective: log_regression", logs, targets)
            loss = nn.functional.mse_loss(logs, (targets.log() - self.mean) / self.std)
            return StepOutput(loss, (self.mean + self.std * logs).exp(), targets)
