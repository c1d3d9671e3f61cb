"""Files of a run's folder, changed at random: an error of ours or none, at once, and within it."""

import copy
import io
import json
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from fixtures import time_limit
from hostile_checkpoints import seal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from in_process import differing, train
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary as Values
from tensorboard.summary.writer.record_writer import RecordWriter

from mpframe import checkpoint
from mpframe.checkpoint.folder import content_digest
from mpframe.config.stored import config_of
from mpframe.core.errors import MpframeError
from mpframe.lab.report.page import as_page
from mpframe.lab.report.records import find_runs
from mpframe.lab.report.tables import group_runs
from mpframe.run import resume
from mpframe.tracking.summary import Summary
from mpframe.training.trainer import Trainer

EACH = pytest.mark.parametrize("cases", [4, pytest.param(1500, marks=pytest.mark.storm)])
LEAVES = ["", ".", "../x", "/dev/zero", "\0", "\x1b[2J", "${a}", "nan", 2**70, -1]
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
trees = st.recursive(
    leaves | st.sampled_from(LEAVES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
seeds = st.integers(0, 2**32 - 1)


def fuzzed(cases: int, one: Callable[..., None], *given_by: st.SearchStrategy[Any]) -> None:
    """Run `one` on so many drawn cases, the same ones every time."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    same: Any = {"deadline": None, "derandomize": True, "database": None}
    settings(max_examples=cases, suppress_health_check=slow, **same)(given(*given_by)(one))()


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
    run, into = tmp_path_factory.mktemp("fuzz") / "run", resume.Resume.into
    with patch.object(resume.Resume, "into", autospec=True, side_effect=into) as called:
        train(run, "model=mlp", "model.hidden=4", "loss_scaling=LogMax", "trainer.max_steps=2",
              "trainer.ema_decay=0.9", "dtype=mixed", "trainer.log_every=1")  # fmt: skip
    (run.parent / "precious").write_text("beside the run")
    return run, called.call_args.args[1]


@pytest.fixture
def run(trained: tuple[Path, Trainer], tmp_path: Path) -> Path:
    shutil.copytree(trained[0].parent, tmp_path / "outer")
    return tmp_path / "outer" / "run"


def mutated(content: bytes, seed: int) -> bytes:
    """Bytes flipped, cut out, doubled or put in, at a few random places."""
    draw, changed = random.Random(seed), bytearray(content)
    for _ in range(draw.randint(1, 4)):
        at, length = draw.randrange(len(changed) + 1), draw.choice([1, 2, 8, 100])
        piece = changed[at : at + length]
        end, put = draw.choice([
            (at + length, draw.randbytes(len(piece))), (at + length, b""), (at, piece * 2),
            (at, draw.randbytes(length)),
        ])  # fmt: skip
        changed[at:end] = put
    return bytes(changed)


def with_one_replaced(tree: Any, value: Any, seed: int) -> Any:
    """A copy of nested values in which one, drawn anywhere, is another."""
    draw, changed = random.Random(seed), copy.deepcopy(tree)
    place = changed
    while True:
        key = draw.choice(list(place) if isinstance(place, dict) else list(range(len(place))))
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or draw.random() < 0.2:
            place[key] = value
            return changed
        place = inner


@EACH
def test_manifests(cases: int, run: Path) -> None:
    manifest = checkpoint.newest(run) / "manifest.json"
    whole = json.loads(manifest.read_text())
    assert checkpoint.read(run).global_step == 2

    def one(value: Any, seed: int) -> None:
        sealed = with_one_replaced(whole, value, seed)
        if seed % 2 and "content" in sealed:
            sealed["sha256"] = content_digest(sealed.get("format"), sealed["content"])
        text = json.dumps(sealed).encode()
        for content in (text, mutated(text, seed)):
            manifest.write_bytes(content)
            with ours_alone(run):
                checkpoint.read(run)

    fuzzed(cases, one, trees, seeds)


@EACH
def test_state_files(cases: int, run: Path) -> None:
    path = checkpoint.newest(run) / "state.pt"
    whole = path.read_bytes()
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}

    def one(seed: int) -> None:
        with zipfile.ZipFile(path, "w") as archive:  # In order, with a pickle that is not.
            for name, content in entries.items():
                archive.writestr(name, mutated(content, seed) if "data.pkl" in name else content)
        if seed % 2:
            path.write_bytes(mutated(whole, seed))
        seal(path.parent)
        with ours_alone(run):
            checkpoint.read(run)

    fuzzed(cases, one, seeds)


@EACH
def test_states(cases: int, trained: tuple[Path, Trainer], run: Path) -> None:
    """A state that loads and is another than it should be changes nothing, or is taken whole."""
    trainer, newest = trained[1], checkpoint.newest(run)
    whole = checkpoint.read(newest)
    resume._apply(whole, ({}, {}), newest, trainer)

    def one(value: Any, seed: int) -> None:
        state = with_one_replaced(whole.state, value, seed)
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

    fuzzed(cases, one, trees, seeds)


@EACH
def test_stored_options(cases: int, run: Path) -> None:
    path = checkpoint.newest(run) / "config.yaml"
    whole = path.read_text()
    assert config_of(whole, path, []).run.seed == 0

    def one(text: str, seed: int) -> None:
        changed = mutated(whole.encode(), seed).decode(errors="replace")
        for config in (changed, text, f"{whole}{text}", f"{text}: {whole}"):
            with ours_alone(run):
                config_of(config, path, [])

    fuzzed(cases, one, st.text("ab: &*-[]{}'\"|>!\n\t\0#%é1e.", max_size=30), seeds)


def reported(run: Path, drawn: bool) -> None:
    """A report on the run; to draw its curves takes longer than all else."""
    with ours_alone(run):
        _, runs = find_runs([run])
        groups = group_runs(runs)
        if drawn:
            assert "\x1b" not in as_page("t", groups, runs)


@EACH
def test_summaries(cases: int, run: Path) -> None:
    whole = json.loads((run / "summary.json").read_text())
    assert Summary.read(run).status == "finished"

    def one(value: Any, seed: int) -> None:
        changed = json.dumps(with_one_replaced(whole, value, seed)).encode()
        for content in (changed, mutated(changed, seed)):
            (run / "summary.json").write_bytes(content)
            with ours_alone(run):
                Summary.read(run)
            reported(run, drawn=seed % 16 == 0)

    fuzzed(cases, one, trees, seeds)


@EACH
def test_event_files(cases: int, run: Path) -> None:
    (path,) = run.glob("events.out.*")
    whole = path.read_bytes()

    def one(tag: str, step: int, value: float, seed: int) -> None:
        records = RecordWriter(file := io.BytesIO())
        values = Values(value=[Values.Value(tag=tag, simple_value=value)])
        records.write(Event(step=step, summary=values).SerializeToString())
        records.write(random.Random(seed).randbytes(seed % 50))  # With a checksum that is right.
        for content in (mutated(whole, seed), whole + file.getvalue(), file.getvalue()):
            path.write_bytes(content)
            reported(run, drawn=seed % 16 == 0)

    steps = st.integers(-(2**63), 2**63 - 1)
    fuzzed(cases, one, st.text(max_size=8), steps, st.floats(width=32), seeds)
