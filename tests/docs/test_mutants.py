"""Every mutant breaks a line that is there, and names a test file that is there."""

import tomllib
from pathlib import Path

import pytest
from checkout import ROOT

LISTS = sorted((ROOT / "tests" / "mutants").glob("*.toml"))


@pytest.mark.parametrize("listing", LISTS, ids=lambda path: path.stem)
def test_lines_are_there_once_and_tests_too(listing: Path) -> None:
    stale = []
    for name, mutant in tomllib.loads(listing.read_text()).items():
        count = (ROOT / "mpframe" / mutant["file"]).read_text().count(mutant["find"])
        paths = [
            word.partition("::")[0] for word in mutant["tests"].split() if word[:6] == "tests/"
        ]
        missing = [path for path in paths if not (ROOT / path).exists()]
        if count != 1 or missing or not paths:
            stale.append((name, count, missing))
    assert not stale
