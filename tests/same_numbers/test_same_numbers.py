"""The comparison of two checkouts sees one changed number, and nothing where nothing changed."""

import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from configurations import configurations

ROOT = Path(__file__).resolve().parents[2]
NAME = "amp float16, LogMax, one batch, clipped"


@pytest.mark.slow
def test_a_changed_number_is_named(tmp_path: Path) -> None:
    for part in ("mpframe", "conf", "scripts"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("conf"))
    (tmp_path / "mpframe" / "conf").symlink_to("../conf")
    assert _compared(tmp_path, NAME) == f"[1/1] {NAME}: same"
    optimizer = tmp_path / "conf" / "optimizer" / "adamw.yaml"
    text = optimizer.read_text()
    assert "weight_decay: 0.01" in text
    optimizer.write_text(text.replace("weight_decay: 0.01", "weight_decay: 0.0101"))
    said = _compared(tmp_path, NAME)
    assert said.startswith(f"[1/1] {NAME}: ")
    assert " differ; " in said


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        ({"loss@1": "0x1"}, {"loss@1": "0x1"}, "same"),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, "1 of 2 differ; b: 2 became 3"),
        ({"a": 1}, {"a": 1, "b": 3}, "1 of 1 differ; b: None became 3"),
        ({"a": 1}, {"error": "exit codes [1]"}, "this checkout: exit codes [1]"),
    ],
)
def test_numbers_are_compared_by_their_places(
    theirs: dict[str, Any], ours: dict[str, Any], said: str
) -> None:
    compared = runpy.run_path(str(ROOT / "tests/same_numbers/run.py"))["_compared"]
    assert compared(theirs, ours) == said


def test_the_configurations_are_told_apart() -> None:
    found = configurations()
    assert len({configuration.name for configuration in found}) == len(found) >= 60
    assert sum(configuration.ranks == 2 for configuration in found) >= 10
    assert sum(configuration.resumed for configuration in found) >= 10


def _compared(other: Path, name: str) -> str:
    command = [sys.executable, str(ROOT / "tests/same_numbers/run.py"), str(other), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.splitlines()[0]
