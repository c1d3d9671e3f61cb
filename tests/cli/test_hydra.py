"""What Hydra's documentation shows works here: launchers, sweepers, flags, a run in a notebook."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from fixtures import Patch, Shown
from hydra import compose, initialize_config_module
from in_process import train
from omegaconf import OmegaConf
from processes import command, plugin, statuses, summaries

import mpframe
from mpframe.cli.commands import doctor, evaluate
from mpframe.cli.commands import train as train_command
from mpframe.cli.job import Jobs
from mpframe.core.errors import MpframeError

STEPS = ["trainer.max_steps=2", "callbacks.progress_bar=null"]
SMALL = ["model=mlp", "model.hidden=4", *STEPS]
OWN = ["model._target_=net_of_the_folder.net", "model.hidden=4"]
MODEL = """
import torch

def net(hidden):
    if not hidden:
        raise ValueError("no hidden units")
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, hidden), torch.nn.ReLU(),
                               torch.nn.Linear(hidden, 10))
"""


@pytest.fixture
def here(here: Path) -> Path:
    """The current folder, with a model of its own."""
    (here / "net_of_the_folder.py").write_text(MODEL)
    return here


LAUNCHERS = {
    "joblib": "hydra/launcher=joblib hydra.launcher.n_jobs=2",
    "submitit": "hydra/launcher=submitit_local hydra.launcher.timeout_min=5",
}
PLUGINS = [
    pytest.param(words, marks=[plugin(f"hydra_{name}_launcher"), pytest.mark.slow])
    for name, words in LAUNCHERS.items()
]


@pytest.mark.parametrize("words", ["hydra.job.chdir=true", *PLUGINS])
def test_a_job_that_fails_is_one_line_and_the_others_go_on(words: str, here: Path) -> None:
    own = [OWN[0], "model.hidden=0,4", "hydra.sweep.dir=out"]
    done = command(here, "-m", *words.split(), *own, *STEPS)
    ended = {"model.hidden=0": "failed", "model.hidden=4": "finished"}
    assert (statuses(here / "out"), done.returncode) == (ended, 1)
    assert "1 of 2 jobs finished" in done.stdout
    assert done.stderr.count("no hidden units") == 1, done.stderr
    assert "Traceback" not in done.stderr
    if words == "hydra.job.chdir=true":
        why = "model: net_of_the_folder.net refused its options: no hidden units"
        assert done.stderr == f"mpframe: job 0: {why}\n"
        # Python may keep what it compiled of the module.
        assert {path.name for path in here.iterdir() if path.is_dir()} - {"__pycache__"} == {"out"}


def test_an_error_is_not_repeated_for_each_job(capsys: Shown) -> None:
    jobs, basic = Jobs(), {"choices": {"hydra/sweeper": "basic"}}
    jobs._sweep = True
    for number, text in enumerate(("no disk", "no room", "no disk")):
        job = OmegaConf.create({"job": {"num": number}, "runtime": basic})
        jobs._fail(MpframeError(text), job)
    lines = ("job 0: no disk", "job 1: no room", "job 2: the same error")
    assert capsys.readouterr().err == "".join(f"mpframe: {line}\n" for line in lines)


@pytest.fixture
def printed(tmp_path: Path, monkeypatch: Patch, capsys: Shown) -> Callable[..., str]:
    """What the training command prints when it trains nothing."""
    monkeypatch.chdir(tmp_path)

    def print_it(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        with suppress(SystemExit):  # A mistake would be on stderr.
            train_command.main()
        said = capsys.readouterr()
        assert (said.err, list(tmp_path.iterdir())) == ("", [])
        return said.out

    return print_it


def test_a_flag_of_hydra_answers_and_help_shows_first_what_is_changed_most(printed: Any) -> None:
    assert "# @package trainer\nepochs: 20\n" in printed("--cfg", "job", "-p", "trainer")
    assert "hydra/callbacks/default" in printed("--info", "defaults")
    assert "structured://" in printed("--info", "searchpath")
    most, _, rest = printed("--help").partition("== Groups (GROUP=CHOICE) ==\n")
    for words in ("model=", "dataset=", "dtype=", "loss_scaling=", "optimizer=", "trainer."):
        assert words in most
    groups, _, options = rest.partition("== All options (option=value) ==\n")
    assert "loss_scaling: Backoff, LogMax" in groups
    assert [line.split("  ")[0] for line in options.strip().splitlines()] == [
        *("mpframe train model=gpt --cfg job", "mpframe options", "mpframe train --hydra-help"),
    ]
    assert re.findall(r"^(\w+):(?=\n|$| \{\})", printed("--cfg", "job"), re.M) == [
        *("model", "dataset", "dtype", "loss_scaling", "optimizer", "scheduler", "trainer"),
        *("distributed", "objective", "metrics", "callbacks", "ops"),
    ]


def test_compose_and_run_in_a_notebook(tmp_path: Path) -> None:
    with initialize_config_module("mpframe.conf", version_base="1.3"):
        config = compose("config", overrides=SMALL)
    summary = mpframe.train(config, tmp_path / "new" / "run")
    assert (summary.status, summary.steps) == ("finished", 2)


@pytest.mark.slow
def test_a_program_imports_from_the_current_folder(here: Path, tmp_path_factory: Any) -> None:
    """Python puts the folder of the program first, and not the current one."""
    program = tmp_path_factory.mktemp("bin") / "mpframe"
    program.write_text("from mpframe.cli.main import main\nmain()\n")
    (here / "json.py").write_text("raise SystemExit('a file of the user took a module of Python')")
    # An empty entry would be the current folder, before Python's own modules.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HYDRA_FULL_ERROR": ""}
    done = subprocess.run(
        [sys.executable, program, "train", *OWN, *STEPS],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_commands_see_the_current_folder(here: Path, monkeypatch: Patch, capsys: Shown) -> None:
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    monkeypatch.delitem(sys.modules, "net_of_the_folder", raising=False)
    with pytest.raises(SystemExit) as ended:
        doctor.main([*OWN, "dtype=fp32"])
    assert ended.value.code == 0
    train(here / "run", *OWN, *STEPS)
    evaluate.main(["checkpoint=run", OWN[0]])
    assert "test_accuracy" in capsys.readouterr().out


SPACE = {
    "a command line": "optimizer.lr=tag(log,interval(1e-4,1e-1)) model.depth=range(1,2) "
    "dtype=choice(fp32,amp)",
    "a file": "--config-dir=. --config-name=search",
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
OPTUNA = ["hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1", "hydra.sweep.dir=out"]
SEARCH = ["-m", "hydra/sweeper=optuna", *SMALL[:2], STEPS[1], "trainer.max_steps=4", *OPTUNA]


def searched(folder: Path, *words: str) -> tuple[list[Any], str]:
    """The summaries of a search, and what it found best."""
    done = command(folder, *SEARCH, *words)
    assert done.returncode == 0, done.stderr
    return summaries(folder / "out"), (folder / "out" / "optimization_results.yaml").read_text()


@pytest.mark.slow
@plugin("hydra_optuna_sweeper")
@pytest.mark.parametrize("space", SPACE.values(), ids=SPACE)
def test_a_search_takes_the_monitored_metric(space: str, tmp_path: Path) -> None:
    (tmp_path / "search.yaml").write_text(FILE)
    own = ["hydra.sweeper.direction=maximize", "hydra.sweeper.sampler.seed=0"]
    found, best = searched(tmp_path, *space.split(), *own, "trainer.eval_every=1")
    assert f"best_value: {max(own['best'] for own in found)}" in best
    assert len(found) == 3


@pytest.mark.slow
@plugin("hydra_optuna_sweeper")
def test_a_trial_that_diverges_counts_as_failed_and_the_search_goes_on(tmp_path: Path) -> None:
    """A static scale far too large skips every step, which ends the run as diverged."""
    scales = ["loss_scaling=static", "loss_scaling.scale=choice(1e30,1.0)"]
    soon = ["trainer.max_consecutive_skips=2", "callbacks.autopsy=null"]
    found, best = searched(tmp_path, *scales, *soon, "hydra/sweeper/sampler=grid")
    assert sorted(own["status"] for own in found) == ["diverged", "finished"]
    assert "loss_scaling.scale: 1.0" in best
