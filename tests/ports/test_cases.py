"""tests/ports/README.md says how many cases there are: is that still so?"""

import subprocess
import sys

import pytest
from cases import BEGIN, COUNTED, END, HERE, PAGE, SUITES


def test_the_page_is_current() -> None:
    """In a process of its own: a collection within a collection would share its modules."""
    assert {path.stem for path in HERE.glob("test_*.py")} - {"test_cases"} <= SUITES.keys()
    if COUNTED not in PAGE.read_text():
        pytest.skip(f"the page was not {COUNTED.lower()}")
    words = [sys.executable, "-c", "import cases; print(cases.BEGIN + cases.table())"]
    done = subprocess.run(words, cwd=HERE, capture_output=True, text=True, check=True)
    page = PAGE.read_text().split(BEGIN)[1].split(END)[0].strip()
    current = done.stdout.split(BEGIN)[1].strip()
    assert page == current, "python tests/ports/cases.py writes it anew"
