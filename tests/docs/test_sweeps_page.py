"""The commands of docs/sweeps.md: those that need a plugin are run, with a smaller model."""

import re
import shlex
from pathlib import Path

import pytest
from checkout import ROOT
from hydra import compose
from programs import command, plugin, statuses

from mpframe.config.overrides import hydra_over

PAGE = (ROOT / "docs" / "sweeps.md").read_text()
SMALL = [
    "model=mlp", "model.hidden=4", "trainer.max_steps=2", "callbacks.progress_bar=null"
]  # fmt: skip


def words_of(name: str) -> list[str]:
    """The arguments of the page's command that holds a word."""
    blocks = re.findall(r"```shell\n(.*?)```", PAGE, re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    (line,) = (line for line in lines if name in line)
    return shlex.split(line)[2:]


def code_with(name: str) -> str:
    """The page's Python that holds a word."""
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", PAGE, re.S) if name in code)
    return str(code)


LAUNCHERS = [
    pytest.param("joblib", marks=plugin("hydra_joblib_launcher")),
    pytest.param("submitit_local", marks=plugin("hydra_submitit_launcher")),
]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_jobs_in_other_processes(launcher: str, tmp_path: Path) -> None:
    """Twice: the second time every job has its result already."""
    words = [*words_of(launcher), *SMALL]
    (place,) = (word.partition("=")[2] for word in words if word.startswith("hydra.sweep.dir="))
    tables = []
    for _ in range(2):
        done = command(tmp_path, *words)
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
        tables.append((tmp_path / place / "sweep.csv").read_text())
    ended = statuses(tmp_path / place)
    assert len(ended) >= 2
    assert set(ended.values()) == {"finished"}
    assert tables[0] == tables[1]
    assert len(tables[0].splitlines()) == len(ended) + 1


@plugin("hydra_submitit_launcher")
def test_the_slurm_command_composes() -> None:
    with hydra_over():
        words = [word for word in words_of("submitit_slurm") if not word.startswith(("-", "seed="))]
        launcher = compose("config", overrides=words, return_hydra_config=True).hydra.launcher
    assert launcher._target_.endswith("SlurmLauncher")
    assert (launcher.partition, launcher.gpus_per_node, launcher.max_num_timeout) == ("gpu", 1, 3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Of optuna 2.10 and its sqlalchemy.
@plugin("hydra_optuna_sweeper")
def test_a_study_in_a_file_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for word in words_of("sqlite") if not word.startswith("model.")]
    words += [*SMALL[:1], "model.hidden=range(3, 6)", *SMALL[2:]]
    words += ["hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1"]
    for trials in (3, 6):
        done = command(tmp_path, *words)
        assert done.returncode == 0, done.stderr
        ended = statuses(tmp_path / "runs" / "search")
        assert set(ended.values()) == {"finished"}
        assert len(ended) == trials
    monkeypatch.chdir(tmp_path)
    exec(compile(code_with("get_param_importances"), "sweeps.md", "exec"), {})
    found = capsys.readouterr().out
    assert all(option in found for option in ("optimizer.lr", "model.hidden", "dtype"))


@pytest.mark.slow
@plugin("hydra_optuna_sweeper")
def test_a_search_with_a_fixed_seed_takes_its_finished_trials(tmp_path: Path) -> None:
    words = [
        "-m", "hydra/sweeper=optuna", "hydra.sweeper.n_jobs=1", "hydra.sweeper.sampler.seed=0",
        "optimizer.lr=tag(log, interval(1e-4, 1e-1))", "hydra.sweep.dir=out", *SMALL,
    ]  # fmt: skip
    assert command(tmp_path, *words, "hydra.sweeper.n_trials=2").returncode == 0
    first = statuses(tmp_path / "out")
    done = command(tmp_path, *words, "hydra.sweeper.n_trials=3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished when the sweep ran before") == 2
    assert first.keys() < statuses(tmp_path / "out").keys()
    assert len(statuses(tmp_path / "out")) == 3


@pytest.mark.slow
@plugin("hydra_joblib_launcher")
def test_two_jobs_that_are_the_same_are_one_result(tmp_path: Path) -> None:
    own = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra.sweep.dir=out"]
    done = command(tmp_path, "-m", "seed=1,1", *own, *SMALL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished when the sweep ran before") == 1
    assert statuses(tmp_path / "out") == {"seed=1": "finished"}
