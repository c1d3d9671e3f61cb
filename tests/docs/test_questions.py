"""The answers in CONTRIBUTING.md: is what each names still there, and does the text stand in it?"""

import ast
import re
from typing import NamedTuple

from checkout import ROOT

_ROW = re.compile(r"^\| (.+\?) \| `([^`]+)` \| `([^`]+)` \| `([^`]+)` \|$", re.M)


class Answer(NamedTuple):
    """A row: the question, the file, what in the file answers it, and a piece of its text."""

    question: str
    file: str
    name: str
    text: str


ANSWERS = [Answer(*row) for row in _ROW.findall((ROOT / "CONTRIBUTING.md").read_text())]


def source_of(text: str, name: str) -> str | None:
    """The source of a class, a function, a method (`Class.method`) or a constant in a module."""
    found: list[ast.stmt] = ast.parse(text).body
    node: ast.stmt | None = None
    for part in name.split("."):
        node = next((own for own in found if part in _names(own)), None)
        if node is None:
            return None
        found = getattr(node, "body", [])
    return ast.get_source_segment(text, node) if node else None


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def section_of(text: str, key: str) -> str | None:
    """A top-level key of a YAML file, with all below it."""
    found = re.search(rf"^{re.escape(key)}:.*?(?=^\S|\Z)", text, re.M | re.S)
    return found[0] if found else None


def test_every_answer_is_still_there() -> None:
    rows = re.findall(r"^\| .+\? \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    assert len(ANSWERS) == len(rows) >= 20  # Every row is read.
    for answer in ANSWERS:
        path = ROOT / answer.file
        assert path.is_file(), answer
        find = source_of if path.suffix == ".py" else section_of
        source = find(path.read_text(), answer.name)
        assert source is not None, answer
        assert answer.text in source, answer
