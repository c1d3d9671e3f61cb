"""The engine stands by itself, and the walk through it shows code that is there."""

import ast
import re
import sys
from importlib import import_module
from operator import attrgetter

from checkout import ROOT


def test_it_imports_torch_the_standard_library_and_itself() -> None:
    names = set()
    for file in (ROOT / "mpframe" / "core").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add("." * node.level + (node.module or ""))
    own = {"torch", *sys.stdlib_module_names}
    strange = {name for name in names if name.partition(".")[0] not in own}
    assert {"torch", "math"} <= names
    assert [name for name in strange if not name.startswith("mpframe.core")] == []


def test_the_walk_shows_what_is_there() -> None:
    walk = (ROOT / "docs" / "core.md").read_text()
    shown = re.findall(r"literalinclude\} \.\./(\S+)\.py\n:pyobject: (\S+)", walk)
    assert ("mpframe/core/trainer", "StepTrainer.update") in shown
    for path, name in shown:
        assert attrgetter(name)(import_module(path.replace("/", ".")))
