"""A run's folder: one run's only, untouched by a start that is refused, and no way out of it."""

import errno
import json
import os
import re
import shutil
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from in_process import train, trained
from omegaconf import OmegaConf

from mpframe import checkpoint
from mpframe.checkpoint.folder import Manifest
from mpframe.cli.restored import run_folder
from mpframe.core.errors import ConfigError, MpframeError
from mpframe.run.folder import RunFolder, unwritable_in_one_line
from mpframe.tracking.summary import Summary

OPTIONS = ["model=mlp", "model.hidden=8", "scheduler=none", "trainer.checkpoint_every=2"]
OPTIONS += ["trainer.keep_last=9"]
FAILS = ["resume=auto", "model._target_=own_parts.nothing"]

finished = trained(*OPTIONS, "trainer.max_steps=4", "seed=1")
other = trained(*OPTIONS, "trainer.max_steps=2", "seed=2")


@pytest.fixture
def done(finished: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(finished, tmp_path / "done"))
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "overrides.yaml").write_text("- seed=1\n")
    (folder / "train.log").write_text("what the run said\n")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def identities(folder: Path) -> list[str | None]:
    return [Manifest.read(path).facts["run"] for path in checkpoint.all_in(folder)]


def test_a_checkpoint_names_its_run_and_a_resumed_one_has_the_same(done: Path, other: Path) -> None:
    """Also one that goes on from an older one of its own."""
    shutil.copytree(done, older := done.parent / "older")
    train(done, *OPTIONS, "trainer.max_steps=6", "resume=auto", "seed=1")
    source = older / "checkpoints" / "step_00000002"
    assert train(older, *OPTIONS, f"resume={source}", "trainer.max_steps=3").steps == 3
    names = identities(done)
    assert names == [names[0]] * 3
    assert set(identities(older)) == {names[0]}
    assert re.fullmatch("[0-9a-f]{16}", names[0] or "")
    assert identities(other)[0] != names[0]
    assert json.loads((done / "summary.json").read_text())["steps"] == 6


REFUSED = {
    "another_run": ["resume=OTHER", "seed=2"],
    "another model": ["resume=auto", "model.hidden=99", "seed=4"],
    "resume none": ["seed=4"],
    "a class that fails": FAILS,
    "curves alone": FAILS,
    "checkpoints alone": FAILS,
    "skipped_steps alone": FAILS,
    "a look at the dtype_map": ["resume=auto", "trainer.max_steps=0"],  # Which is not refused.
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_start_leaves_every_byte(done: Path, other: Path, case: str) -> None:
    if case == "checkpoints alone":
        next(done.glob("events.out*")).unlink()
    elif case.endswith("alone"):
        shutil.rmtree(done / "checkpoints")
    if case.startswith("skipped"):
        replace(Summary.read(done), steps=0, skipped_steps=8).write(done)
    before = content(done)
    words = [word.replace("OTHER", str(other)) for word in REFUSED[case]]
    said = rf"^resume={other}: hydra\.run\.dir={done} holds the checkpoints of another run; ch"
    refused = pytest.raises(MpframeError, match=said if case == "another_run" else ".")
    with nullcontext() if "dtype_map" in case else refused:
        train(done, *OPTIONS, *words)
    assert content(done) == before


def test_a_run_in_a_folder_named_checkpoints_is_a_run(finished: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "checkpoints" / "mine"))
    assert run_folder(run) == run_folder(checkpoint.newest(run)) == run


def test_in_a_new_folder_a_failed_start_is_on_record(tmp_path: Path) -> None:
    for target in ("own_parts.nothing", "own_parts.nowhere"):  # The second replaces the first.
        with pytest.raises(MpframeError):
            train(tmp_path, *OPTIONS, f"model._target_={target}")
        summary = Summary.read(tmp_path)
        found = (summary.status, summary.samples, summary.train_seconds)
        assert found == ("failed", None, None)
        assert target in (summary.reason or "")


def test_an_error_of_the_disk_or_in_the_folder_is_one_line(tmp_path: Path) -> None:
    place = rf"^hydra\.run\.dir={tmp_path}"
    for number, named, told in ((errno.ENOSPC, None, "its files"), (errno.EIO, "file", "file")):
        error = OSError(number, os.strerror(number), named and str(tmp_path / named))
        said = rf"{place}: {told} cannot be written \(.*\); free space or choose"
        with pytest.raises(MpframeError, match=said), unwritable_in_one_line(tmp_path):
            raise error
    # Of a terminal or of the data.
    with pytest.raises(OSError, match="Input/output"), unwritable_in_one_line(tmp_path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("name", [".lock", "log2_amax.txt", "summary.json"])
def test_a_link_in_foreign_folders_harms_nothing(done: Path, tmp_path: Path, name: str) -> None:
    """A summary is written anew: the link goes, what it led to stays."""
    precious = tmp_path / "precious"
    precious.write_text("years of work")
    (done / name).unlink()
    (done / name).symlink_to(precious)
    said = pytest.raises(MpframeError, match="A link, which is not followed")
    with nullcontext() if name == "summary.json" else said:
        train(done, *OPTIONS, "resume=auto", "trainer.max_steps=5")
    assert precious.read_text() == "years of work"


@pytest.mark.parametrize("name", ["checkpoints", "numerics"])
def test_a_folder_that_leads_elsewhere_is_refused(done: Path, tmp_path: Path, name: str) -> None:
    shutil.rmtree(done / name, ignore_errors=True)
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / ".step_00000001.new").mkdir(parents=True)
    (done / name).symlink_to(elsewhere)
    with pytest.raises(ConfigError, match=rf"its {name} is a link, and a run writes through none"):
        train(done, *OPTIONS, "resume=auto")
    assert (elsewhere / ".step_00000001.new").is_dir()


def test_an_error_is_not_kept(tmp_path: Path) -> None:
    """Its frames hold the run: other ranks would wait, as its connections stay open."""
    error = MpframeError()
    with RunFolder(tmp_path, OmegaConf.create(), None, []) as folder:
        folder.log_traceback(error)
    died = weakref.ref(error)
    del error
    assert died() is None
