"""The page that names a run's versions, machine, commit and command line, without secrets."""

import subprocess
import sys
from pathlib import Path

import torch
from fixtures import Patch

from mpframe.tracking.environment import environment_text, format_command


def test_environment_has_versions_and_commit(monkeypatch: Patch, tmp_path: Path) -> None:
    def rows() -> dict[str, str]:
        lines = environment_text().splitlines()[2:]
        return dict(line.strip("| ").split(" | ", 1) for line in lines)

    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.setenv("MPFRAME_TEST_VARIABLE", "must-not-appear")
    monkeypatch.setattr(sys, "argv", ["scripts/train.py", "ops.modules={a|b: fp32}"])
    monkeypatch.chdir(tmp_path)
    shown = {"python": ".".join(map(str, sys.version_info[:3])), "torch": torch.__version__}
    shown |= {"command": r"`scripts/train.py 'ops.modules={a\|b: fp32}'`", "git commit": "none"}
    assert rows() == rows() | shown
    assert all(rows().values())
    assert "must-not-appear" not in environment_text()
    Path("file").write_text("1")
    for words in (["init", "-q"], ["add", "file"], ["commit", "-qm", "first"]):
        git(*words)
    assert rows()["git commit"] == git("rev-parse", "HEAD")
    Path("file").write_text("2")
    assert rows()["git commit"] == git("rev-parse", "HEAD") + "-dirty"


def test_command_line_is_shown_without_its_secrets() -> None:
    environment = {"MY_SECRET": "filled-in-by-the-shell", "A_TOKEN": "short", "HOME": "0.1"}
    for argument, shown in (
        ("+hub={API_KEY: abc}", "+hub=***"),
        ("model.max_tokens=8", "model.max_tokens=8"),
        ("url=https://me:pw@host/x", "url=https://***@host/x"),
        ("name=filled-in-by-the-shell", "name=***"),
    ):
        assert format_command([argument], environment).strip("'") == shown
