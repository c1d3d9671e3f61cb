"""A model that draws from every random generator a checkpoint carries."""

import random

import numpy as np
import torch
from torch import Tensor, nn


class NoisyNet(nn.Module):
    """Two layers, batch statistics, dropout, and noise from torch's, numpy's and python's own."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [N, 10] of images [N, 1, 8, 8]."""
        hidden = torch.relu(self.norm(self.first(images.flatten(1))))
        if self.training:
            hidden = hidden * (1 + 0.1 * random.random()) + 0.1 * float(np.random.normal())
        return self.last(self.drop(hidden))
