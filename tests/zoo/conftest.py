"""Options of the zoo: `pytest tests/zoo --zoo` trains every model, and `--write` notes how."""

import csv
from pathlib import Path

import pytest
from comparison import HEAD

RESULTS = Path(__file__).resolve().parent / "zoo.csv"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--zoo", action="store_true", help="train every model, not only a few")
    parser.addoption("--limit", type=float, default=300.0, help="seconds a model may take")
    parser.addoption("--write", action="store_true", help="write zoo.csv")


def pytest_configure(config: pytest.Config) -> None:
    # The workers of pytest-xdist send their reports to one process, and only that one writes.
    if config.getoption("--write", False) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Writer())


class Writer:
    """Puts a model's line in its place at once: what was measured stays after an interruption."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        new = [own for key, own in report.user_properties if key == "zoo" and report.when == "call"]
        if not new:
            return
        known = list(csv.DictReader(RESULTS.read_text().splitlines()))
        lines = {line["model"]: line for line in [*known, *new]}  # type: ignore[index]
        with RESULTS.open("w", newline="") as file:
            writer = csv.DictWriter(file, HEAD, lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines[name] for name in sorted(lines))
