"""Any text as a language model's task: predict each next token of a window of it.

The text is cut into 100 stretches of one length. Every twentieth validates, every twentieth tests,
and no window crosses the border of a stretch, so that no token is both learned from and measured
on. Training windows begin anywhere in the other stretches, at places that depend on (seed, epoch,
index) alone; an epoch has as many windows as lie side by side. Validation and test read theirs side
by side, the same ones in every run.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from mpframe.data.datasets.text.token_files import DTYPES, Tokens, read_tokens
from mpframe.data.facts import require_whole
from mpframe.data.keyed_random import keyed_uniform
from mpframe.data.metrics.bits_per_byte import BitsPerByte
from mpframe.data.metrics.perplexity import Perplexity
from mpframe.data.task import Task
from mpframe.errors import ConfigError, DataError

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
    """Windows of `context` tokens and the tokens that follow each.

    A batch is (inputs, targets), both int64 [N, context]; the metrics are bits per byte and
    perplexity.

    Args:
        root: a text or token file, mapped into memory; a folder of *.txt files; None: the source
            of Python's library, which needs no download and is the same for one version of Python.
        context: tokens in a window, >= 1.
        vocab_size: different tokens; 256 if they are bytes.
        token_bytes: 1: tokens are the bytes of the text; 2: a file of 16-bit token numbers.
        bytes_per_token: of the text, for bits per byte; 1 if tokens are bytes.
        eval_windows: measure on at most so many windows of each held-out part, evenly spaced;
            None: all.

    Raises:
        ConfigError: an option is out of its range.
        DataError: the text cannot be read or is too short.
    """
    _require_options(context, vocab_size, token_bytes, bytes_per_token, eval_windows)
    tokens = read_tokens(root, token_bytes)
    length = len(tokens) // _STRETCHES
    if length <= context:
        raise DataError(
            f"dataset.root={root}: {len(tokens)} tokens are too few for windows of {context} in "
            f"each of {_STRETCHES} stretches; use dataset.context={max(1, length - 1)} or fewer"
        )
    turns = np.arange(_STRETCHES) % _ONE_IN
    train, val, test = (
        _Stretches(tokens, np.flatnonzero(own) * length, length, context, vocab_size)
        for own in (~np.isin(turns, (_VAL, _TEST)), turns == _VAL, turns == _TEST)
    )
    return Task(
        RandomWindows(train),
        SideBySide(val, eval_windows),
        loss=token_loss,
        metric={
            "bits_per_byte": partial(BitsPerByte, bytes_per_token),
            "perplexity": Perplexity,
        },
        test=SideBySide(test, eval_windows),
    )


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy per token, in nats.

    Args:
        outputs: logits [N, T, vocabulary].
        targets: tokens [N, T], int64.
    """
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


class _Stretches:
    """Stretches of a row of tokens, `length` from each of `begins` on."""

    def __init__(
        self, tokens: Tokens, begins: Numbers, length: int, context: int, vocab_size: int
    ) -> None:
        self.tokens, self.begins = tokens, begins
        self.length, self.context, self.vocab_size = length, context, vocab_size

    @property
    def side_by_side(self) -> int:
        """Windows of a stretch that do not overlap, each with a token after it."""
        return (self.length - 1) // self.context

    def batch(self, starts: Numbers) -> tuple[Tensor, Tensor]:
        """The windows that begin at `starts`, and the same one token later."""
        window = self.tokens[starts[:, None] + np.arange(self.context + 1)]
        self._require_known(starts, window)
        both = torch.from_numpy(window.astype(np.int64))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def _require_known(self, starts: Numbers, window: Tokens) -> None:
        if window.max() >= self.vocab_size:
            row, place = np.argwhere(window >= self.vocab_size)[0]
            raise DataError(
                f"dataset.vocab_size={self.vocab_size}: token {starts[row] + place} of the text is "
                f"{window[row, place]}; set the size to that of the vocabulary it was written with"
            )


class _Windows(Dataset[Any]):
    """Windows of stretches, fetched as whole batches."""

    def __init__(self, stretches: _Stretches) -> None:
        self.stretches = stretches

    def __len__(self) -> int:
        return len(self.stretches.begins) * self.stretches.side_by_side

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.fetch_batch([index])
        return inputs[0], targets[0]

    def fetch_batch(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of the samples `indices`, both int64 [N, context]."""
        return self.stretches.batch(self.starts(np.asarray(indices)))

    def starts(self, indices: Numbers) -> Numbers:
        """Where in the text the samples begin."""
        raise NotImplementedError


class RandomWindows(_Windows):
    """Windows that begin anywhere in the stretches, elsewhere in each epoch."""

    seed, epoch = 0, 0

    def set_epoch(self, seed: int, epoch: int) -> None:
        """From now on sample i begins where (seed, epoch, i) says."""
        self.seed, self.epoch = seed, epoch

    def starts(self, indices: Numbers) -> Numbers:
        own = self.stretches
        places = own.length - own.context
        drawn = keyed_uniform(1, self.seed, self.epoch, indices)[:, 0]
        stretch, offset = np.divmod((drawn * (len(own.begins) * places)).astype(np.int64), places)
        begins: Numbers = own.begins[stretch] + offset
        return begins


class SideBySide(_Windows):
    """Windows that do not overlap, or `most` of them, evenly spaced."""

    def __init__(self, stretches: _Stretches, most: int | None) -> None:
        super().__init__(stretches)
        every = super().__len__()
        self._chosen = np.arange(every)
        if most is not None and most < every:
            self._chosen = np.arange(most) * every // most

    def __len__(self) -> int:
        return len(self._chosen)

    def starts(self, indices: Numbers) -> Numbers:
        own = self.stretches
        stretch, place = np.divmod(self._chosen[indices], own.side_by_side)
        begins: Numbers = own.begins[stretch] + place * own.context
        return begins


def _require_options(
    context: int,
    vocab_size: int,
    token_bytes: int,
    bytes_per_token: float,
    eval_windows: int | None,
) -> None:
    require_whole("dataset.context", context, least=1)
    require_whole("dataset.vocab_size", vocab_size, least=1)
    if token_bytes not in DTYPES:
        raise ConfigError(f"dataset.token_bytes={token_bytes}: allowed are 1 and 2")
    if not 0.0 < bytes_per_token < float("inf"):
        raise ConfigError(f"dataset.bytes_per_token={bytes_per_token}: must be finite and > 0")
    if eval_windows is not None:
        require_whole("dataset.eval_windows", eval_windows, least=1)
