"""The engine stands by itself, and the walk through it shows code that is there."""

import ast
import re
import sys

from checkout import ROOT

STEP = ("train_step", "accumulate_losses", "update")


def test_it_imports_torch_the_standard_library_and_itself() -> None:
    names = set()
    for file in (ROOT / "mpframe" / "core").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add("." * node.level + (node.module or ""))
    own = {"torch", *sys.stdlib_module_names}
    strange = [name for name in names if name.partition(".")[0] not in own]
    assert [name for name in strange if not name.startswith("mpframe.core")] == []
    assert {"torch", "math"} <= names


def test_the_walk_shows_what_is_there() -> None:
    walk = (ROOT / "docs" / "core.md").read_text()
    shown = re.findall(r"literalinclude\} (\S+)\n:pyobject: (\S+)", walk)
    assert {("../mpframe/core/trainer.py", f"StepTrainer.{name}") for name in STEP} <= {*shown}
    for path, name in shown:
        nodes = [ast.parse((ROOT / "docs" / path).read_text())]
        for part in name.split("."):
            nodes = [n for node in nodes for n in ast.iter_child_nodes(node)]
            nodes = [n for n in nodes if getattr(n, "name", None) == part]
        assert len(nodes) == 1, name
