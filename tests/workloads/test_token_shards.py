"""Shards of tokens: the windows of all files, each once in a pass, on every share."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures import refused
from in_process import assert_same_run, cut, train

from mpframe.core.errors import ConfigError, DataError
from mpframe.data.streaming import StreamLoader
from mpframe.workloads.text.token_shards import token_shards


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three files of 13, 21 and 8 tokens, and the one that validates."""
    for name, begin, end in (("a", 0, 13), ("b", 13, 34), ("c", 34, 42), ("val", 50, 80)):
        np.arange(begin, end, dtype="<u2").tofile(tmp_path / f"{name}.bin")
    return tmp_path


WINDOWS = {*range(0, 12, 4), *range(13, 33, 4), 34}


@pytest.mark.parametrize("workers", [0, 2])
def test_every_window_is_read_once_in_a_pass(root: Path, workers: int) -> None:
    task = token_shards(str(root), 4, 80)
    loader = StreamLoader(task.train, 3, batches_per_epoch=3, workers=workers, seed=1)
    orders = []
    for epoch in range(3):
        pairs = list(loader.epoch(epoch))
        assert all((inputs + 1).equal(targets) for inputs, targets in pairs)
        orders.append([int(inputs[0]) for batch, _ in pairs for inputs in batch])
    assert len(WINDOWS) == 9
    assert len({*orders[0][:6]}) == 6  # of two shares, if there are two workers
    if not workers:  # With two, one share has five windows and begins again before the other.
        assert all(set(order) == WINDOWS for order in orders)
        assert len({*map(tuple, orders)}) > 1  # The order of the files.
    assert [int(task.val[n][0][0]) for n in range(len(task.val))] == list(range(50, 78, 4))
    loader.close()


def test_a_killed_run_comes_to_the_same(root: Path, tmp_path: Path) -> None:
    options = ["experiment=gpt", "+size=small", "dataset=token_shards", f"dataset.root={root}",
               "dataset.context=4", "dataset.vocab_size=80", "dataset.batches_per_epoch=2",
               "dataset.batch_size=2", "model.width=8", "model.depth=1", "trainer.max_steps=12",
               "trainer.eval_every=null", "trainer.checkpoint_every=1", "trainer.keep_last=9",
               "device=cpu"]  # fmt: skip
    train(tmp_path / "whole", *options)
    resumed = cut(tmp_path / "whole", tmp_path / "resumed", 3)
    train(resumed, *options, "resume=auto")
    assert_same_run(tmp_path / "whole", resumed)


@pytest.mark.parametrize(("options", "text"), [
    ({"token_bytes": 3}, "dataset.token_bytes=3: allowed are 1, 2 and 4"),
    ({"context": 8}, "c.bin: 8 tokens are too few for a window of 8; use dataset.context=7 or fewer"
     ", or leave out the file"),
    ({"token_bytes": 4}, "a.bin: 26 bytes are no row of tokens of 4 each"),
    ({"batches_per_epoch": 0}, "dataset.batches_per_epoch=0: must be a whole number >= 1"),
])  # fmt: skip
def test_what_cannot_be_read_is_refused(root: Path, options: dict[str, Any], text: str) -> None:
    given = {"context": 4, "vocab_size": 80} | options
    assert text in refused((ConfigError, DataError), token_shards, str(root), **given)


def test_a_folder_needs_both_parts(root: Path) -> None:
    (root / "val.bin").unlink()
    assert refused(DataError, token_shards, str(root), 4) == (
        f"dataset.root={root}: has 3 other *.bin files and no val.bin; put token numbers into "
        "val.bin and at least one other"
    )
