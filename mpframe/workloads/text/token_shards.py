"""Text of any size for a language model, as a stream: files of token numbers.

A pass reads all files, in an order that depends only on (seed, pass), and the windows of a file
side by side. Workers and ranks take turns, window by window, and read no others.
"""

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset

from mpframe.core.errors import DataError
from mpframe.data.loading import shuffle_indices
from mpframe.data.task import Task, require_counts
from mpframe.workloads.text.language_model import (
    SideBySide,
    Stretches,
    map_tokens,
    require_options,
    token_task,
)

_VAL = "val.bin"


def token_shards(
    root: str = "data/tokens",
    context: int = 1024,
    vocab_size: int = 50257,
    token_bytes: int = 2,
    bytes_per_token: float = 1.0,
    batches_per_epoch: int = 1000,
    eval_windows: int | None = 1024,
) -> Task:
    """Return a stream of windows of `context` tokens and the tokens that follow each.

    A batch is (inputs, targets), both int64 [N, context]. See conf/dataset/token_shards.yaml.

    ConfigError: an option is out of its range. DataError: files are missing or too short.
    """
    require_options(context, vocab_size, token_bytes, eval_windows)
    require_counts(batches_per_epoch=batches_per_epoch)
    files = {path.name: path for path in sorted(Path(root).glob("*.bin"))}
    val = files.pop(_VAL, None)
    if val is None or not files:
        raise DataError(
            f"dataset.root={root}: has {len(files)} other *.bin files and "
            f"{'no' if val is None else 'a'} {_VAL}; put token numbers into {_VAL} and at least "
            "one other"
        )
    shards = [_stretch(path, token_bytes, context, vocab_size) for path in (val, *files.values())]
    parts = TokenShards(shards[1:]), SideBySide(shards[0], eval_windows)
    return token_task(*parts, bytes_per_token, batches_per_epoch=batches_per_epoch)


def _stretch(path: Path, token_bytes: int, context: int, vocab_size: int) -> Stretches:
    tokens = map_tokens(path, token_bytes)
    if len(tokens) <= context:
        raise DataError(
            f"{path}: {len(tokens)} tokens are too few for a window of {context}; use "
            f"dataset.context={max(1, len(tokens) - 1)} or fewer, or leave out the file"
        )
    return Stretches(tokens, np.zeros(1, np.int64), len(tokens), context, vocab_size)


class TokenShards(IterableDataset[Any]):
    """Windows of files, one after the other, each file as one stretch with at least one window."""

    def __init__(self, files: Sequence[Stretches]) -> None:
        self._files, self._order = files, list(range(len(files)))
        self._next, self._step = 0, 1  # windows of the pass

    def set_epoch(self, seed: int, epoch: int) -> None:
        """Draw the order of the files."""
        self._order = shuffle_indices(len(self._files), seed, epoch).tolist()

    def shard(self, num_shards: int, index: int) -> "TokenShards":
        """Return the share that has every `num_shards`-th window, from `index` on."""
        share = copy.copy(self)
        share._next, share._step = index, num_shards
        return share

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield windows, and the same one token later, both int64 [context]."""
        begin = 0
        for file in map(self._files.__getitem__, self._order):
            while self._next < begin + file.side_by_side:
                start = np.array([(self._next - begin) * file.context])
                self._next += self._step
                inputs, targets = file.batch(start)
                yield inputs[0], targets[0]
            begin += file.side_by_side

    def state_dict(self) -> dict[str, Any]:
        """Return which window is next."""
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with that window."""
        self._next = int(state["next"])
