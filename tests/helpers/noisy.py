"""A model that needs all that a checkpoint carries: each random generator, and a memory bank."""

import random

import numpy as np
import torch
from torch import Tensor, nn


class NoisyNet(nn.Module):
    """Two layers, batch statistics, dropout, and noise from torch's, numpy's and python's own.

    What it saw lately is in a buffer that is not persistent, and its place there in a plain number.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(64, width), nn.BatchNorm1d(width)
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(width, 10)
        self.register_buffer("bank", torch.zeros(3, width), persistent=False)
        self.next = 0

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(images.flatten(1))))
        if self.training:
            hidden = hidden * (1 + 0.1 * random.random()) + 0.1 * float(np.random.normal())
            self.bank[self.next] = hidden.detach().float().mean(0)
            self.next = (self.next + 1) % 3
            hidden = hidden + 0.1 * self.bank[self.next]
        return self.last(self.drop(hidden))


class Remembering(nn.Module):
    """One layer, of the image beside the mean of all that it saw in training.

    The means are in a buffer that grows, their sum in one that is not persistent.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(128, 10)
        self.register_buffer("means", torch.zeros(0, 64))
        self.register_buffer("sum", torch.zeros(64), persistent=False)
        self.count = 0

    def forward(self, images: Tensor) -> Tensor:
        images = images.flatten(1)
        if self.training:
            self.means = torch.cat([self.means, images.detach().float().mean(0, keepdim=True)])
            self.sum += self.means[-1] * len(self.means)
            self.count += 1
        memory = self.sum / (self.count + 1) + self.means.sum(0)
        return self.last(torch.cat([images, memory.expand_as(images)], dim=1))
