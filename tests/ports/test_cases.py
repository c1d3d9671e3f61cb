"""tests/ports/README.md says how many cases there are: is that still so?"""

import subprocess
import sys

import pytest
from cases import BEGIN, COUNTED, END, HERE, PAGE, SUITES

SHOW = "import cases; print(cases.BEGIN + cases.table(cases.collected()))"


def test_every_suite_is_named() -> None:
    files = {path.stem for path in HERE.glob("test_*.py")} - {"test_cases"}
    assert files <= SUITES.keys()


def test_the_page_is_current() -> None:
    """In a process of its own: a collection within a collection would share its modules."""
    if COUNTED not in PAGE.read_text():
        pytest.skip(f"the page was not {COUNTED.lower()}")
    result = subprocess.run(
        [sys.executable, "-c", SHOW], cwd=HERE, capture_output=True, text=True, check=True
    )
    current = result.stdout.split(BEGIN)[1].strip()
    page = PAGE.read_text().split(BEGIN)[1].split(END)[0].strip()
    assert page == current, "python tests/ports/cases.py writes it anew"
