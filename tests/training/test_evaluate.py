"""mpframe evaluate: the run's numbers bit for bit; a stored configuration is data."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from fixtures import Patch, Shown, refused
from in_process import train
from in_process import trained as made_by

from mpframe import checkpoint
from mpframe.cli.commands.evaluate import evaluate, main
from mpframe.config.stored import config_of
from mpframe.core.errors import CheckpointError, MpframeError
from mpframe.tracking.summary import Summary

SMALL = ["trainer.max_steps=4", "trainer.eval_every=2", "trainer.log_every=100"]
CNN = [*SMALL, "model.width=8", "trainer.ema_decay=0.9", "dtype=mixed"]


trained = made_by(*CNN, "trainer.checkpoint_every=2", "trainer.keep_last=9")


@pytest.fixture
def run_copy(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.mark.parametrize("options", [
    "",
    "dtype=mixed ops.allow+=[batch_norm] ops.modules={head:fp32} model.width=8",
    *(pytest.param(words, marks=pytest.mark.slow) for words in (
        "dtype=amp_bf16 optimizer=sgd scheduler=onecycle dataset.batch_size=48 model.width=8",
        "model=mlp optimizer=muon_adamw objective=cross_entropy objective.label_smoothing=0.1",
        "dtype=mixed experiment=digits_gan",
    )),
])  # fmt: skip
def test_the_numbers_are_the_runs_bit_for_bit(options: str, trained: Path, tmp_path: Path) -> None:
    run = tmp_path if options else trained
    if options:
        train(run, *SMALL, *options.split())
    summary, done = Summary.read(run), evaluate(run, [], split="val")
    assert (done.evaluation.loss, done.evaluation.value) == (summary.val_loss, summary.val_metric)
    assert done.step == summary.steps + summary.skipped_steps
    done = evaluate(run, [])
    assert done.split == "test"
    assert (done.evaluation.loss, done.evaluation.value) == (summary.test_loss, summary.test_metric)
    assert summary.tested == ("last" if "gan" in options else "best")


def test_the_result_is_printed_and_written_beside_others(run_copy: Path, capsys: Shown) -> None:
    own = run_copy / "evaluation_val_step_00000004.json"
    main([f"checkpoint={run_copy}", "split=val"])
    (line,) = capsys.readouterr().out.splitlines()
    summary, written = Summary.read(run_copy), json.loads(own.read_text())
    assert (written["val_loss"], written["val_accuracy"]) == (summary.val_loss, summary.val_metric)
    assert (written["step"], written["weights"], written["samples"]) == (4, "ema", 180)
    assert (written["precision"], written["batch_size"]) == ("mixed(float16)", 64)
    assert f"val_loss {summary.val_loss:.6g}, val_accuracy {summary.val_metric:.6g}" in line
    before = own.read_bytes()
    # Of a checkpoint, it lies in the run's folder, too.
    newest = checkpoint.newest(run_copy)
    main([f"checkpoint={newest}", "split=val", "weights=trained", "dtype=amp"])
    assert own.read_bytes() == before
    other = run_copy / "evaluation_val_step_00000004,dtype=amp,weights=trained.json"
    assert json.loads(other.read_text())["val_loss"] != written["val_loss"]


@pytest.mark.slow
def test_options_may_change_and_batches_have_their_own_size(trained: Path, tmp_path: Path) -> None:
    """Validated in batches of 7, tested and evaluated too; training does not see it."""
    assert evaluate(trained, ["dtype=amp", "dtype.half=bfloat16"]).precision == "amp(bfloat16)"
    # A choice that names the stored class again keeps the stored options (here width 8).
    done, theirs = evaluate(trained, ["model=cnn", "model.dropout=0.5"]), Summary.read(trained)
    assert done.evaluation.loss == theirs.test_loss
    ours = train(tmp_path, *CNN, "dataset.eval_batch_size=7")
    assert (ours.train_loss, ours.val_metric) == (theirs.train_loss, theirs.val_metric)
    # A float16 logit may round the other way where a sum is taken in another order.
    assert ours.val_loss == pytest.approx(theirs.val_loss, rel=2.0**-10)
    done = evaluate(tmp_path, [])
    assert (done.batch_size, done.evaluation.loss) == (7, ours.test_loss)


def stored_in(run: Path) -> dict[Any, Any]:
    tree: dict[Any, Any] = yaml.safe_load((checkpoint.newest(run) / "config.yaml").read_text())
    return tree


@pytest.mark.slow
def test_a_users_class_is_made_once_it_is_named_again_and_no_optimizer(trained: Path) -> None:
    own: dict[str, Any] = {"_target_": "own.Top"}
    for node, again in (({"metrics": {"top": own}}, "+metrics.top"), ({"model": own}, "model")):
        text, target = yaml.safe_dump(stored_in(trained) | node), f"{again}._target_=own.Top"
        assert refused(CheckpointError, config_of, text, trained, []) == (
            f"{trained}: {target.lstrip('+')} is not mpframe's own, and a stored configuration "
            "runs nothing; give the --config-dir whose files name it, or if you trust it, add "
            f"{target}"
        )
        assert vars(config_of(text, trained, [target])).items() >= node.items()
    # Of an optimizer, which an evaluation needs not, none is looked at.
    hostile = {key: {"_target_": "os.system"} for key in ("optimizer", "scheduler")}
    text = yaml.safe_dump(stored_in(trained) | hostile)
    assert config_of(text, trained, []).optimizer["_target_"] == "torch.optim.SGD"


TOUCH = {"_target_": "os.system", "path": "touch attacked"}
BERT = {"_target_": "transformers.BertConfig", "vocab_size": 9}  # conf/model/bert_spans.yaml


@pytest.mark.parametrize(("part", "own", "text"), [
    ("dataset", {"_target_": "os.system"}, "dataset._target_=os.system is not mpframe's own"),
    ("model", {"_target_": ["os.system"]}, "is not mpframe's own"),
    ("model", {"_target_": "mpframe.workloads.images.torch.load"}, "is not mpframe's own"),
    ("model", {"width": [1, [TOUCH]]}, "model.width._target_ is refused"),
    ("model", {"config": {**BERT, "attn_implementation": "a/b"}}, "config._target_ is refused"),
    ("model", {"other": BERT}, "model.other._target_ is refused"),
    ("model", {"config": {**BERT, "vocab_size": BERT}}, "config.vocab_size._target_ is ref"),
    ("model", {"_partial_": True}, "model._partial_ is refused"),
    ("dataset", {"root": "\\${oc.env:HOME}"}, "dataset.root refers to what is not in the file"),
    ("", {3: 4}, "3 is refused"),
    ("", {"model": "os.system"}, "model._target_=None is not mpframe's own"),
    ("", {"trainer": [1]}, "trainer=\\[1\\]: must be a mapping"),
    ("file", "a: &a [x]\nb: [*a, *a]\n", "has no aliases"),
    ("file", "model: !!python/object/apply:os.system ['touch attacked']\n", "not a stored config"),
    ("file", "", "no stored options, which a run made in Python does not have; use a checkpoint "
     "of a YAML run"),
    ("file", "- 1\n", "no stored options"),
    ("file", "[" * 60_000, "at most 16 levels"),
    ("file", "a: " + "x" * 2**16, "at most 65536 letters"),
    ("file", "at: 2026-11-21\n", "at is a date; refused"),
])  # fmt: skip
def test_a_hostile_stored_config_or_file_is_refused(
    trained: Path, part: str, own: Any, text: str, here: Path
) -> None:
    tree = stored_in(trained)
    if part != "file":
        (tree[part] if part else tree).update(own)
    error = CheckpointError if part == "file" else MpframeError
    given = own if part == "file" else yaml.safe_dump(tree)
    assert re.search(text, refused(error, config_of, given, trained, []))
    assert not (here / "attacked").exists()


def test_a_hostile_stored_configuration_runs_nothing(run_copy: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(run_copy)
    text = yaml.safe_dump(stored_in(run_copy) | {"model": {"width": TOUCH}})
    checkpoint.save(run_copy, replace(checkpoint.read(run_copy), config=text))
    with pytest.raises(MpframeError, match="not mpframe's own"):
        evaluate(run_copy, [], split="val")
    assert not (run_copy / "attacked").exists()


@pytest.mark.parametrize(("words", "text"), [
    ("", "checkpoint: must be given, e.g. checkpoint=runs/2026-11-21/05-45-42"),
    ("-m", "-m: no such option; give option=value"),
    ("weights=emma", "weights=emma: choose trained, ema; nearest: ema"),
    ("split=tset", "split=tset: choose val, test; nearest: test"),
    ("dtype=fp32,amp", "dtype=fp32,amp: give one value; there is no sweep"),
    ("experiment=digits_mlp", "has no part in an evaluation"),
    ("model.widht=3", "model.widht: no such option; nearest: model.width"),
    ("model.width=3", "has shape (8, 1, 3, 3) in the checkpoint"),
    ("out=/nonexistent/x.json", "x.json: cannot be written (No such"),
    ("checkpoint=/nonexistent", "/nonexistent: no readable checkpoint"),
])  # fmt: skip
def test_a_mistake_is_one_line(trained: Path, words: str, text: str, capsys: Shown) -> None:
    before = sorted(path.name for path in trained.iterdir())
    with pytest.raises(SystemExit) as ended:
        main([f"checkpoint={trained}", words] if words else [])
    (line,) = capsys.readouterr().err.splitlines()
    assert (ended.value.code, line.startswith("mpframe: "), text in line) == (1, True, True), line
    assert sorted(path.name for path in trained.iterdir()) == before
