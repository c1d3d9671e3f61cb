"""The training program in a process of its own, forked from a server that has imported torch.

What is claimed of the start itself (what is imported, what an import prints) needs `subprocess`.
"""

import atexit
import importlib.util
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from checkout import ROOT
from fork_server import as_a_new_program
from processes import exit_code, forked

SCRIPT = ROOT / "scripts" / "train.py"


def run(
    words: list[str], folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What `python scripts/train.py WORDS...` comes to in a folder, with variables of its own."""
    own = {**os.environ, **(environment or {})}
    with tempfile.TemporaryDirectory() as place:
        files = [Path(place) / name for name in ("stdout", "stderr")]
        code = exit_code(forked(_main, words, folder, own, files), within=300)
        return subprocess.CompletedProcess(words, code, *(file.read_text() for file in files))


def _main(words: list[str], folder: Path, environment: dict[str, str], files: list[Path]) -> None:
    as_a_new_program()
    for descriptor, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [str(SCRIPT.parent), *filter(None, paths)]
    sys.argv = [str(SCRIPT), *words]
    sys.orig_argv = [sys.executable, *sys.argv]
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends its processes without them.


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The training command, in a folder."""
    return run(list(words), folder, {"HYDRA_FULL_ERROR": ""})


def summaries(folder: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted(folder.rglob("summary.json"))]


def statuses(folder: Path) -> dict[str, object]:
    """How the jobs of a sweep ended, by what was swept."""
    found = folder.glob("*/summary.json")
    return {path.parent.name: json.loads(path.read_text())["status"] for path in found}


def plugin(name: str) -> pytest.MarkDecorator:
    """Skips where a plugin of Hydra is not installed."""
    find = importlib.util.find_spec
    there = find("hydra_plugins") and find(f"hydra_plugins.{name}")
    return pytest.mark.skipif(not there, reason=f"{name} is not installed; mpframe[sweep] has it")
