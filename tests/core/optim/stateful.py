"""Modules that keep something beside their weights."""

import torch
from torch import nn


class Keeping(nn.Module):
    """Keeps a buffer, which is saved or not, and plain attributes."""

    def __init__(self, buffer=None, persistent=True, **plain):
        super().__init__()
        self.register_buffer("kept", buffer, persistent)
        vars(self).update(plain)


class Rotary(Keeping):
    """Fills a cache and remembers in a plain number how far; as rotary-embedding-torch does."""

    def forward(self, x):
        if self.filled < len(x):
            self.kept[: len(x)] = torch.arange(len(x) * 4.0).view(-1, 4).cos()
            self.filled = len(x)
        return x * self.kept[: len(x)]


class Growing(Keeping):
    """Makes its table longer when it is needed."""

    def forward(self, x):
        if len(self.kept) < len(x):
            self.kept = torch.cat([self.kept, x.detach()[len(self.kept) :].float()])
        return x * (1 + self.kept[: len(x)])


class Codebook(Keeping):
    """A moving statistic of its inputs, and a plain count of its calls."""

    def forward(self, x):
        self.calls += 1
        self.log.append(float(self.calls))
        self.kept.lerp_(x.detach().float().mean(0), 1 / self.calls)
        return x * (1 + self.kept)


class Bank(Keeping):
    """A memory bank that is not in the model's state_dict, with a plain pointer."""

    def forward(self, x):
        mixed = x * (1 + self.kept.mean(0))
        self.kept[self.next] = x.detach().float().mean(0)
        self.next = (self.next + 1) % len(self.kept)
        return mixed


class Graph(Keeping):
    """Multiplies by a sparse matrix, and thins it out."""

    def forward(self, x):
        x = torch.sparse.mm(self.kept, x.float().T).T
        self.kept = self.kept * 0.5
        return x


class Late(Keeping):
    """Has its buffer from the first call on."""

    def forward(self, x):
        if self.kept is None:
            self.kept = x.detach().float().mean(0)
        return x * (1 + self.kept)


KINDS = {
    "rotary": lambda: Rotary(torch.zeros(16, 4), persistent=False, filled=0),
    "growing": lambda: Growing(torch.zeros(0, 4)),
    "growing, not saved": lambda: Growing(torch.zeros(0, 4), persistent=False),
    "codebook": lambda: Codebook(torch.zeros(4), calls=0, log=[]),
    "bank": lambda: Bank(torch.zeros(8, 4), persistent=False, next=0),
    "sparse": lambda: Graph(torch.eye(4).to_sparse()),
    "late": Late,
    "batch norm": lambda: nn.BatchNorm1d(4),
    "spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
}
