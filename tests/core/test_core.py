"""The engine stands by itself, and the walk through it shows code that is there."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import ROOT

import mpframe.core

CORE = ROOT / "mpframe" / "core"
FILES = sorted(CORE.rglob("*.py"))
WALK = (ROOT / "docs" / "core.md").read_text()
SHOWN = re.findall(r"literalinclude\} (\S+)\n:pyobject: (\S+)", WALK)


def imported(file: Path) -> Iterator[str]:
    """What a file imports anywhere in it, by the full names of the modules."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(CORE)))
def test_it_imports_torch_the_standard_library_and_itself(file: Path) -> None:
    for name in imported(file):
        top = name.partition(".")[0]
        assert top == "torch" or top in sys.stdlib_module_names or name.startswith("mpframe.core")


def test_its_docstring_names_each_file() -> None:
    words = set(re.findall(r"\w+", str(mpframe.core.__doc__)))
    assert {file.stem for file in CORE.glob("*.py")} - {"__init__"} <= words


@pytest.mark.parametrize(("path", "name"), SHOWN)
def test_the_walk_shows_what_is_there(path: str, name: str) -> None:
    nodes: list[ast.AST] = [ast.parse((ROOT / "docs" / path).read_text())]
    for part in name.split("."):
        nodes = [n for node in nodes for n in ast.iter_child_nodes(node)]
        nodes = [n for n in nodes if getattr(n, "name", None) == part]
    assert len(nodes) == 1


def test_the_walk_shows_the_step() -> None:
    for half in ("train_step", "accumulate_losses", "update"):
        assert ("../mpframe/core/trainer.py", f"StepTrainer.{half}") in SHOWN
