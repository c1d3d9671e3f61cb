"""The engine stands by itself, and the walk through it shows code that is there."""

import re
import sys
from importlib import import_module
from operator import attrgetter

from checkout import ROOT


def test_it_imports_torch_the_standard_library_and_itself() -> None:
    """lint-imports sees to it that it imports no other part of mpframe."""
    package = ROOT / "mpframe"
    files = [*(package / "core").rglob("*.py"), *(package / "precision").glob("*.py")]
    texts = [file.read_text() for file in files]
    found = re.findall(r"^ *(?:from (?=\S+ import)|import )(\w+)", "\n".join(texts), re.M)
    assert {*found} - sys.stdlib_module_names == {"torch", "mpframe"}


def test_the_walk_shows_what_is_there() -> None:
    walk = (ROOT / "docs" / "core.md").read_text()
    shown = re.findall(r"literalinclude\} \.\./(\S+)\.py\n:pyobject: (\S+)", walk)
    assert ("mpframe/core/trainer", "StepTrainer.update") in shown
    for path, name in shown:
        assert attrgetter(name)(import_module(path.replace("/", ".")))
