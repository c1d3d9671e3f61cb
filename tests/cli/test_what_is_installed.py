"""A test module imports, at its top, only what `pip install -e ".[dev]"` installs.

One import that fails ends the collection of all tests: what `dev` has not is behind `importorskip`.
"""

import ast
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TESTS = Path(__file__).parents[1]
MODULES = sorted(TESTS.rglob("*.py"))
OWN = {"mpframe", "bench", "tests", *(path.stem for path in TESTS.rglob("*.py"))}


def needed(distribution: str, extras: set[str], found: set[str]) -> set[str]:
    """The distributions that installing `distribution[extras]` brings, by their canonical names."""
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
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return names


@pytest.fixture(scope="module")
def allowed() -> set[str]:
    installed = needed("mpframe", {"dev"}, set())
    names = {
        name
        for name, distributions in packages_distributions().items()
        if installed & {canonicalize_name(distribution) for distribution in distributions}
    }
    return names | OWN | set(sys.stdlib_module_names)


def test_every_test_module_can_be_imported(allowed: set[str]) -> None:
    assert len(MODULES) > 100
    assert {"torch", "pytest", "ml_dtypes"} <= allowed
    wrong = {
        f"{path.relative_to(TESTS)}: {', '.join(sorted(more))}"
        for path in MODULES
        if (more := imported_at_the_top(path) - allowed)
    }
    assert not wrong
