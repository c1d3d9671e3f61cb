"""README.md: its loop runs, and it is short. CONTRIBUTING.md: its layout is the folders' layout."""

import re
from typing import Any

import pytest
import torch
from checkout import ROOT

README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def test_the_loop_of_the_readme_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    found = re.search(r"<!-- run: own loop -->\n```python\n(.*?)```", README, re.S)
    assert found is not None
    names: dict[str, Any] = {}
    exec(compile(found[1], "README.md", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 20
    assert all("skipped False" in line for line in printed)
    first, last = (float(line.split()[1]) for line in (printed[0], printed[-1]))
    assert 0.0 < last < 10.0
    assert first != last


def test_the_joint_optimizer_of_the_documentation_steps() -> None:
    page = (ROOT / "docs" / "several.md").read_text()
    found = re.search(r"<!-- run: several -->\n```python\n(.*?)```", page, re.S)
    assert found is not None
    torch.manual_seed(0)  # Where the first outputs are large their gradients overflow at 2^16.
    model = torch.nn.Linear(4, 3)
    names: dict[str, Any] = {"torch": torch, "model": model}
    names |= {"matrices": [model.weight], "others": [model.bias]}
    exec(compile(found[1], "several.md", "exec"), names)
    with names["precision"].cast():
        loss = model(torch.ones(2, 4)).float().square().mean()
    (loss * names["scaler"].scale).backward()
    assert not names["optimizer"].step(names["scaler"], max_norm=1.0).skipped


def test_the_layout_names_what_is_there() -> None:
    found = re.search(r"<!-- layout -->\n```\n(.*?)```", CONTRIBUTING, re.S)
    assert found is not None
    folder = ROOT
    for line in found[1].splitlines():
        name = line.split()[0]
        folder = ROOT / "mpframe" if line.startswith("  ") else ROOT
        assert (folder / name).exists(), name
    shown = {line.split()[0].rstrip("/") for line in found[1].splitlines()}
    packages = {path.parent.name for path in (ROOT / "mpframe").glob("*/__init__.py")}
    assert packages <= shown


def test_the_readme_is_read_in_three_minutes() -> None:
    assert len(README.splitlines()) <= 120


def test_nothing_is_left_to_fill_in() -> None:
    assert "TABLE_" not in README
