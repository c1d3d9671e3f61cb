"""What a run says of itself: its line in the HParams table, its versions and command line."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fixtures import Patch
from in_process import composed
from omegaconf import OmegaConf

from mpframe import OpLists
from mpframe.config.command_line import check_config
from mpframe.config.schema import Config
from mpframe.run.description import _options_text, find_typed, hparams, ops_in_words
from mpframe.tracking.environment import environment_text, format_command

ALWAYS = {
    *("dtype", "loss_scaling", "model", "optimizer", "scheduler", "dataset", "optimizer.lr"),
    *("dataset.batch_size", "trainer.accumulate", "trainer.clip_norm", "trainer.ema_decay"),
    *("trainer.epochs", "seed"),
}
MLP = "mlp in_features=[1,8,8] classes=10 hidden=256 depth=2 dropout=0.0"


def config_of(*words: str) -> Config:
    return check_config(composed(*words))


@pytest.mark.parametrize(("words", "columns"), [
    # An option that changes no number is in no column.
    ("model=mlp dtype=mixed trainer.log_every=1", {"model": MLP, "dtype": "mixed float16"}),
    ("model.width=8 model.dropout=0.5 optimizer.weight_decay=1",
     {"model.width": 8, "model.dropout": 0.5, "optimizer.weight_decay": 1}),
    ("dtype=amp ~scheduler", {"dtype": "amp float16"}),  # What is left out has no value.
    ("dtype=amp dtype.half=bfloat16 ++ops.move.softmax=allow run_name=a",
     {"dtype": "amp bfloat16", "ops.move.softmax": "allow"}),
])  # fmt: skip
def test_what_was_typed_comes_first_and_has_a_column_of_its_own(
    words: str, columns: dict[str, object]
) -> None:
    told = find_typed(OmegaConf.create({"overrides": {"task": words.split()}}))
    found, first = hparams(config_of(*words.split()), "Backoff", told)
    assert [(name, found[name]) for name in first] == [*columns.items()]
    assert found.keys() == ALWAYS | columns.keys()


def test_lists_of_ops_are_a_file_and_what_was_moved() -> None:
    moved = ["ops.allow+=[softmax]", "ops.deny-=[exp]", "ops.modules={head:fp32}"]
    plain, own = (ops_in_words(OpLists.from_mapping(vars(config_of(*w).ops))) for w in ([], moved))
    assert plain == "`default`"
    assert own == "`default`, moved `exp` to none, `softmax` to allow, pinned `head` to fp32"


def test_environment_has_versions_and_commit(monkeypatch: Patch, tmp_path: Path) -> None:
    def rows() -> dict[str, str]:
        lines = environment_text().splitlines()[2:]
        return dict(line.strip("| ").split(" | ", 1) for line in lines)

    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.setenv("MPFRAME_TEST_VARIABLE", "must-not-appear")
    monkeypatch.setattr(sys, "argv", ["scripts/train.py", "ops.modules={a|b: fp32}"])
    monkeypatch.chdir(tmp_path)
    shown = {"python": ".".join(map(str, sys.version_info[:3])), "torch": torch.__version__}
    shown |= {"command": r"`scripts/train.py 'ops.modules={a\|b: fp32}'`", "git commit": "none"}
    assert rows() == rows() | shown
    assert all(rows().values())
    assert "must-not-appear" not in environment_text()
    Path("file").write_text("1")
    for words in (["init", "-q"], ["add", "file"], ["commit", "-qm", "first"]):
        git(*words)
    assert rows()["git commit"] == git("rev-parse", "HEAD")
    Path("file").write_text("2")
    assert rows()["git commit"] == git("rev-parse", "HEAD") + "-dirty"


def test_command_line_is_shown_without_its_secrets() -> None:
    environment = {"MY_SECRET": "filled-in-by-the-shell", "A_TOKEN": "short", "HOME": "0.1"}
    for argument, shown in (
        ("+hub={API_KEY: abc}", "+hub=***"),
        ("+hub={'api_key_of_hub' : abc}", "+hub=***"),
        ("url=https://host/x?token=abc", "url=***"),
        ("+my_token=abc", "+my_token=***"),
        ("model.max_tokens=8", "model.max_tokens=8"),
        ("dataset=token_shards", "dataset=token_shards"),
        ("resume=runs/author/auth", "resume=runs/author/auth"),
        ("url=https://me:pw@host/x", "url=https://***@host/x"),
        ("name=filled-in-by-the-shell", "name=***"),
    ):
        assert format_command([argument], environment).strip("'") == shown


def test_the_text_of_the_options_has_the_pins_and_no_list_of_ops() -> None:
    before, after = "seed: 1\nops:\n", "model:\n  width: 8\n"
    pins = "  modules:\n    head: fp32\n"
    ops = replace(OpLists.named(), modules={"head": "fp32"})
    text = _options_text(f"{before}  allow:\n  - exp\n  - log\n{pins}{after}", ops)
    assert text.endswith(f"pinned `head` to fp32\n\n```yaml\n{before}{pins}{after}\n```")
