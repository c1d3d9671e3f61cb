"""The commands of docs/sweeps.md: those that need a plugin are run, with a smaller model."""

import shlex
from pathlib import Path

import pytest
from fixtures import Patch, Shown
from hydra import compose
from pages import ROOT, Page
from processes import command, plugin, statuses

from mpframe.config.overrides import hydra_over

PAGE = Page(ROOT / "docs" / "sweeps.md")
SMALL = ["model=mlp", "model.hidden=4", "trainer.max_steps=2", "callbacks.progress_bar=null"]


def words_of(name: str) -> list[str]:
    """The arguments of the page's command that holds a word."""
    lines = "\n".join(PAGE.blocks("shell")).replace("\\\n", " ").splitlines()
    (line,) = (line for line in lines if name in line)
    return shlex.split(line)[2:]


def run(folder: Path, *words: str) -> str:
    done = command(folder, *words)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("joblib", marks=plugin("hydra_joblib_launcher")),
        pytest.param("submitit_local", marks=plugin("hydra_submitit_launcher")),
    ],
)
def test_jobs_in_other_processes(launcher: str, tmp_path: Path) -> None:
    """Twice: the second time every job has its result already."""
    words = [*words_of(launcher), *SMALL]
    (place,) = (word.partition("=")[2] for word in words if word.startswith("hydra.sweep.dir="))
    tables = []
    for _ in range(2):
        run(tmp_path, *words)
        tables.append((tmp_path / place / "sweep.csv").read_text())
    ended = statuses(tmp_path / place)
    assert len(ended) >= 2
    assert set(ended.values()) == {"finished"}
    assert tables[0] == tables[1]
    assert len(tables[0].splitlines()) == len(ended) + 1


@plugin("hydra_submitit_launcher")
def test_the_slurm_command_composes() -> None:
    words = [word for word in words_of("submitit_slurm") if not word.startswith(("-", "seed="))]
    with hydra_over():
        launcher = compose("config", overrides=words, return_hydra_config=True).hydra.launcher
    assert launcher._target_.endswith("SlurmLauncher")
    assert (launcher.partition, launcher.gpus_per_node, launcher.max_num_timeout) == ("gpu", 1, 3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Of optuna 2.10 and its sqlalchemy.
@plugin("hydra_optuna_sweeper")
def test_a_study_in_a_file_continues(tmp_path: Path, monkeypatch: Patch, capsys: Shown) -> None:
    words = [word for word in words_of("sqlite") if not word.startswith("model.")]
    words += [*SMALL[:1], "model.hidden=range(3, 6)", *SMALL[2:]]
    words += ["hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1"]
    for trials in (3, 6):
        run(tmp_path, *words)
        ended = statuses(tmp_path / "runs" / "search")
        assert (set(ended.values()), len(ended)) == ({"finished"}, trials)
    monkeypatch.chdir(tmp_path)
    (code,) = (code for code in PAGE.blocks("python") if "get_param_importances" in code)
    exec(compile(code, "sweeps.md", "exec"), {})
    found = capsys.readouterr().out
    assert all(option in found for option in ("optimizer.lr", "model.hidden", "dtype"))
