"""Modules that keep something beside their weights."""

import torch
from torch import nn


class Rotary(nn.Module):
    """Fills a cache and remembers in a plain number how far; as rotary-embedding-torch does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(16, 4), persistent=False)
        self.filled = 0

    def forward(self, x):
        if self.filled < len(x):
            self.cache[: len(x)] = torch.arange(len(x) * 4.0).view(-1, 4).cos()
            self.filled = len(x)
        return x * self.cache[: len(x)]


class Growing(nn.Module):
    """Makes its table longer when it is needed; `persistent` says whether it is saved."""

    def __init__(self, persistent=True):
        super().__init__()
        self.register_buffer("table", torch.zeros(0, 4), persistent=persistent)

    def forward(self, x):
        if len(self.table) < len(x):
            self.table = torch.cat([self.table, x.detach()[len(self.table) :].float()])
        return x * (1 + self.table[: len(x)])


class Codebook(nn.Module):
    """A moving statistic of its inputs, and a plain count of its calls."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.calls, self.log = 0, []

    def forward(self, x):
        self.calls += 1
        self.log.append(float(self.calls))
        self.mean.lerp_(x.detach().float().mean(0), 1 / self.calls)
        return x * (1 + self.mean)


class Bank(nn.Module):
    """A memory bank that is not in the model's state_dict, with a plain pointer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros(8, 4), persistent=False)
        self.next = 0

    def forward(self, x):
        mixed = x * (1 + self.rows.mean(0))
        self.rows[self.next] = x.detach().float().mean(0)
        self.next = (self.next + 1) % len(self.rows)
        return mixed


class Graph(nn.Module):
    """Multiplies by a sparse matrix, and thins it out."""

    def __init__(self):
        super().__init__()
        self.register_buffer("edges", torch.eye(4).to_sparse())

    def forward(self, x):
        x = torch.sparse.mm(self.edges, x.float().T).T
        self.edges = self.edges * 0.5
        return x


class Late(nn.Module):
    """Has its buffer from the first call on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("first", None)

    def forward(self, x):
        if self.first is None:
            self.first = x.detach().float().mean(0)
        return x * (1 + self.first)


KINDS = {
    "rotary": Rotary,
    "growing": Growing,
    "growing, not saved": lambda: Growing(persistent=False),
    "codebook": Codebook,
    "bank": Bank,
    "sparse": Graph,
    "late": Late,
    "batch norm": lambda: nn.BatchNorm1d(4),
    "spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
}
