"""Checkpoints made to hang or to break their reader: each is "damaged" in one line, at once."""

import re
from pathlib import Path

import pytest
import torch
from hostile_checkpoints import CASES
from time_limit import time_limit

from mpframe import checkpoint
from mpframe.checkpoint import Snapshot
from mpframe.core.errors import CheckpointError

SECONDS = 10  # What is no attack takes hundredths of one.


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    state = {"trainer": {"weights": {"a": torch.ones(3)}}}
    checkpoint.save(tmp_path, Snapshot(8, state, "seed: 1\n", {}))
    return tmp_path


@pytest.mark.parametrize("case", CASES)
def test_a_crafted_checkpoint_is_damaged_at_once(whole: Path, case: str) -> None:
    change, said = CASES[case]
    change(checkpoint.newest(whole))
    with time_limit(SECONDS), pytest.raises(CheckpointError) as caught:
        checkpoint.read(whole)
    line = str(caught.value)
    assert re.search(said, line), line
    assert line.startswith(str(whole))
    assert "\n" not in line
