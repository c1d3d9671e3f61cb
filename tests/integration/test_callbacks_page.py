"""The examples of docs/callbacks.md, as they stand there."""

import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import StartRun

PAGE = (Path(__file__).parents[2] / "docs" / "callbacks.md").read_text()
SMALL = ["model=mlp", "model.hidden=8", "dtype=fp32", "trainer.max_steps=20"]


def example(first_line: str) -> str:
    """The code block that begins with a line."""
    block = PAGE[PAGE.index(f"    {first_line}\n") :]
    lines = block.splitlines()
    end = next(n for n, line in enumerate(lines) if line and not line.startswith("    "))
    return textwrap.dedent("\n".join(lines[:end]))


def module(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, code: str) -> None:
    (folder / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)


def test_the_pages_callback_runs_and_goes_on_after_a_resume(
    start_run: StartRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, command = example("# my_pkg.py").partition("python scripts/train.py ")
    module(monkeypatch, tmp_path, "my_pkg", code)
    options = [*SMALL, *command.split(), "trainer.eval_every=5"]
    summary = start_run(tmp_path / "run", *options, "trainer.max_steps=10")
    assert (tmp_path / "run" / "best.txt").read_text() == f"{summary.val_loss} at step 10"
    summary = start_run(tmp_path / "run", *options, "resume=auto", "optimizer.lr=1.0")
    best, _, step = (tmp_path / "run" / "best.txt").read_text().partition(" at step ")
    assert float(best) <= float(summary.val_loss or 0.0)
    assert step == "20"


class Calls(ModuleType):
    """A tracker's package: every call on it is noted, and gives the same object again."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.called: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def noted(*arguments: Any, **options: Any) -> "Calls":
            self.called.append((name, (arguments, options)))
            return self

        return noted


@pytest.mark.parametrize(
    ("package", "entry", "calls"),
    [
        ("wandb", "WandB", ["init", "log", "log", "log", "finish"]),
        (
            "mlflow",
            "MLflow",
            ["start_run", "log_text", "log_metric", "log_metric", "log_metrics", "end_run"],
        ),
    ],
)
def test_the_pages_trackers_are_called(
    start_run: StartRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    package: str,
    entry: str,
    calls: list[str],
) -> None:
    """Two logs and one validation in 20 steps; the packages themselves are not installed."""
    stand_in = Calls(package)
    monkeypatch.setitem(sys.modules, package, stand_in)
    module(monkeypatch, tmp_path, f"my_{package}", example(f"import {package}"))
    options = ["trainer.eval_every=20", f"+callbacks.own._target_=my_{package}.{entry}"]
    start_run(tmp_path / "run", *SMALL, *options)
    assert [name for name, _ in stand_in.called] == calls
