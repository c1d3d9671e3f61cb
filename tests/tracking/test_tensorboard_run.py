"""What a run, and one stopped and resumed, writes for TensorBoard and another tracker."""

import sys
from pathlib import Path
from unittest.mock import MagicMock

from fixtures import Patch
from in_process import events, scalars, texts, train
from pages import ROOT, Page

from mpframe.tracking.tags import Tag, meaning_of, metric_tag

SMALL = ("model=mlp", "model.hidden=8", "trainer.log_every=1", "loss_scaling=LogMax")


def test_a_resumed_run_shows_every_curve_and_page_once(tmp_path: Path) -> None:
    train(tmp_path, *SMALL, "trainer.epochs=1")
    train(tmp_path, *SMALL, "trainer.epochs=2", "resume=auto")
    curves, accuracy = scalars(tmp_path), metric_tag("accuracy")
    expected = {str(tag) for tag in Tag if not tag.startswith("text/")}
    assert {*curves} == expected | {accuracy, metric_tag("accuracy", "test")}
    assert [step for step, _ in curves[Tag.LOSS_TRAIN]] == list(range(1, 45))
    assert [step for step, _ in curves[accuracy]] == [22, 44]
    events_of = events(tmp_path)
    pages = {tag for tag in events_of.Tags()["tensors"] if tag.startswith("text/")}
    assert pages == {str(tag) for tag in Tag if tag.startswith("text/")} - {Tag.TEXT_PROFILE}
    assert "linear in ops.allow" in texts(tmp_path, Tag.TEXT_DTYPE_MAP)[0][1]
    assert "overflow_probability: 0.001" in texts(tmp_path, Tag.TEXT_CONFIG)[0][1]
    for tag in [*curves, *pages]:
        told = events_of.SummaryMetadata(tag).summary_description
        assert told == meaning_of(tag).markdown, tag
    about = texts(tmp_path, Tag.TEXT_ABOUT)[0][1]
    for said in ("**Precision**: mixed", "**Training**: AdamW", "ops `default`", "682 weights"):
        assert said in about


def test_the_tracker_of_own_parts_is_called(tmp_path: Path, monkeypatch: Patch) -> None:
    """Two logs and one validation in 20 steps; the package itself is not installed."""
    wandb = MagicMock()
    wandb.init.return_value = wandb
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    blocks = Page(ROOT / "docs" / "own_parts.md").blocks("python")
    (code,) = (code for code in blocks if code.startswith("import wandb"))
    (tmp_path / "my_tracker.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    options = ["trainer.eval_every=20", "+callbacks.own._target_=my_tracker.WandB"]
    train(tmp_path / "run", *SMALL[:2], "trainer.max_steps=20", *options)
    assert [name for name, *_ in wandb.method_calls] == ["init", "log", "log", "log", "finish"]
