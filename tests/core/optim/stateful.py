"""Modules that keep something beside their weights, and buffers of many layouts."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """Fills a cache and remembers in a plain number how far; as rotary-embedding-torch does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(16, 4), persistent=False)
        self.filled = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.filled < len(x):
            self.cache[: len(x)] = torch.arange(len(x) * 4.0).view(-1, 4).cos()
            self.filled = len(x)
        return x * self.cache[: len(x)]


class Growing(nn.Module):
    """Makes its table longer when it is needed; `persistent` says whether it is saved."""

    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(0, 4), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.table) < len(x):
            self.table = torch.cat([self.table, x.detach()[len(self.table) :].float()])
        return x * (1 + self.table[: len(x)])


class Codebook(nn.Module):
    """A moving statistic of its inputs, and a plain count of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.calls = 0
        self.log: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.log.append(float(self.calls))
        self.mean.lerp_(x.detach().float().mean(0), 1 / self.calls)
        return x * (1 + self.mean)


class Bank(nn.Module):
    """A memory bank that is not in the model's state_dict, with a plain pointer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(8, 4), persistent=False)
        self.next = 0

    def forward(self, x: Tensor) -> Tensor:
        mixed = x * (1 + self.rows.mean(0))
        self.rows[self.next] = x.detach().float().mean(0)
        self.next = (self.next + 1) % len(self.rows)
        return mixed


class Graph(nn.Module):
    """Multiplies by a sparse matrix, and thins it out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.eye(4).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sparse.mm(self.edges, x.float().T).T
        self.edges = self.edges * 0.5
        return x


class Late(nn.Module):
    """Has its buffer from the first call on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.first is None:
            self.first = x.detach().float().mean(0)
        return x * (1 + self.first)


KINDS: dict[str, Callable[[], nn.Module]] = {
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


BUFFERS: dict[str, Callable[[], Tensor]] = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged
    ),
    "meta": lambda: torch.zeros(4, device="meta"),
    "expanded nan": lambda: torch.full((1,), torch.nan).expand(4),
    "nan": lambda: torch.full((4,), torch.nan),
    "complex": lambda: torch.ones(4, dtype=torch.complex64),
    "half": lambda: torch.ones(4, dtype=torch.float16),
}
