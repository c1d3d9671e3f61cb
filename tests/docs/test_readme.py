"""README.md: its loop runs, and it is short. CONTRIBUTING.md: its layout is the folders' layout."""

import re
from typing import Any

import torch
from checkout import ROOT
from fixtures import Shown


def block(page: str, mark: str) -> str:
    """The block behind a mark in a page."""
    text = (ROOT / page).read_text()
    found = re.search(rf"<!-- {mark} -->\n```\w*\n(.*?)```", text, re.S)
    assert found is not None
    return found[1]


def test_the_loop_of_the_readme_runs_as_it_stands(capsys: Shown) -> None:
    exec(compile(block("README.md", "run: own loop"), "README.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 20
    assert all("skipped False" in line for line in printed)
    first, last = (float(line.split()[1]) for line in (printed[0], printed[-1]))
    assert 0.0 < last < 10.0
    assert first != last


def test_the_joint_optimizer_of_the_documentation_steps() -> None:
    torch.manual_seed(0)  # Where the first outputs are large their gradients overflow at 2^16.
    model = torch.nn.Linear(4, 3)
    names: dict[str, Any] = {"torch": torch, "model": model}
    names |= {"matrices": [model.weight], "others": [model.bias]}
    exec(compile(block("docs/several.md", "run: several"), "several.md", "exec"), names)
    with names["precision"].cast():
        loss = model(torch.ones(2, 4)).float().square().mean()
    (loss * names["scaler"].scale).backward()
    assert not names["optimizer"].step(names["scaler"], max_norm=1.0).skipped


def test_the_layout_names_what_is_there() -> None:
    lines = block("CONTRIBUTING.md", "layout").splitlines()
    for line in lines:
        folder = ROOT / "mpframe" if line.startswith("  ") else ROOT
        assert (folder / line.split()[0]).exists(), line
    packages = {path.parent.name for path in (ROOT / "mpframe").glob("*/__init__.py")}
    assert packages <= {line.split()[0].rstrip("/") for line in lines}


def test_the_readme_is_read_in_three_minutes() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
