"""What `./dev` leaves out, and when CI runs it."""

import runpy

import pytest
from checkout import ROOT

REST = runpy.run_path(str(ROOT / "tests" / "rest.py"))


def test_a_week_runs_every_part_and_a_change_its_own_first() -> None:
    parts = list(REST["parts"]())
    assert len({part.name for part in parts}) == len(parts) > 40
    week = [REST["due"](parts, [], day) for day in range(7)]
    assert sorted(p.name for day in week for p in day) == sorted(p.name for p in parts)
    first, *_ = REST["due"](parts, ["mpframe/tracking/tracker.py"], 0)
    assert first.name == "slow tracking"


def test_every_folder_of_tests_runs_somewhere() -> None:
    tests = ROOT / "tests"
    there = {path.relative_to(tests).parts[0] for path in tests.rglob("test_*.py")}
    assert there == {*REST["folders"](), "ports", "zoo", "bench", "same_numbers"}


def test_a_part_that_fails_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert REST["main"]("no such part") == 0
    broken = REST["Part"]("broken", ("-c", "raise SystemExit(3)"), ())
    REST["main"].__globals__["parts"] = lambda: [broken]
    assert REST["main"]() == 1
    assert "failed: ['broken']" in capfd.readouterr().out


def test_a_part_without_time_is_stopped_and_named(capfd: pytest.CaptureFixture[str]) -> None:
    parts = [
        REST["Part"](name, ("-c", "import time; time.sleep(60)"), ("",))
        for name in ("long", "never begun")
    ]
    REST["main"].__globals__["parts"] = lambda: parts
    REST["main"].__globals__["changed"] = lambda: ["anything"]
    assert REST["main"]("--within", "0.5") == 0
    shown = capfd.readouterr().out
    assert shown.count(", not ended in time") == 2
    assert "failed: none" in shown
