"""Options of the zoo: `pytest tests/zoo --zoo` trains every model, and `--write` notes how."""

from importlib.util import find_spec

import page
import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--zoo", action="store_true", help="train every model, not only a few")
    parser.addoption("--limit", type=float, default=300.0, help="seconds a model may take")
    parser.addoption("--write", action="store_true", help="write zoo.csv and README.md")


def pytest_configure(config: pytest.Config) -> None:
    # The workers of pytest-xdist send their reports to one process, and only that one writes.
    if not config.getoption("--write", False) or hasattr(config, "workerinput"):
        return
    libraries = {line["model"].split("/")[0] for line in page.read()}
    if missing := sorted(own for own in libraries if not find_spec(own)):
        # The page has the version of each.
        raise pytest.UsageError(f'--write: not installed: {missing}; pip install -e ".[zoo]"')
    config.pluginmanager.register(Writer())


class Writer:
    """Writes a model's line at once: what was measured stays if the tests are interrupted."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        lines: list[dict[str, str]] = [own for key, own in report.user_properties if key == "zoo"]  # type: ignore[misc]
        if report.when == "call" and lines:
            page.write(lines)
