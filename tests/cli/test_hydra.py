"""What Hydra's documentation shows works here: launchers, sweepers, flags, a run in a notebook."""

import re
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from fixtures import Patch, Shown
from in_process import train
from processes import command, plugin, statuses, summaries

from mpframe.cli.commands import doctor, evaluate
from mpframe.cli.commands import train as train_command

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


def test_a_job_that_fails_is_one_line_and_the_others_go_on(here: Path) -> None:
    own = [OWN[0], "model.hidden=0,4", "hydra.sweep.dir=out", "hydra.job.chdir=true"]
    done = command(here, "-m", *own, *STEPS)
    ended = {"model.hidden=0": "failed", "model.hidden=4": "finished"}
    assert (statuses(here / "out"), done.returncode) == (ended, 1)
    assert "1 of 2 jobs finished" in done.stdout
    why = "model: net_of_the_folder.net refused its options: no hidden units"
    assert done.stderr == f"mpframe: job 0: {why}\n"
    # Python may keep what it compiled of the module.
    assert {path.name for path in here.iterdir() if path.is_dir()} - {"__pycache__"} == {"out"}


def test_a_flag_of_hydra_answers_and_help_shows_first_what_is_changed_most(
    here: Path, monkeypatch: Patch, capsys: Shown
) -> None:
    def printed(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        with suppress(SystemExit):  # A mistake would be on stderr.
            train_command.main()
        said = capsys.readouterr()
        assert (said.err, len([*here.iterdir()])) == ("", 1)
        return said.out

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


def test_commands_see_the_current_folder(here: Path, monkeypatch: Patch, capsys: Shown) -> None:
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    monkeypatch.delitem(sys.modules, "net_of_the_folder", raising=False)
    with pytest.raises(SystemExit) as ended:
        doctor.main([*OWN, "dtype=fp32"])
    assert ended.value.code == 0
    assert sys.path[-1] == str(here)  # Its json.py would not take the place of Python's.
    train(here / "run", *OWN, *STEPS)
    evaluate.main(["checkpoint=run", OWN[0]])
    assert "test_accuracy" in capsys.readouterr().out


@pytest.mark.slow
@plugin("hydra_optuna_sweeper")
def test_a_search_takes_the_monitored_metric_and_a_trial_that_diverges_as_failed(
    tmp_path: Path,
) -> None:
    """A static scale far too large skips every step, which ends the run as diverged."""
    words = ["-m", "hydra/sweeper=optuna", "hydra/sweeper/sampler=grid", "hydra.sweep.dir=out"]
    words += ["loss_scaling=static", "loss_scaling.scale=choice(1e30,1.0,2.0)", *SMALL[:2]]
    words += ["hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1", "trainer.max_steps=4"]
    words += ["hydra.sweeper.direction=maximize", "trainer.eval_every=1", STEPS[1]]
    soon = ["trainer.max_consecutive_skips=2", "callbacks.autopsy=null"]
    done = command(tmp_path, *words, *soon)
    assert done.returncode == 0, done.stderr
    found = summaries(tmp_path / "out")
    ended = [own["best"] for own in found if own["status"] == "finished"]
    assert (len(found), len(ended)) == (3, 2)
    best = (tmp_path / "out" / "optimization_results.yaml").read_text()
    assert f"best_value: {max(ended)}" in best
