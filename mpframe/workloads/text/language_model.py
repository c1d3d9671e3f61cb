"""A language model: any text as the task of predicting each next token, and a GPT.

The text is cut into 100 stretches of one length. Every twentieth validates, every twentieth tests,
and no window crosses the border of a stretch, so that no token is both learned from and measured
on. Training windows begin anywhere in the other stretches, at places that depend only on (seed,
epoch, index). An epoch has as many windows as fit side by side. Validation and test windows lie
side by side. The model is a decoder-only transformer (GPT-2: Radford et al. 2019).
"""

import math
import sys
import sysconfig
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import Dataset

from mpframe.core.errors import ConfigError, DataError
from mpframe.core.ranges import POSITIVE, require
from mpframe.data.metrics import BitsPerByte, Perplexity
from mpframe.data.samples import BatchDataset, draw_uniforms
from mpframe.data.task import Task, require_choice, require_counts
from mpframe.files.plain_file import open_regular, read_regular
from mpframe.workloads.images import require_dropout, require_sizes

Tokens: TypeAlias = NDArray[np.unsignedinteger[Any]]

_MOST_BYTES = 2**30  # of a folder, where one file may have any size


def read_tokens(root: str | None, token_bytes: int) -> Tokens:
    """Return the tokens of a text, [T] uint8, uint16 or uint32, read-only.

    `root` is a file, which is mapped and not read, or a folder, whose *.txt files (but no links)
    are joined in the order of their paths, or None for the source of Python's library.
    """
    path = Path(sysconfig.get_path("stdlib") if root is None else root)
    if not path.is_dir():
        return map_tokens(path, token_bytes)
    files = list(path.rglob("*.txt" if root is not None else "*.py"))
    if root is None:  # without its tests and installed packages
        names = [file.relative_to(path).parts[0].removesuffix(".py") for file in files]
        known = sys.stdlib_module_names
        files = [file for file, name in zip(files, names, strict=True) if name in known]
    chosen = sorted(file for file in files if file.is_file() and not file.is_symlink())
    size = sum(file.stat().st_size for file in chosen)
    if not 0 < size <= _MOST_BYTES or token_bytes != 1:
        raise DataError(
            f"{path}: a folder needs *.txt files of at most {_MOST_BYTES} bytes in all and "
            f"dataset.token_bytes=1, and it has {len(chosen)} of {size} bytes; join them into one "
            "file, which is not read into memory"
        )
    pieces = [read_regular(file, _MOST_BYTES) for file in chosen]
    return np.frombuffer(b"\n".join(pieces), np.uint8)


def map_tokens(path: Path, token_bytes: int) -> Tokens:
    """Return the tokens of a file, which is mapped. ValueError: it holds no whole number."""
    with open_regular(path, "rb", follow=True) as file:
        return np.memmap(file, f"<u{token_bytes}", mode="r")


_STRETCHES, _ONE_IN, _VAL, _TEST = 100, 20, 9, 19

Numbers = NDArray[np.int64]


def next_token(
    root: str | None = None,
    context: int = 256,
    vocab_size: int = 256,
    token_bytes: int = 1,
    bytes_per_token: float = 1.0,
    eval_windows: int | None = 1024,
) -> Task:
    """Return windows of `context` tokens and the tokens that follow each.

    A batch is (inputs, targets), both int64 [N, context]. The metrics are bits per byte and
    perplexity. See conf/dataset/next_token.yaml.

    ConfigError: an option is out of its range. DataError: the text cannot be read or is too short.
    """
    require_options(context, vocab_size, token_bytes, eval_windows)
    tokens = read_tokens(root, token_bytes)
    length = len(tokens) // _STRETCHES
    if length <= context:
        raise DataError(
            f"dataset.root={root}: {len(tokens)} tokens are too few for windows of {context} in "
            f"each of {_STRETCHES} stretches; use dataset.context={max(1, length - 1)} or fewer"
        )
    turns = np.arange(_STRETCHES) % _ONE_IN
    train, val, test = (
        Stretches(tokens, np.flatnonzero(chosen) * length, length, context, vocab_size)
        for chosen in (~np.isin(turns, (_VAL, _TEST)), turns == _VAL, turns == _TEST)
    )
    parts = RandomWindows(train), SideBySide(val, eval_windows)
    return token_task(*parts, bytes_per_token, test=SideBySide(test, eval_windows))


def require_options(
    context: int, vocab_size: int, token_bytes: int, eval_windows: int | None
) -> None:
    """Check options that every dataset of tokens has."""
    require_counts(context=context, vocab_size=vocab_size)
    require_choice("token_bytes", token_bytes, (1, 2, 4))
    if eval_windows is not None:
        require_counts(eval_windows=eval_windows)


def token_task(train: Dataset[Any], val: Dataset[Any], bytes_per_token: float, **rest: Any) -> Task:
    """Return a task of windows of tokens and the tokens that follow each."""
    require("dataset.bytes_per_token", bytes_per_token, POSITIVE)
    bits = partial(BitsPerByte, bytes_per_token)
    metrics = {"bits_per_byte": bits, "perplexity": Perplexity}
    return Task(train, val, metric=metrics, loss=token_loss, **rest)


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats of logits [N, T, vocabulary] and tokens [N, T]."""
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


class Stretches(NamedTuple):
    """Stretches of `length` tokens, which start at `begins`."""

    tokens: Tokens
    begins: Numbers
    length: int
    context: int
    vocab_size: int

    @property
    def side_by_side(self) -> int:
        """Count the windows side by side in a stretch, each with a token after it."""
        return (self.length - 1) // self.context

    def batch(self, starts: Numbers) -> tuple[Tensor, Tensor]:
        """Return the windows [N, context] int64 from `starts`, and the same one token later."""
        window = self.tokens[starts[:, None] + np.arange(self.context + 1)]
        if window.max() >= self.vocab_size:
            row, place = np.argwhere(window >= self.vocab_size)[0]
            raise DataError(
                f"dataset.vocab_size={self.vocab_size}: token {starts[row] + place} of the text is "
                f"{window[row, place]}; set the size to that of the vocabulary it was written with"
            )
        both = torch.from_numpy(window.astype(np.int64))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


class RandomWindows(BatchDataset):
    """Windows that begin anywhere in the stretches, at new places in each epoch."""

    seed, epoch = 0, 0

    def __init__(self, stretches: Stretches) -> None:
        self.stretches = stretches

    def __len__(self) -> int:
        return len(self.stretches.begins) * self.stretches.side_by_side

    def set_epoch(self, seed: int, epoch: int) -> None:
        """Begin sample i at a place drawn by (seed, epoch, i)."""
        self.seed, self.epoch = seed, epoch

    def fetch_batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        cut = self.stretches
        places = cut.length - cut.context
        drawn = draw_uniforms(1, self.seed, self.epoch, indices)[:, 0]
        stretch, offset = np.divmod((drawn * (len(cut.begins) * places)).astype(np.int64), places)
        return cut.batch(cut.begins[stretch] + offset)


class SideBySide(BatchDataset):
    """At most `most` windows that do not overlap, evenly spaced."""

    def __init__(self, stretches: Stretches, most: int | None) -> None:
        self.stretches = stretches
        every = len(stretches.begins) * stretches.side_by_side
        count = every if most is None else min(most, every)
        self._chosen = np.arange(count) * every // count

    def __len__(self) -> int:
        return len(self._chosen)

    def fetch_batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        cut = self.stretches
        stretch, place = np.divmod(self._chosen[indices], cut.side_by_side)
        return cut.batch(cut.begins[stretch] + place * cut.context)


_STD = 0.02


class GPT(nn.Module):
    """A decoder-only transformer from tokens to logits, by default GPT-2 small.

    The logits at t depend on the tokens 0 to t. See conf/model/gpt.yaml.
    """

    def __init__(
        self,
        vocab_size: int,
        context: int,
        depth: int = 12,
        heads: int = 12,
        width: int = 768,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        require_sizes(vocab_size=vocab_size, context=context, depth=depth, heads=heads, width=width)
        require_dropout(dropout)
        if width % heads:
            raise ConfigError(f"model.width={width}: must be a multiple of model.heads={heads}")
        self.context = context
        self.token_embed = nn.Embedding(vocab_size, width)
        self.position_embed = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(_Block(width, heads, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.token_embed.weight
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                adds = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=_STD / math.sqrt(2 * depth) if adds else _STD)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [N, T, vocab_size] of the next tokens of int64 [N, T], T <= context."""
        length = tokens.shape[1]
        if length > self.context:
            raise DataError(
                f"model: {length} tokens, and model.context is {self.context}; give it "
                f"{self.context} or fewer"
            )
        positions = torch.arange(length, device=tokens.device)
        x = self.dropout(self.token_embed(tokens) + self.position_embed(positions))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = _Attention(width, heads, dropout)
        self.mlp = nn.Sequential()
        self.mlp.add_module("up", nn.Linear(width, 4 * width))
        self.mlp.add_module("gelu", nn.GELU(approximate="tanh"))
        self.mlp.add_module("down", nn.Linear(4 * width, width))
        self.mlp.add_module("dropout", nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        added: Tensor = x + self.mlp(self.norm2(x))
        return added


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.of_a_head = 3 * width // heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        # A head's rows of q, k and v are neighbours, so that ranks can divide the heads.
        # Not the method: torch 2.11's compiler breaks the graph at it.
        heads = torch.unflatten(self.qkv(x), -1, (-1, self.of_a_head)).transpose(1, 2)
        q, k, v = heads.chunk(3, dim=-1)  # each [N, heads, T, width / heads]
        rate = self.dropout.p if self.training else 0.0
        mixed = scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        out: Tensor = self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return out
