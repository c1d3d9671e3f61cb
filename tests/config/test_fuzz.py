"""Files of a run's folder, changed at random: an error of ours or none, at once, and within it.

The short fuzz runs with all other tests and takes the same cases every time; `pytest -m storm` runs
the long one.
"""

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

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from in_process import train
from sameness import differing
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary as Values
from tensorboard.summary.writer.record_writer import RecordWriter
from time_limit import time_limit

from mpframe import checkpoint
from mpframe.checkpoint.folder import Manifest, content_digest, sha256_of
from mpframe.config.stored import config_of
from mpframe.core.errors import MpframeError
from mpframe.lab.report.page import as_markdown, as_page
from mpframe.lab.report.records import find_runs
from mpframe.lab.report.tables import group_runs
from mpframe.run import resume
from mpframe.tracking.summary import Summary
from mpframe.training.trainer import Trainer

SHORT, LONG = 4, 1500  # Cases of each of the fuzzes.
SECONDS = 30  # For one case, on a machine that is busy.
EACH = pytest.mark.parametrize("cases", [SHORT, pytest.param(LONG, marks=pytest.mark.storm)])

leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["", ".", "../x", "/dev/zero", "\0", "\x1b[2J", "${a}", "nan", 2**70, -1])
)  # fmt: skip
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
seeds = st.integers(0, 2**32 - 1)


def fuzzed(cases: int, one: Callable[..., None], *given_by: st.SearchStrategy[Any]) -> None:
    """Run `one` on so many drawn cases."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    many = settings(
        max_examples=cases, deadline=None, derandomize=True, database=None,
        suppress_health_check=checks,
    )  # fmt: skip
    many(given(*given_by)(one))()


@contextmanager
def ours_alone(outer: Path, run: Path) -> Iterator[None]:
    """The block ends in time, raises nothing but one line of ours, and writes only in `run`."""

    def beside() -> list[tuple[str, bytes]]:
        files = (p for p in sorted(outer.rglob("*")) if run not in p.parents and p.is_file())
        return [(str(path), path.read_bytes()) for path in files]

    before = beside()
    with time_limit(SECONDS):
        try:
            yield
        except MpframeError as error:
            assert "\n" not in str(error)  # noqa: PT017 - none need be raised
    assert beside() == before


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trainer]:
    """A finished run in a folder of its own, and its trainer."""
    kept: list[Trainer] = []
    into = resume.Resume.into

    def keep(resume: resume.Resume, trainer: Trainer, renew: resume.Renew) -> str:
        kept.append(trainer)
        return into(resume, trainer, renew)

    run = tmp_path_factory.mktemp("fuzz") / "run"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(resume.Resume, "into", keep)
        train(run, "model=mlp", "model.hidden=4", "loss_scaling=LogMax", "trainer.max_steps=2",
              "trainer.ema_decay=0.9", "dtype=mixed", "trainer.log_every=1")  # fmt: skip
    (run.parent / "precious").write_text("beside the run")
    return run, kept[0]


@pytest.fixture
def run(trained: tuple[Path, Trainer], tmp_path: Path) -> Path:
    shutil.copytree(trained[0].parent, tmp_path / "outer")
    return tmp_path / "outer" / "run"


def resealed(folder: Path, facts: Any = None) -> None:
    """A manifest that fits what is there now: what somebody who means harm would do."""
    names = ("state.pt", "config.yaml")
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": sha256_of(folder / name)}
        for name in names
    }
    (folder / "manifest.json").write_text(Manifest(files, facts or {}).text())


def mutated(content: bytes, seed: int) -> bytes:
    """Bytes flipped, cut out, doubled or put in, at a few random places."""
    draw, changed = random.Random(seed), bytearray(content)
    for _ in range(draw.randint(1, 4)):
        at, length = draw.randrange(len(changed) + 1), draw.choice([1, 2, 8, 100])
        piece = changed[at : at + length]
        kind = draw.randrange(4)
        if kind == 0:
            changed[at : at + length] = draw.randbytes(len(piece))
        elif kind == 1:
            del changed[at : at + length]
        elif kind == 2:
            changed[at:at] = piece * 2
        else:
            changed[at:at] = draw.randbytes(length)
    return bytes(changed)


def with_one_replaced(tree: Any, value: Any, seed: int) -> Any:
    """A copy of nested values in which one, drawn anywhere, is another."""
    draw, changed = random.Random(seed), copy.deepcopy(tree)
    place = changed
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = draw.choice(keys)
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or draw.random() < 0.2:
            place[key] = value
            return changed
        place = inner


@EACH
def test_manifests(cases: int, run: Path) -> None:
    newest = checkpoint.newest(run)
    whole = json.loads((newest / "manifest.json").read_text())

    def one(value: Any, seed: int) -> None:
        sealed = with_one_replaced(whole, value, seed)
        if seed % 2 and "content" in sealed:
            sealed["sha256"] = content_digest(sealed.get("format"), sealed["content"])
        (newest / "manifest.json").write_text(json.dumps(sealed))
        with ours_alone(run.parent, run):
            checkpoint.read(run)
        (newest / "manifest.json").write_bytes(mutated(json.dumps(sealed).encode(), seed))
        with ours_alone(run.parent, run):
            checkpoint.read(run)

    fuzzed(cases, one, trees, seeds)


@EACH
def test_state_files(cases: int, run: Path) -> None:
    newest = checkpoint.newest(run)
    whole = (newest / "state.pt").read_bytes()
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    name = next(name for name in entries if name.endswith("data.pkl"))

    def one(seed: int) -> None:
        if seed % 2:
            (newest / "state.pt").write_bytes(mutated(whole, seed))
        else:  # An archive in order, with a pickle that is not.
            with zipfile.ZipFile(newest / "state.pt", "w") as archive:
                for entry, content in entries.items():
                    archive.writestr(entry, mutated(content, seed) if entry == name else content)
        resealed(newest)
        with ours_alone(run.parent, run):
            checkpoint.read(run)

    fuzzed(cases, one, seeds)


@EACH
def test_states(cases: int, trained: tuple[Path, Trainer], run: Path) -> None:
    """A state that loads and is another than it should be changes nothing, or is taken whole."""
    trainer, newest = trained[1], checkpoint.newest(run)
    whole = checkpoint.read(newest)

    def one(value: Any, seed: int) -> None:
        state = with_one_replaced(whole.state, value, seed)
        snapshot = checkpoint.Snapshot(2, state, whole.config, whole.facts)
        before = checkpoint.Snapshot(0, trainer.state_dict()).to_cpu().state
        taken = False
        with ours_alone(run.parent, run):
            resume._apply(snapshot, ({}, {}), newest, trainer)
            taken = True
        if taken:  # Back to where it was, for the next case.
            resume._load(whole, trainer)
        else:
            assert differing(before, trainer.state_dict()) == []

    fuzzed(cases, one, trees, seeds)


@EACH
def test_stored_options(cases: int, run: Path) -> None:
    newest = checkpoint.newest(run)
    whole = (newest / "config.yaml").read_text()

    def one(text: str, seed: int) -> None:
        changed = mutated(whole.encode(), seed).decode(errors="replace")
        for config in (changed, text, f"{whole}{text}", f"{text}: {whole}"):
            with ours_alone(run.parent, run):
                config_of(config, newest / "config.yaml", [])

    fuzzed(cases, one, st.text("ab: &*-[]{}'\"|>!\n\t\0#%é1e.", max_size=30), seeds)


@EACH
def test_summaries(cases: int, run: Path) -> None:
    whole = json.loads((run / "summary.json").read_text())

    def one(value: Any, seed: int) -> None:
        changed = json.dumps(with_one_replaced(whole, value, seed))
        for content in (changed.encode(), mutated(changed.encode(), seed)):
            (run / "summary.json").write_bytes(content)
            with ours_alone(run.parent, run):
                Summary.read(run)
            with ours_alone(run.parent, run):
                reported(run, drawn=seed % 16 == 0)

    fuzzed(cases, one, trees, seeds)


@EACH
def test_event_files(cases: int, run: Path) -> None:
    (path,) = run.glob("events.out.*")
    whole = path.read_bytes()

    def one(tag: str, numbers: tuple[int, float], seed: int) -> None:
        step, value = numbers
        file = io.BytesIO()
        records = RecordWriter(file)
        values = Values(value=[Values.Value(tag=tag, simple_value=value)])
        records.write(Event(step=step, summary=values).SerializeToString())
        records.write(random.Random(seed).randbytes(seed % 50))  # With a checksum that is right.
        for content in (mutated(whole, seed), whole + file.getvalue(), file.getvalue()):
            path.write_bytes(content)
            with ours_alone(run.parent, run):
                reported(run, drawn=seed % 16 == 0)

    steps = st.tuples(st.integers(-(2**63), 2**63 - 1), st.floats(width=32))
    fuzzed(cases, one, st.text(max_size=8), steps, seeds)


def reported(run: Path, drawn: bool) -> None:
    """A report on the run; to draw its curves takes longer than all else."""
    _, runs = find_runs([run])
    groups = group_runs(runs)
    assert "\x1b" not in as_markdown("t", groups, runs)
    if drawn:
        assert "\x1b" not in as_page("t", groups, runs)


def test_the_control_is_read(run: Path, trained: tuple[Path, Trainer]) -> None:
    """What is changed above is whole before."""
    assert checkpoint.read(run).global_step == 2
    assert Summary.read(run).status == "finished"
    newest = checkpoint.newest(run)
    assert config_of((newest / "config.yaml").read_text(), newest, []).run.seed == 0
    resume._apply(checkpoint.read(run), ({}, {}), newest, trained[1])
    assert torch.get_rng_state().numel() > 0
