"""The pages for readers who begin in Python: YAML and Python side by side, and a notebook."""

import json
from pathlib import Path
from typing import Any

import in_process
import pytest
import torch
from checkout import ROOT
from fixtures import Patch, Shown, refused
from pages import Page

from mpframe import checkpoint, fit
from mpframe.checkpoint.state import weights_of
from mpframe.core.errors import ConfigError

PAGE = Page(ROOT / "docs" / "python_first.md")
NOTEBOOK = ROOT / "docs" / "first_notebook.ipynb"
SAME = ("progress", "scaler", "precision")


@pytest.mark.slow
def test_yaml_and_python_come_to_the_same(here: Path, monkeypatch: Patch) -> None:
    monkeypatch.syspath_prepend(here)
    files, names = PAGE.files(), dict[str, Any]()
    for file, text in files.items():
        (here / file).parent.mkdir(parents=True, exist_ok=True)
        (here / file).write_text(text)
    for command in PAGE.commands():
        assert in_process.command(*command.arguments) == 0, command
    for code in PAGE.blocks("python"):
        exec("" if code in files.values() else code, names)
        assert len(code.splitlines()) <= 33
    runs = sorted(path.name for path in Path("runs/yaml").iterdir())
    assert len(runs) == PAGE.text.count("</td><td>")
    for run in runs:
        folders = [Path("runs", side, run) for side in ("yaml", "python")]
        ours, theirs = (checkpoint.load(folder) for folder in folders)
        weights, expected = (weights_of(state, "trained", Path(run)) for state in (theirs, ours))
        assert weights.keys() == expected.keys(), run
        assert all(torch.equal(weights[name], expected[name]) for name in expected), run
        assert {k: theirs["trainer"][k] for k in SAME} == {k: ours["trainer"][k] for k in SAME}, run
    assert not list(Path("runs").rglob("*.set_aside"))  # by a run that begins anew
    logged, curves = (in_process.scalars(Path("runs", s, "first")) for s in ("yaml", "python"))
    assert all(points == logged[tag] for tag, points in curves.items() if "loss" in tag)
    journals = [Path("runs", side, "watched/journal.txt") for side in ("yaml", "python")]
    assert journals[0].read_text() == journals[1].read_text() != ""
    pictures = in_process.events(Path("runs/python/pinned")).Tags()["images"]
    assert "numerics/weights/layers_by_exponent" in pictures
    said = refused(ConfigError, fit, names["trainer"], names["train"], folder="runs/python/mine")
    assert said == (
        "folder=runs/python/mine: holds the checkpoints of a run; continue it with resume=auto or "
        "choose another folder"
    )
    given = {"folder": "runs/python/mine", "resume": "runs/python/first"}
    said = refused(ConfigError, fit, names["trainer"], names["train"], **given)
    assert said.startswith("resume=runs/python/first: folder=runs/python/mine holds the check")


def test_the_notebook_runs_and_keeps_no_output(capsys: Shown) -> None:
    notebook, names = json.loads(NOTEBOOK.read_text()), dict[str, Any]()
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all((cell["outputs"], cell["execution_count"]) == ([], None) for cell in cells)
    assert (notebook["nbformat"], "id" in notebook["cells"][0]) == (4, True)
    for cell in cells:
        exec("".join(cell["source"]), names)
    shown = capsys.readouterr().out
    assert names["test"].metrics["accuracy"] > 0.9, shown
    assert "linear in ops.allow" in shown
