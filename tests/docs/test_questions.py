"""The answers in CONTRIBUTING.md: is what each names still there, and does the text stand in it?"""

import ast
import re

from checkout import ROOT

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
# A row: the question, the file, what in the file answers it, and a piece of its text.
ANSWERS = re.findall(r"^\| .+\? \| `([^`]+)` \| `([^`]+)` \| `([^`]+)` \|$", CONTRIBUTING, re.M)


def source_of(text: str, name: str) -> str:
    """The source of a class, a function, a method (`Class.method`) or a constant in a module."""
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        node = next(own for own in getattr(node, "body", []) if part in _names(own))
    return ast.get_source_segment(text, node) or ""


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def section_of(text: str, key: str) -> str:
    """A top-level key of a YAML file, with all below it."""
    found = re.search(rf"^{re.escape(key)}:.*?(?=^\S|\Z)", text, re.M | re.S)
    return found[0] if found else ""


def test_every_answer_is_still_there() -> None:
    rows = re.findall(r"^\| .+\? \|", CONTRIBUTING, re.M)
    assert len(ANSWERS) == len(rows) >= 20  # Every row is read.
    for file, name, text in ANSWERS:
        find = source_of if file.endswith(".py") else section_of
        assert text in find((ROOT / file).read_text(), name), (file, name)
