"""The comparison of two checkouts sees one changed number, and nothing where nothing changed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT

NAME = "amp float16, LogMax, one batch, clipped"


def said_of(other: Path) -> str:
    command = [sys.executable, str(ROOT / "tests/same_numbers/run.py"), str(other), NAME]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.splitlines()[0].removeprefix(f"[1/1] {NAME}: ")


@pytest.mark.slow
def test_a_changed_number_is_named(tmp_path: Path) -> None:
    for part in ("mpframe", "conf", "scripts"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("conf"))
    (tmp_path / "mpframe" / "conf").symlink_to("../conf")
    assert said_of(tmp_path) == "same"
    optimizer = tmp_path / "conf" / "optimizer" / "adamw.yaml"
    text = optimizer.read_text()
    for change, said in (("0.0101", " numbers differ; "), ("-1", "the other checkout: exit code")):
        optimizer.write_text(text.replace("weight_decay: 0.01", f"weight_decay: {change}"))
        assert said in said_of(tmp_path)
