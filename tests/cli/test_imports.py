"""What is imported: a run loads what its configuration names, and the engine stands by itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

MOST = 150
"""Modules of mpframe that a default run on the digits may import."""


def imported_by(code: str, folder: Path) -> set[str]:
    """The modules of mpframe that a fresh process has imported after running `code`."""
    listed = "\nimport json, sys\nprint(json.dumps([*sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", code + listed], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    names = json.loads(done.stdout.splitlines()[-1])
    return {name for name in names if name.partition(".")[0] == "mpframe"}


def within(names: set[str], *packages: str) -> list[str]:
    """Those of the names that are one of the packages, or in one."""
    return sorted(n for n in names if any(n == p or n.startswith(f"{p}.") for p in packages))


def trained(*words: str) -> str:
    """A program that trains with these words of the command line."""
    return (
        f"import sys; sys.argv[1:] = {list(words)!r}\n"
        "from mpframe.cli.commands.train import main; main()"
    )


SHORT = ("model=mlp", "trainer.max_steps=3", "hydra.run.dir=run")


@pytest.fixture(scope="module")
def default_run(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The modules that a default run on the digits imports."""
    return imported_by(trained(*SHORT), tmp_path_factory.mktemp("default"))


def test_a_default_run_imports_few_modules(default_run: set[str]) -> None:
    assert len(default_run) <= MOST, sorted(default_run)


@pytest.mark.parametrize(
    "unused",
    [
        "mpframe.workloads.gan",
        "mpframe.workloads.speech",
        "mpframe.workloads.tables",
        "mpframe.workloads.text",
        "mpframe.workloads.detection",
        "mpframe.workloads.segmentation",
        "mpframe.data.cifar",
        "mpframe.data.image_files",
        "mpframe.lab.report",
        "mpframe.lab.doctor",
        "mpframe.lab.ranges",
        "mpframe.lab.range_watch",
        "mpframe.lab.search",
        "mpframe.lab.simulation",
        "mpframe.lab.autopsy.evidence",
        "mpframe.lab.autopsy.replay",
        "mpframe.lab.autopsy.diagnosis",
        "mpframe.checkpoint.export_graph",
        "mpframe.checkpoint.init_from",
        "mpframe.training.callbacks.step_hooks",
        "mpframe.training.optimizers.lbfgs",
        "mpframe.training.optimizers.multi_objective",
        "mpframe.training.callbacks.profile",
    ],
)
def test_a_default_run_imports_nothing_that_it_does_not_use(
    default_run: set[str], unused: str
) -> None:
    assert within(default_run, unused) == []


def test_a_user_of_two_names_gets_the_engine(tmp_path: Path) -> None:
    names = imported_by("from mpframe import Backoff, Precision", tmp_path)
    assert names - {"mpframe", *within(names, "mpframe.core")} == set()


def test_a_failed_step_brings_the_autopsy(tmp_path: Path) -> None:
    overflow = (
        "loss_scaling=Backoff",
        "loss_scaling.init_scale=16777216",
        "callbacks.autopsy.after=1",
    )
    names = imported_by(trained(*SHORT, *overflow), tmp_path)
    assert within(names, "mpframe.lab.autopsy.diagnosis")
    assert not within(names, "mpframe.lab.range_watch")


def test_ranges_bring_their_own(tmp_path: Path) -> None:
    names = imported_by(trained(*SHORT, "numerics=on"), tmp_path)
    assert within(names, "mpframe.lab.ranges")
    assert not within(names, "mpframe.lab.autopsy.diagnosis")


def test_a_workload_brings_its_own(tmp_path: Path) -> None:
    words = ("model=gan", "dataset=digits_gan", "optimizer=gan", *SHORT[1:])
    names = imported_by(trained(*words), tmp_path)
    workloads = ["mpframe.workloads", "mpframe.workloads.gan", "mpframe.workloads.images"]
    assert within(names, "mpframe.workloads") == workloads
