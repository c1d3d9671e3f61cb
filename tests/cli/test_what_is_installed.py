"""A test module imports, at its top, only what `pip install -e ".[dev]"` installs.

One import that fails ends the collection of all tests: what `dev` has not is behind `importorskip`.
"""

import ast
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TESTS = Path(__file__).parents[1]

OWN = {"mpframe", "bench", "tests", *(path.stem for path in TESTS.rglob("*.py"))}


def needed(distribution: str, extras: set[str], found: set[str]) -> set[str]:
    """The canonical names of what installing `distribution[extras]` brings."""
    found.add(canonicalize_name(distribution))
    for requirement in map(Requirement, requires(distribution) or []):
        marker, name = requirement.marker, canonicalize_name(requirement.name)
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras | {""}):
            new = requirement.extras or name not in found
            found = needed(name, requirement.extras, found) if new else found
    return found


def imported_at_the_top(path: Path) -> set[str]:
    """The first names of the modules that a file imports outside its functions and classes."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return {name.split(".")[0] for name in names}


def test_every_test_module_can_be_imported() -> None:
    installed = needed("mpframe", {"dev"}, set())
    found = packages_distributions().items()
    names = {name for name, own in found if installed & {*map(canonicalize_name, own)}}
    allowed = names | OWN | set(sys.stdlib_module_names)
    assert {"torch", "pytest", "ml_dtypes"} <= allowed
    modules = sorted(TESTS.rglob("*.py"))
    assert len(modules) > 100
    wrong = {path.name: imported_at_the_top(path) - allowed for path in modules}
    assert {name: more for name, more in wrong.items() if more} == {}
