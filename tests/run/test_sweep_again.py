"""A sweep that is started again in its folder: what it skips, goes on with, and refuses."""

import csv
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from checkout import HELPERS, ROOT
from fork_server import CONTEXT
from omegaconf import OmegaConf
from programs import command
from sameness import assert_same_run

from mpframe.cli.commands import train
from mpframe.config.command_line import prepare
from mpframe.config.sweep import holds_this_run
from mpframe.core.errors import ConfigError
from mpframe.tracking.summary import Summary

PLACE = "hydra.sweep.dir=out sweep"
OPTIONS = [
    "-m", "seed=1,2,3", PLACE, "model=mlp", "model.hidden=4",
    "trainer.max_steps=8", "trainer.epochs=1", "trainer.log_every=1", "trainer.checkpoint_every=3",
    "callbacks.progress_bar=null", "+callbacks.stop._target_=stopping.Stop",
    "+callbacks.stop.seed=${seed}",
]  # fmt: skip
NAMES = ["seed=1", "seed=2", "seed=3"]

Sweep = Callable[..., int]


def run(*words: str) -> int:
    """The exit code of the training command, in this process and the current folder."""
    before, sys.argv = sys.argv, ["train.py", *words]
    try:
        train.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        sys.argv = before
    return 0


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """Runs the training command in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sweep that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        assert run(*OPTIONS) == 0
    return folder / "out sweep"


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]


def written(folder: Path) -> dict[str, int]:
    """When the files of a folder were written, in nanoseconds; locks aside."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in LOCKS)
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in files}


LOCKS = (".turn", ".lock")


def killed(folder: Path) -> None:
    """Run the sweep in a process that kills itself in the second job."""
    process = CONTEXT.Process(target=_sweep, args=(folder, {"STOP": "SIGKILL"}))
    process.start()
    process.join(300)
    assert process.exitcode == -9


def _sweep(folder: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    os.chdir(folder)
    sys.exit(run(*OPTIONS))


def test_the_jobs_are_named_by_what_was_swept(whole: Path) -> None:
    assert sorted(path.name for path in whole.iterdir() if path.is_dir()) == NAMES
    assert [row["folder"] for row in rows(whole)] == NAMES


def test_a_killed_sweep_goes_on_by_the_same_command(
    whole: Path, sweep: Sweep, tmp_path: Path
) -> None:
    killed(tmp_path)
    folder = tmp_path / "out sweep"
    # The table was written after the first job, when nothing of the second was there.
    assert [row["folder"] for row in rows(folder)] == NAMES[:1]
    first = written(folder / "seed=1")
    assert not (folder / "seed=3").exists()
    assert sweep(*OPTIONS) == 0
    assert written(folder / "seed=1") == first
    assert "at step 3" in (folder / "seed=2" / "train.log").read_text()
    assert rows(folder) == rows(whole)
    for name in NAMES:
        assert_same_run(whole / name, folder / name)


def test_a_stopped_sweep_says_how_it_goes_on(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HELPERS))
    monkeypatch.setenv("STOP", "SIGTERM")
    folder = tmp_path / "out sweep"
    shutil.copytree(whole / NAMES[0], folder / NAMES[0])
    done = command(tmp_path, *OPTIONS)
    monkeypatch.delenv("STOP")
    assert done.returncode == 143
    start = "mpframe: stopped by SIGTERM; continue the sweep with: "
    assert done.stderr.splitlines()[-1].startswith(start)
    again = shlex.split(done.stderr.splitlines()[-1].removeprefix(start))
    assert again[:2] == [sys.executable, str(ROOT / "scripts" / "train.py")]
    assert [row["status"] for row in rows(folder)] == ["finished", "interrupted"]
    assert prepare(again[2:]) == prepare([*(o for o in OPTIONS if o != PLACE), PLACE])


def test_a_folder_with_other_options_is_refused_and_left_alone(
    whole: Path, sweep: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole, tmp_path / "out sweep")
    before = written(tmp_path)
    assert sweep(*OPTIONS, "model.hidden=5", "model.depth=1") == 1
    assert capsys.readouterr().err == (
        "mpframe: hydra.sweep.dir=out sweep: its seed=1 is a run with other options, "
        "model.depth=1 (was 2), model.hidden=5 (was 4); choose another folder, or add resume=auto "
        "to go on from its checkpoint\n"
    )
    assert written(tmp_path) == before


@pytest.mark.parametrize(
    ("path", "value", "same"),
    [
        ("trainer.log_every", 3, True),
        ("numerics.every", 2, True),
        ("callbacks.curves", None, True),
        ("run_name", "other", True),
        ("device", "cuda", True),
        ("dataset.workers", 2, True),
        ("trainer.eval_every", 3, False),  # The last validation may be another.
        ("trainer.monitor", "loss", False),
        ("seed", 2, False),
        ("metrics", {"more": {"_target_": "x"}}, False),
        ("callbacks.mine", {"_target_": "x"}, False),
    ],
)
def test_options_that_only_watch_may_differ(
    whole: Path, path: str, value: object, same: bool
) -> None:
    folder = whole / "seed=1"
    options = OmegaConf.load(folder / "config_resolved.yaml")
    OmegaConf.update(options, path, value, force_add=True)
    text = OmegaConf.to_yaml(options)
    if same:
        assert holds_this_run(folder, text, "none")
    else:
        assert not holds_this_run(folder, text, "auto")
        with pytest.raises(ConfigError, match=f"its seed=1 is a run with other options, {path}"):
            holds_this_run(folder, text, "none")
    assert not holds_this_run(folder.parent, text, "none")


def test_a_longer_sweep_in_the_same_folder_runs_what_is_missing(
    whole: Path, sweep: Sweep, tmp_path: Path
) -> None:
    """In another order, too; the table has all jobs of the folder."""
    folder = shutil.copytree(whole, tmp_path / "out sweep")
    before = written(folder / "seed=1")
    assert sweep(*OPTIONS, "seed=4,1") == 0
    assert written(folder / "seed=1") == before
    assert {row["seed"]: row["status"] for row in rows(folder)} == dict.fromkeys("1234", "finished")


DIVERGES = [
    "-m", "loss_scaling=static", "loss_scaling.scale=1e30,1.0", "model=mlp",
    "model.hidden=4", "trainer.max_consecutive_skips=2", "callbacks.autopsy=null",
    "trainer.max_steps=4", "callbacks.progress_bar=null", "hydra.sweep.dir=out",
]  # fmt: skip


def test_a_job_that_diverged_is_a_result(
    sweep: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(*DIVERGES) == 1
    table = rows(tmp_path / "out")
    assert [row["status"] for row in table] == ["diverged", "finished"]
    folder = tmp_path / "out" / "loss_scaling.scale=1e+30"
    before, reason = written(folder), Summary.read(folder).reason
    capsys.readouterr()
    assert sweep(*DIVERGES) == 1
    assert capsys.readouterr().err == (
        f"mpframe: job 0: diverged when the sweep ran before, {reason}; to run it again delete "
        f"{folder}\n"
    )
    assert written(folder) == before
    assert rows(tmp_path / "out") == table


def test_a_job_that_failed_is_run_again(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["-m", *DIVERGES[3:], "model._target_=mending.net", "seed=1"]
    source = tmp_path / "mending.py"
    source.write_text("def net(**options):\n    raise ValueError('not yet')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert sweep(*words) == 1
    assert [row["status"] for row in rows(tmp_path / "out")] == ["failed"]
    source.write_text("from mpframe.workloads.images import mlp as net\n")
    sys.modules.pop("mending")
    assert sweep(*words) == 0
    assert [row["status"] for row in rows(tmp_path / "out")] == ["finished"]
