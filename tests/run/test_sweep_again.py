"""A sweep that is started again in its folder: what it skips, goes on with, and refuses."""

import atexit
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures import Patch, Shown
from in_process import assert_same_run, command, csv_rows
from omegaconf import DictConfig, OmegaConf
from processes import exit_code, forked
from torch import nn

from mpframe.config.command_line import prepare
from mpframe.config.sweep import holds_this_run
from mpframe.core.errors import ConfigError
from mpframe.tracking.summary import Summary
from mpframe.workloads.images import mlp

PLACE = "hydra.sweep.dir=out sweep"
OPTIONS = [
    "-m", "seed=1,2", PLACE, "model=mlp", "model.hidden=4",
    "trainer.max_steps=5", "trainer.epochs=1", "trainer.log_every=1", "trainer.checkpoint_every=3",
    "callbacks.progress_bar=null", "+callbacks.stop._target_=own_parts.Stop",
    "+callbacks.stop.seed=${seed}",
]  # fmt: skip
NAMES = ["seed=1", "seed=2"]


pytestmark = pytest.mark.usefixtures("whole", "here")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        assert command(*OPTIONS) == 0
    return folder / "out sweep"


def rows(folder: Path) -> list[dict[str, str]]:
    found = csv_rows(folder / "sweep.csv")
    return [{k: v for k, v in row.items() if k != "seconds"} for row in found]


def written(folder: Path) -> dict[str, int]:
    """When the files of a folder were written, in nanoseconds; locks aside."""
    files = (p for p in folder.rglob("*") if p.is_file() and p.name not in (".turn", ".lock"))
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in files}


def _sweep(folder: Path) -> None:
    os.environ["STOP"] = "SIGKILL"
    os.chdir(folder)
    sys.exit(command(*OPTIONS))


@pytest.mark.slow
def test_a_killed_sweep_goes_on_by_the_same_command_or_longer(whole: Path, tmp_path: Path) -> None:
    """In another order, too; the table has all jobs of the folder."""
    assert exit_code(forked(_sweep, tmp_path), within=300) == -9
    folder = tmp_path / "out sweep"
    # The table was written after the first job, when nothing of the second was there.
    assert [row["folder"] for row in rows(folder)] == NAMES[:1]
    first = written(folder / "seed=1")
    assert command(*OPTIONS, "seed=3,2,1") == 0
    assert written(folder / "seed=1") == first
    assert "at step 3" in (folder / "seed=2" / "train.log").read_text()
    assert {row["seed"]: row["status"] for row in rows(folder)} == dict.fromkeys("123", "finished")
    assert [row for row in rows(folder) if row["seed"] != "3"] == rows(whole)
    for name in NAMES:
        assert_same_run(whole / name, folder / name)


@pytest.mark.slow
def test_a_stopped_sweep_says_how_it_goes_on(
    whole: Path, tmp_path: Path, monkeypatch: Patch, capsys: Shown
) -> None:
    """A swept option in the folder's name does not scatter the jobs."""
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setenv("STOP", "SIGTERM")
    own = ["-m", "seed=1,2,3", *OPTIONS[3:]]
    typed = [*own, "hydra.sweep.dir=out ${seed}"]
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "train.py", *typed])
    shutil.copytree(whole / NAMES[0], tmp_path / "out 0" / NAMES[0])
    assert command(*typed) == 143
    said = capsys.readouterr().err.splitlines()[-1]
    start, _, again = said.partition("with: ")
    assert start == "mpframe: stopped by SIGTERM; continue the sweep "
    program, script, *words = shlex.split(again)
    assert [program, script] == [sys.executable, "train.py"]
    assert prepare(words) == prepare([*own, "hydra.sweep.dir=out 0"])
    for report in at_exit:
        report()
    assert "\n1 of 2 jobs finished; this table: " in capsys.readouterr().out
    assert [row["status"] for row in rows(tmp_path / "out 0")] == ["finished", "interrupted"]


def test_a_folder_with_other_options_is_refused(whole: Path, tmp_path: Path, capsys: Shown) -> None:
    shutil.copytree(whole, tmp_path / "out sweep")
    before = written(tmp_path)
    assert command(*OPTIONS, "model.hidden=5", "model.depth=1") == 1
    assert capsys.readouterr().err == (
        "mpframe: hydra.sweep.dir=out sweep: its seed=1 is a run with other options, "
        "model.depth=1 (was 2), model.hidden=5 (was 4); choose another folder, or add resume=auto "
        "to go on from its checkpoint\n"
    )
    assert written(tmp_path) == before


def test_options_that_only_watch_may_differ(whole: Path) -> None:
    """With another pace of validations the last one may be another."""
    job = whole / NAMES[0]
    for path in ("trainer.log_every", "trainer.eval_every", "callbacks.mine"):
        options = OmegaConf.load(job / "config_resolved.yaml")
        value = {"_target_": "x"} if path == "callbacks.mine" else 3
        OmegaConf.update(options, path, value, force_add=True)
        assert isinstance(options, DictConfig)
        assert not holds_this_run(job.parent, options, "none")
        if path == "trainer.log_every":
            assert holds_this_run(job, options, "none")
            continue
        assert not holds_this_run(job, options, "auto")
        with pytest.raises(ConfigError, match=f"its seed=1 is a run with other options, {path}"):
            holds_this_run(job, options, "none")


def net(scale: float, **options: Any) -> nn.Module:
    if scale == 2.0 and not Path("mended").exists():
        raise ValueError("not yet")
    return mlp(**options)


@pytest.mark.slow
def test_a_diverged_job_is_a_result_but_a_failed_one_reruns(tmp_path: Path, capsys: Shown) -> None:
    words = ["-m", "loss_scaling=static", "loss_scaling.scale=1e30,2.0", "model=mlp"]
    words += ["model.hidden=4", "model._target_=test_sweep_again.net"]
    words += ["+model.scale=${loss_scaling.scale}", "trainer.max_consecutive_skips=2"]
    words += ["callbacks.autopsy=null", "trainer.max_steps=4", "callbacks.progress_bar=null"]
    words += ["hydra.sweep.dir=out"]
    assert command(*words) == 1
    said = capsys.readouterr().err
    assert "mpframe: job 1: model: test_sweep_again.net refused its options: not yet" in said
    assert "Traceback" not in said
    assert [row["status"] for row in rows(tmp_path / "out")] == ["diverged", "failed"]
    folder = tmp_path / "out" / "loss_scaling.scale=1e+30"
    before, reason = written(folder), Summary.read(folder).reason
    (tmp_path / "mended").touch()
    assert command(*words) == 1
    assert capsys.readouterr().err == (
        f"mpframe: job 0: diverged when the sweep ran before, {reason}; to run it again delete "
        f"{folder}\n"
    )
    assert written(folder) == before
    assert [row["status"] for row in rows(tmp_path / "out")] == ["diverged", "finished"]
