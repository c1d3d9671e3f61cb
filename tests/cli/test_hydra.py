"""What Hydra's documentation shows works here: launchers, sweepers, flags, a run in a notebook."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from checkout import ROOT
from hydra import compose, initialize_config_module
from in_process import train
from programs import command, plugin, statuses, summaries

import mpframe
from mpframe.cli.commands import doctor, evaluate
from mpframe.cli.commands import train as train_command

SMALL = ["model=mlp", "model.hidden=4", "trainer.max_steps=2", "callbacks.progress_bar=null"]


# --- sweeps in this process


MODEL = """
import torch

def net(hidden):
    if not hidden:
        raise ValueError("no hidden units")
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, hidden), torch.nn.ReLU(),
                               torch.nn.Linear(hidden, 10))
"""


def test_a_job_that_fails_is_one_line_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text(MODEL)
    own = ["model._target_=my_model.net", "model.hidden=0,4", "hydra.sweep.dir=out"]
    done = command(tmp_path, "-m", *own, *SMALL[2:], "hydra.job.chdir=true")
    ended = {"model.hidden=0": "failed", "model.hidden=4": "finished"}
    assert (statuses(tmp_path / "out"), done.returncode) == (ended, 1)
    assert done.stderr == (
        "mpframe: job 0: model: my_model.net refused its options: no hidden units\n"
    )
    folders = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} == {"out"}  # Python may keep what it compiled of my_model.py.


# --- flags, in this process


@pytest.fixture
def printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """What the training command prints when it trains nothing."""
    monkeypatch.chdir(tmp_path)

    def print_it(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        with suppress(SystemExit):  # A mistake would be on stderr.
            train_command.main()
        assert list(tmp_path.iterdir()) == []
        said = capsys.readouterr()
        assert said.err == ""
        return said.out

    return print_it


def test_a_flag_of_hydra_answers(printed: Callable[..., str]) -> None:
    for words, says in {
        ("--cfg", "job", "-p", "trainer"): "# @package trainer\nepochs: 20\n",
        ("--info", "defaults"): "hydra/callbacks/default",
        ("--info", "searchpath"): "structured://",
    }.items():
        assert says in printed(*words)


def test_the_help_shows_first_what_is_changed_most_and_op_lists_last(
    printed: Callable[..., str],
) -> None:
    most, _, rest = printed("--help").partition("== Groups (GROUP=CHOICE) ==\n")
    for words in ("model=", "dataset=", "dtype=", "loss_scaling=", "optimizer=", "trainer."):
        assert words in most
    groups, _, options = rest.partition("== Options (option=value) ==\n")
    assert "loss_scaling: Backoff, LogMax" in groups
    sections = re.findall(r"^(\w+):(?=\n|$| \{\})", options, re.M)
    assert sections == [
        *("model", "dataset", "dtype", "loss_scaling", "optimizer", "scheduler", "trainer"),
        *("objective", "metrics", "callbacks", "numerics", "ops"),
    ]


@pytest.mark.parametrize(
    ("line", "offers"),
    [("dtype=amp", "dtype=amp_bf16"), ("trainer.max_", "trainer.max_steps=")],
)
def test_completion(
    line: str, offers: str, printed: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("COMP_LINE", f"train {line}"), ("COMP_POINT", str(6 + len(line)))):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COMP_CWORD", "1")
    assert offers in printed("-sc", "query=bash").split()


def test_compose_and_run_in_a_notebook(tmp_path: Path) -> None:
    with initialize_config_module("mpframe.conf", version_base="1.3"):
        config = compose("config", overrides=SMALL)
    summary = mpframe.train(config, tmp_path / "new" / "run")
    assert (summary.status, summary.steps) == ("finished", 2)


# --- a user's own code in the current folder


def test_an_installed_program_imports_from_the_current_folder(tmp_path: Path) -> None:
    """Python puts the folder of the program first, and not the current one."""
    program = tmp_path / "bin" / "mpframe"
    program.parent.mkdir()
    program.write_text("from mpframe.cli.main import main\nmain()\n")
    here = tmp_path / "here"
    here.mkdir()
    (here / "my_model.py").write_text(MODEL)
    (here / "json.py").write_text("raise SystemExit('a file of the user took a module of Python')")
    own = ["model._target_=my_model.net", "model.hidden=4", "hydra.run.dir=run"]
    # An empty entry would be the current folder, before Python's own modules.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HYDRA_FULL_ERROR": ""}
    done = subprocess.run(
        [sys.executable, program, "train", *own, *SMALL[2:]],
        cwd=here, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_every_command_that_builds_imports_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net_of_the_folder.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    monkeypatch.delitem(sys.modules, "net_of_the_folder", raising=False)
    own = ["model._target_=net_of_the_folder.net", "model.hidden=4"]
    with pytest.raises(SystemExit) as ended:
        doctor.main([*own, "dtype=fp32"])
    assert ended.value.code == 0
    train(tmp_path / "run", *own, *SMALL[2:])
    evaluate.main(["checkpoint=run", "model._target_=net_of_the_folder.net"])
    assert "test_accuracy" in capsys.readouterr().out


# --- launchers, each job in another process, and searches: plugins of Hydra


LAUNCHERS = [
    pytest.param(
        ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
        marks=plugin("hydra_joblib_launcher"),
    ),
    pytest.param(
        ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"],
        marks=plugin("hydra_submitit_launcher"),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_runs_the_jobs_and_says_which_failed(
    launcher: list[str], tmp_path: Path
) -> None:
    (tmp_path / "my_model.py").write_text(MODEL)
    own = ["model._target_=my_model.net", "model.hidden=4,0", "hydra.sweep.dir=out"]
    done = command(tmp_path, "-m", *launcher, *own, *SMALL[2:])
    assert statuses(tmp_path / "out") == {"model.hidden=4": "finished", "model.hidden=0": "failed"}
    assert done.returncode == 1
    assert "1 of 2 jobs finished" in done.stdout
    assert done.stderr.count("no hidden units") == 1, done.stderr
    assert "Traceback" not in done.stderr


SPACE = {
    "a command line": [
        "optimizer.lr=tag(log,interval(1e-4,1e-1))",
        "model.depth=range(1,2)",
        "dtype=choice(fp32,amp)",
    ],
    "a file": ["--config-dir=.", "--config-name=search"],
}
FILE = """
defaults: [config, override hydra/sweeper: optuna, _self_]
hydra:
  sweeper:
    params:
      optimizer.lr: tag(log, interval(1e-4, 1e-1))
      model.depth: range(1, 2)
      dtype: choice(fp32, amp)
"""
OPTUNA = ["hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1", "hydra.sweeper.sampler.seed=0"]


@pytest.mark.slow
@plugin("hydra_optuna_sweeper")
@pytest.mark.parametrize("space", SPACE.values(), ids=SPACE)
def test_a_search_takes_the_monitored_metric(space: list[str], tmp_path: Path) -> None:
    (tmp_path / "search.yaml").write_text(FILE)
    validations = ["trainer.max_steps=4", "trainer.eval_every=1"]
    sweeper = ["hydra.sweeper.direction=maximize", "hydra.sweep.dir=out"]
    words = [*space, *SMALL, *validations, *OPTUNA, *sweeper]
    done = command(tmp_path, "-m", "hydra/sweeper=optuna", *words)
    assert done.returncode == 0, done.stderr
    found = summaries(tmp_path / "out")
    best = (tmp_path / "out" / "optimization_results.yaml").read_text()
    assert f"best_value: {max(own['best'] for own in found)}" in best  # type: ignore[type-var]
    assert len(found) == 3


@pytest.mark.slow
@plugin("hydra_optuna_sweeper")
def test_a_trial_that_diverges_counts_as_failed_and_the_search_goes_on(tmp_path: Path) -> None:
    """A static scale far too large skips every step, which ends the run as diverged."""
    scales = "loss_scaling.scale=choice(1e30,1.0)"
    done = command(
        tmp_path, "-m", "hydra/sweeper=optuna", "loss_scaling=static", scales, *SMALL[:2],
        *OPTUNA[:2],
        "hydra/sweeper/sampler=grid", "trainer.max_consecutive_skips=2", "callbacks.autopsy=null",
        "trainer.max_steps=4", "callbacks.progress_bar=null", "hydra.sweep.dir=out",
    )  # fmt: skip
    assert sorted(str(own["status"]) for own in summaries(tmp_path / "out")) == [
        "diverged",
        "finished",
    ]
    assert done.returncode == 0, done.stderr
    best = (tmp_path / "out" / "optimization_results.yaml").read_text()
    assert "loss_scaling.scale: 1.0" in best


@pytest.mark.slow
@plugin("hydra_optuna_sweeper")
def test_a_search_over_a_bad_interval_is_refused(tmp_path: Path) -> None:
    done = command(tmp_path, "-m", "hydra/sweeper=optuna", "optimizer.lr=interval(-1,1)")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "mpframe: optimizer.lr=-1.0: must be a number > 0\n"
