"""Trials of an Optuna study that are pruned: the callback, by hand and in Hydra's sweeper."""

import json
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import processes
import pytest
from checkout import ROOT
from fixtures import refused
from in_process import train
from pages import Page

from mpframe.core.errors import ConfigError

optuna = pytest.importorskip("optuna")
SMALL = ["dtype=fp32", "model=mlp", "model.hidden=4", "callbacks.progress_bar=null"]
pytestmark = pytest.mark.filterwarnings("ignore")  # Of optuna 2.10 and its sqlalchemy.
PAGE = Page(ROOT / "docs" / "sweeps.md")


def study_of(folder: Path, value: float, direction: str = "maximize", name: str = "s") -> Any:
    """A study whose two trials had this value at three validations."""
    url = f"sqlite:///{folder}/study.db"
    study = optuna.create_study(storage=url, study_name=name, direction=direction)
    for _ in range(2):
        seen = dict.fromkeys(range(3), value)
        study.add_trial(optuna.trial.create_trial(value=value, intermediate_values=seen))
    return study


def saved(folder: Path, name: str = "s") -> Any:
    """The study as others see it: the one that asked keeps its trials as they were."""
    return optuna.load_study(study_name=name, storage=f"sqlite:///{folder}/study.db")


def words(folder: Path, trial: object, *more: str) -> list[str]:
    given = {"storage": f"sqlite:///{folder}/study.db", "study": "s", "trial": trial}
    options = [f"callbacks.pruning.{name}={value}" for name, value in given.items()]
    pruner = "callbacks.pruning.pruner.n_startup_trials=1"
    return ["callbacks=[default,pruning]", pruner, *options, "trainer.epochs=3", *SMALL, *more]


def test_a_trial_that_is_worse_ends_as_pruned(tmp_path: Path) -> None:
    study = study_of(tmp_path, 0.99)
    trial = study.ask()
    warm = "callbacks.pruning.pruner.n_warmup_steps=1"
    summary = train(tmp_path / "run", *words(tmp_path, trial.number, warm, "optimizer.lr=1e-6"))
    assert (summary.status, summary.epochs, summary.tested) == ("pruned", 2, None)
    said = f"MedianPruner: val_accuracy {summary.val_metric:.4g} at validation 2 of trial 2"
    assert (summary.reason or "").startswith(said)
    assert (tmp_path / "run" / "checkpoints" / f"step_{summary.steps:08}").is_dir()
    told = saved(tmp_path).trials[2]
    assert (told.state.name, told.value) == ("PRUNED", pytest.approx(summary.val_metric))
    assert sorted(told.intermediate_values) == [0, 1]


def test_a_trial_that_is_better_goes_on_also_after_a_resume(tmp_path: Path) -> None:
    study = study_of(tmp_path, 0.01)
    number = study.ask().number
    train(tmp_path / "run", *words(tmp_path, number, "trainer.epochs=1"))
    summary = train(tmp_path / "run", *words(tmp_path, number, "resume=auto"))
    assert (summary.status, summary.epochs) == ("finished", 3)
    study = saved(tmp_path)
    assert sorted(study.trials[number].intermediate_values) == [0, 1, 2]
    assert study.trials[number].state.name == "RUNNING"  # Who asked tells the value.


REFUSED = [
    (0, "maximize", "callbacks.pruning.trial=0: the study s has no such running trial"),
    ("null", "maximize", "callbacks.pruning.trial=null: the study s has no such running trial"),
    (2, "minimize", "callbacks.pruning.study=s: looks for the opposite of a better accuracy; start "
     "a new study with hydra.sweeper.direction=maximize"),
    (0, "", "callbacks.pruning.study=s: sqlite:///"),
]  # fmt: skip


@pytest.mark.parametrize(("trial", "direction", "says"), REFUSED)
def test_a_trial_or_study_that_does_not_fit_is_refused(
    trial: object, direction: str, says: str, tmp_path: Path
) -> None:
    if direction:
        study_of(tmp_path, 0.5, direction).ask()
    assert refused(ConfigError, train, tmp_path / "run", *words(tmp_path, trial)).startswith(says)


@processes.plugin("hydra_optuna_sweeper")
def test_a_trial_stays_pruned_for_the_sweeper(tmp_path: Path) -> None:
    from mpframe.integrations.optuna import Storage

    url = f"sqlite:///{tmp_path}/deep/study.db"
    study = optuna.create_study(storage=Storage(url), study_name="s")
    trials = [study.ask(), study.ask()]
    saved(tmp_path / "deep").tell(0, state=optuna.trial.TrialState.PRUNED)
    for trial in trials:
        study.tell(trial, 1.0)
    assert [trial.state.name for trial in study.trials] == ["PRUNED", "COMPLETE"]


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_the_loop_of_the_page_runs() -> None:
    (code,) = (code for code in PAGE.blocks("python") if "study.ask()" in code)
    exec(code, {"__name__": "page"})
    study = optuna.load_study(study_name="asked", storage="sqlite:///asked.db")
    states = [trial.state.name for trial in study.trials]
    runs = [json.loads(path.read_text()) for path in sorted(Path("runs").rglob("summary.json"))]
    assert states == ["PRUNED" if run["status"] == "pruned" else "COMPLETE" for run in runs]
    assert {*states} == {"PRUNED", "COMPLETE"}


@pytest.mark.slow
@processes.plugin("hydra_optuna_sweeper")
def test_a_study_of_the_sweeper_prunes_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    lines = "\n".join(PAGE.blocks("shell")).replace("\\\n", " ").splitlines()
    (line,) = (line for line in lines if "sweeper=pruning" in line)
    given = [*shlex.split(line)[2:], *SMALL[:3], "hydra.sweeper.n_trials=4"]
    sweep = tmp_path / "runs" / "pruned"
    sweep.mkdir(parents=True)
    study_of(sweep, 0.999, name="search")  # No trial here is as good.
    process = processes.forked(processes._program, tmp_path, tuple(given), dict(os.environ), [])
    assert processes.wait_until(lambda: len(processes.statuses(sweep)) == 2, process)
    os.kill(process.pid, signal.SIGKILL)
    assert processes.exit_code(process) == -signal.SIGKILL
    again = processes.command(tmp_path, *given)
    assert (again.returncode, "Traceback" in again.stderr) == (0, False), again.stderr
    study = saved(sweep, "search")
    ended = [*processes.statuses(sweep).values()]
    states = [trial.state.name for trial in study.trials]
    assert states[:2] == ["COMPLETE"] * 2
    assert {*states[2:]} - {"RUNNING"} == {"PRUNED"}
    assert states.count("PRUNED") >= len(ended) >= 6
    assert {*ended} == {"pruned"}
    assert "pruned" in (sweep / "sweep.md").read_text()
