"""What `./dev` leaves out, and when CI runs it. Mutants that fit the code."""

import runpy
import tomllib

from checkout import ROOT

REST = runpy.run_path(str(ROOT / "tests" / "rest.py"))


def test_a_week_runs_every_part_and_a_change_its_own_first() -> None:
    parts = list(REST["parts"]())
    assert len({part.name for part in parts}) == len(parts) > 40
    week = [REST["due"](parts, [], day) for day in range(7)]
    assert sorted(p.name for day in week for p in day) == sorted(p.name for p in parts)
    first, *_ = REST["due"](parts, ["mpframe/tracking/tracker.py"], 0)
    assert first.name == "slow tracking"
    tests = ROOT / "tests"
    there = {path.relative_to(tests).parts[0] for path in tests.rglob("test_*.py")}
    assert there == {*REST["folders"](), "ports", "zoo", "bench", "same_numbers"}


def test_every_mutant_breaks_a_line_that_is_there_once_and_names_tests_that_are_there() -> None:
    for listing in sorted((ROOT / "tests" / "mutants").glob("*.toml")):
        for name, mutant in tomllib.loads(listing.read_text()).items():
            code = (ROOT / "mpframe" / mutant["file"]).read_text()
            words = mutant["tests"].split()
            files = [word.partition("::")[0] for word in words if word.startswith("tests/")]
            there = [(ROOT / file).exists() for file in files]
            assert (code.count(mutant["find"]), all(there), there != []) == (1, True, True), name
