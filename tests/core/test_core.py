"""The engine stands by itself, and the walk through it shows code that is there."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from checkout import ROOT

CORE = ROOT / "mpframe" / "core"
FILES = sorted(CORE.rglob("*.py"))
WALK = (ROOT / "docs" / "core.md").read_text()
HALVES = ("train_step", "accumulate_losses", "update")  # of a step
SHOWN = re.findall(r"literalinclude\} (\S+)\n:pyobject: (\S+)", WALK)


def imported(file: Path) -> Iterator[str]:
    """What a file imports anywhere in it, by the full names of the modules."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)


def test_it_imports_torch_the_standard_library_and_itself() -> None:
    names = {(file.name, name) for file in FILES for name in imported(file)}
    assert {"torch", "math"} <= {name for _, name in names}
    own = ("torch", *sys.stdlib_module_names)
    strange = [n for n in names if n[1].partition(".")[0] not in own]
    assert [n for n in strange if not n[1].startswith("mpframe.core")] == []


def test_the_walk_shows_what_is_there() -> None:
    assert {("../mpframe/core/trainer.py", f"StepTrainer.{n}") for n in HALVES} <= {*SHOWN}
    for path, name in SHOWN:
        nodes: list[ast.AST] = [ast.parse((ROOT / "docs" / path).read_text())]
        for part in name.split("."):
            nodes = [n for node in nodes for n in ast.iter_child_nodes(node)]
            nodes = [n for n in nodes if getattr(n, "name", None) == part]
        assert len(nodes) == 1, name
