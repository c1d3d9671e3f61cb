"""The tracker of docs/own_parts.md, as it stands there."""

import sys
from pathlib import Path
from unittest.mock import MagicMock

from fixtures import Patch
from in_process import train
from pages import ROOT, Page

SMALL = ["model=mlp", "model.hidden=8", "dtype=fp32", "trainer.max_steps=20"]


def test_the_pages_tracker_is_called(tmp_path: Path, monkeypatch: Patch) -> None:
    """Two logs and one validation in 20 steps; the package itself is not installed."""
    wandb = MagicMock()
    wandb.init.return_value = wandb
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    blocks = Page(ROOT / "docs" / "own_parts.md").blocks("python")
    (code,) = (code for code in blocks if code.startswith("import wandb"))
    (tmp_path / "my_tracker.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    options = ["trainer.eval_every=20", "+callbacks.own._target_=my_tracker.WandB"]
    train(tmp_path / "run", *SMALL, *options)
    assert [name for name, *_ in wandb.method_calls] == ["init", "log", "log", "log", "finish"]
