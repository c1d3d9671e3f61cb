"""The tracker of docs/own_parts.md, as it stands there."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from fixtures import Patch
from in_process import train
from pages import ROOT, Page

PAGE = Page(ROOT / "docs" / "own_parts.md")
SMALL = ["model=mlp", "model.hidden=8", "dtype=fp32", "trainer.max_steps=20"]


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


def test_the_pages_tracker_is_called(tmp_path: Path, monkeypatch: Patch) -> None:
    """Two logs and one validation in 20 steps; the package itself is not installed."""
    stand_in = Calls("wandb")
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    (code,) = (code for code in PAGE.blocks("python") if code.startswith("import wandb"))
    (tmp_path / "my_tracker.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    options = ["trainer.eval_every=20", "+callbacks.own._target_=my_tracker.WandB"]
    train(tmp_path / "run", *SMALL, *options)
    assert [name for name, _ in stand_in.called] == ["init", "log", "log", "log", "finish"]
