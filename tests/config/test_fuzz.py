"""Files of a run's folder, changed at random: an error of ours or none, at once, and within it."""

import copy
import json
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from fixtures import time_limit
from hostile_checkpoints import seal
from in_process import differing, train

from mpframe import checkpoint
from mpframe.config.stored import config_of
from mpframe.core.errors import MpframeError
from mpframe.lab.report.records import find_runs
from mpframe.lab.report.tables import group_runs
from mpframe.run import resume
from mpframe.training.trainer import Trainer

EACH = pytest.mark.parametrize("cases", [4, pytest.param(1500, marks=pytest.mark.storm)])
VALUES = ["", ".", "../x", "/dev/zero", "\0", "\x1b[2J", "${a}", "nan", 2**70, -1, 0.5, 3, None]
VALUES += [True, float("nan"), [], {}, [1, "a"], {"a": 1}, {"": [None]}, [[["é"]]]]


@contextmanager
def ours_alone(run: Path) -> Iterator[None]:
    """The block ends in time, raises nothing but one line of ours, and writes only in `run`."""

    def beside() -> dict[Path, bytes]:
        files = (p for p in run.parent.rglob("*") if run not in p.parents and p.is_file())
        return {path: path.read_bytes() for path in files}

    before = beside()
    with time_limit(30):  # On a machine that is busy.
        try:
            yield
        except MpframeError as error:
            assert "\n" not in str(error)  # noqa: PT017 - none need be raised
    assert beside() == before


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trainer]:
    """A finished run in a folder of its own, and its trainer."""
    run = tmp_path_factory.mktemp("fuzz") / "run"
    with patch("mpframe.run.run.resume_from", side_effect=resume.resume_from) as called:
        train(run, "model=mlp", "model.hidden=4", "loss_scaling=LogMax", "trainer.max_steps=2",
              "trainer.ema_decay=0.9", "dtype=mixed", "trainer.log_every=1")  # fmt: skip
    (run.parent / "precious").write_text("beside the run")
    return run, called.call_args.args[0]


@pytest.fixture
def run(trained: tuple[Path, Trainer], tmp_path: Path) -> Path:
    shutil.copytree(trained[0].parent, tmp_path / "outer")
    return tmp_path / "outer" / "run"


def mutated(content: bytes, draw: random.Random) -> bytes:
    """Bytes flipped, cut out, doubled or put in, at a few random places."""
    changed = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        at, length = draw.randrange(len(changed) + 1), draw.choice([1, 2, 8, 100])
        piece = changed[at : at + length]
        put = draw.choice([b"", piece * 2, draw.randbytes(length)])
        changed[at : at + draw.choice([0, length])] = put
    return bytes(changed)


def with_one_replaced(tree: Any, draw: random.Random) -> Any:
    """A copy of nested values in which one, drawn anywhere, is another."""
    changed = copy.deepcopy(tree)
    place = changed
    while True:
        key = draw.choice(list(place) if isinstance(place, dict) else list(range(len(place))))
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or draw.random() < 0.2:
            place[key] = draw.choice(VALUES)
            return changed
        place = inner


def read_options(run: Path) -> None:
    path = checkpoint.newest(run) / "config.yaml"
    config_of(path.read_text(errors="replace"), path, [])


READERS = {
    "checkpoints/*/manifest.json": checkpoint.read,
    "checkpoints/*/state.pt": checkpoint.read,
    "checkpoints/*/config.yaml": read_options,
    "summary.json": lambda run: group_runs(find_runs([run])[1]),
    "events.out.*": lambda run: group_runs(find_runs([run])[1]),
}


@EACH
@pytest.mark.parametrize("file", READERS)
def test_a_file_that_was_changed_is_read_or_refused(file: str, cases: int, run: Path) -> None:
    (path,) = run.glob(file)
    whole = path.read_bytes()
    READERS[file](run)
    for draw in map(random.Random, range(cases)):
        changed = [mutated(whole, draw)]
        if path.suffix == ".json":
            changed.append(json.dumps(with_one_replaced(json.loads(whole), draw)).encode())
        for content in changed:
            path.write_bytes(content)
            if path.name == "state.pt":
                seal(path.parent)
            with ours_alone(run):
                READERS[file](run)


@EACH
def test_a_state_is_taken_whole_or_changes_nothing(
    cases: int, trained: tuple[Path, Trainer], run: Path
) -> None:
    trainer, newest = trained[1], checkpoint.newest(run)
    whole = checkpoint.read(newest)
    resume._apply(whole, ({}, {}), newest, trainer)
    for draw in map(random.Random, range(cases)):
        state = with_one_replaced(whole.state, draw)
        snapshot = checkpoint.Snapshot(2, state, whole.config, whole.facts)
        before = checkpoint.Snapshot(0, trainer.state_dict()).to_cpu().state
        taken = False
        with ours_alone(run):
            resume._apply(snapshot, ({}, {}), newest, trainer)
            taken = True
        if taken:  # Back to where it was, for the next case.
            resume._load(whole, trainer)
        else:
            assert differing(before, trainer.state_dict()) == []
