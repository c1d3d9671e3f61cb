"""What README.md and docs/ say is run, composed or looked up, so that it cannot drift."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from mpframe.config.command_line import jobs

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
README = PAGES[0].read_text()


def shell_lines(text: str) -> list[str]:
    """Every command line of the page's shell blocks, continued lines joined."""
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", text, re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip()]


TRAININGS = sorted(
    {
        line[line.index("python scripts/train.py") :]
        for page in PAGES
        for line in shell_lines(page.read_text())
        if "python scripts/train.py" in line
    }
)


def test_there_are_commands() -> None:
    assert len(TRAININGS) >= 15


@pytest.mark.parametrize("line", TRAININGS)
def test_every_documented_training_command_is_accepted(line: str) -> None:
    arguments = shlex.split(line, comments=True)[2:]
    if "--help" not in arguments:
        assert next(jobs(arguments)).config


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
    found = re.search(r"<!-- layout -->\n```\n(.*?)```", README, re.S)
    assert found is not None
    folder = ROOT
    for line in found[1].splitlines():
        name = line.split()[0]
        folder = ROOT / "mpframe" if line.startswith("  ") else ROOT
        assert (folder / name).exists(), name
    shown = {line.split()[0].rstrip("/") for line in found[1].splitlines()}
    packages = {path.parent.name for path in (ROOT / "mpframe").glob("*/__init__.py")}
    assert packages <= shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_nothing_is_left_to_fill_in() -> None:
    assert "TABLE_" not in README
