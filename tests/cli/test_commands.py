"""The program `mpframe`: its commands, their help, the scripts over them, and what each imports."""

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from checkout import ROOT
from fixtures import Patch, Shown

import mpframe
from mpframe.cli import main as program
from mpframe.cli.main import COMMANDS, help_of, main, overview, start


def test_every_file_is_a_command_whose_help_has_usage_examples_and_its_options() -> None:
    files = (ROOT / "mpframe" / "cli" / "commands").glob("*.py")
    assert {path.stem for path in files} - {"__init__"} == {*COMMANDS}
    for name in COMMANDS:
        text, module = help_of(name), import_module(f"mpframe.cli.commands.{name}")
        first = text.splitlines()[0]
        assert (first in overview(), len(first) <= 83) == (True, True)
        assert f"\nUsage: mpframe {name}" in text
        assert f"\n    mpframe {name}" in text
        for option in getattr(module, "_OPTIONS", getattr(module, "_DEFAULTS", ())):
            assert re.search(rf"^    {option}=", text, re.MULTILINE), (name, option)


@pytest.fixture(autouse=True)
def _same_command_line(monkeypatch: Patch) -> None:
    monkeypatch.setattr(sys, "argv", list(sys.argv))


ASK = """
import sys
from mpframe.cli.main import main
for words in (["--help"], ["--version"], ["search", "--help"]):
    main(words)
assert not {'torch', 'hydra', 'omegaconf'} & sys.modules.keys()
main(['trian'])
"""


def test_help_version_and_a_typo_are_answered_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=False)
    assert done.stderr == "mpframe: trian: no such command; nearest: train; see mpframe --help\n"
    assert done.returncode == 1
    help_text, version, search = re.split(r"^(mpframe \d.*\n)", done.stdout, flags=re.MULTILINE)
    assert (help_text, search) == (overview() + "\n", help_of("search") + "\n")
    assert version.startswith(f"mpframe {mpframe.__version__}, torch 2.")


def without_a_reader(*words: str, folder: Path | None = None) -> tuple[int, str]:
    """Return exit code and stderr of `python -m mpframe WORDS... | true`."""
    reader, writer = os.pipe()
    os.close(reader)
    line = [sys.executable, "-m", "mpframe", *words]
    with os.fdopen(writer, "w") as out:
        done = subprocess.run(
            line, stdout=out, stderr=subprocess.PIPE, text=True, cwd=folder, check=False
        )
    return done.returncode, done.stderr


@pytest.mark.parametrize("words", ["", "options", "train --help", "train --info config"])
def test_a_reader_of_python_m_may_stop_before_the_end(words: str) -> None:
    """As in `python -m mpframe --help | head -1`."""
    assert without_a_reader(*words.split()) == (0, "")


def test_a_run_goes_on_if_the_reader_stops_before_the_end(tmp_path: Path) -> None:
    """Its log is whole, and no line on stderr says that nobody reads the console."""
    words = ["model=mlp", "model.hidden=4", "trainer.max_steps=2", "hydra.run.dir=run"]
    assert without_a_reader("train", *words, folder=tmp_path) == (0, "")
    first, *_, last = (tmp_path / "run" / "train.log").read_text().splitlines()
    assert ("run folder" in first, "finished: " in last) == (True, True)


def test_a_command_gets_its_own_words(monkeypatch: Patch) -> None:
    seen: list[list[str]] = []
    module = type("Module", (), {"main": staticmethod(lambda: seen.append(list(sys.argv)))})
    monkeypatch.setattr(program, "import_module", lambda _: module)
    main(["train", "dtype=amp", "-m"])
    start("train", ["dtype=fp32"], "scripts/train.py")
    assert seen == [["mpframe train", "dtype=amp", "-m"], ["scripts/train.py", "dtype=fp32"]]


def test_completion_of_commands_and_options(monkeypatch: Patch, capsys: Shown) -> None:
    for line, offered in {
        "mpframe ": sorted(COMMANDS),
        "mpframe ex": ["export"],
        "mpframe train dtype=amp": ["dtype=amp", "dtype=amp_bf16"],
    }.items():
        monkeypatch.setenv("COMP_LINE", line)
        main(["-sc", "query=bash"])
        assert sorted(capsys.readouterr().out.split()) == offered


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path, capsys: Shown) -> None:
    (tmp_path / "mine.py").write_text("")
    for words, line in {
        ("new", str(tmp_path)): f"new={tmp_path}: is not empty; name a new folder",
        ("new",): "new: takes one folder, e.g. mpframe new spirals",
        ("options", "outt=page.md"): "outt=page.md: no such option; nearest: out",
        ("plan", "ranks=4"): "ranks: no such option; use torchrun --nproc-per-node N",
        ("plan", "nodes=0"): "nodes=0: must be >= 1",
        ("plan", "memory=80"): "memory=80: must be a number of GB, as 80GB",
        ("plan", "node=2"): "node=2: no such option; nearest: nodes",
        ("search", "seed=3", "seedz=3"): "seedz=3: no such option; nearest: seeds",
        ("evaluate", str(tmp_path)): f"checkpoint: must be given, e.g. checkpoint={tmp_path}",
        ("evaluate", "checkpont=x"): "checkpont=x: no such option; nearest: checkpoint",
    }.items():
        with pytest.raises(SystemExit):
            main([*words])
        assert capsys.readouterr().err == f"mpframe: {line}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


def test_a_project_is_named_after_its_folder_also_if_that_has_quotes(tmp_path: Path) -> None:
    main(["new", str(tmp_path / 'a "b"')])
    project = yaml.safe_load((tmp_path / 'a "b"' / "conf" / "project.yaml").read_text())
    assert project["run_name"] == 'a "b"'


@pytest.mark.parametrize(("asked", "policy"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_do_not_spin_unless_asked_to(asked: Any, policy: str, monkeypatch: Patch) -> None:
    """Decided before the command is imported, which loads torch."""
    seen: list[str | None] = []
    monkeypatch.setattr(sys, "argv", ["mpframe"])
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if asked:
        monkeypatch.setenv("OMP_WAIT_POLICY", asked)
    note = lambda _: seen.append(os.environ.get("OMP_WAIT_POLICY")) or Mock()  # noqa: E731
    monkeypatch.setattr(program, "import_module", note)
    start("doctor", [])
    assert seen == [policy]


UNUSED = """workloads.gan workloads.speech workloads.tables workloads.text workloads.detection
    workloads.segmentation data.cifar data.image_files lab.report lab.doctor lab.ranges
    lab.range_watch lab.search lab.simulation lab.autopsy.evidence lab.autopsy.replay
    lab.autopsy.diagnosis checkpoint.export_graph checkpoint.init_from
    training.callbacks.step_hooks
    training.callbacks.profile training.callbacks.utilization training.callbacks.gradient_norms
    tracking.json_lines integrations lab.find lab.validation data.streaming data.shares
    precision.lowbit training.trainers training.parallel.sharding training.parallel.data_parallel"""
TRAIN = """
import json, sys
from mpframe import Backoff, Precision
engine = [*sys.modules]
from mpframe.cli.main import main
main(["train", "model=mlp", "trainer.max_steps=3", "hydra.run.dir=run"])
json.dump([engine, [*sys.modules]], open("imported.json", "w"))
"""


def test_a_run_imports_what_it_uses_and_the_engine_stands_by_itself(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", TRAIN], cwd=tmp_path, timeout=300, check=True)
    names = json.loads((tmp_path / "imported.json").read_text())
    engine, run = ({n for n in own if n.partition(".")[0] == "mpframe"} for own in names)
    assert 50 < len(run) <= 150, sorted(run)
    unused = tuple(f"mpframe.{name}." for name in UNUSED.split())
    assert [name for name in run if f"{name}.".startswith(unused)] == []
    parts = ("mpframe.core.", "mpframe.precision.")
    assert [name for name in engine if not f"{name}.".startswith(parts)] == ["mpframe"]
