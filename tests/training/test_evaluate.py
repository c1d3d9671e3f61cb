"""The test at the end of a run, and mpframe evaluate: the same numbers bit for bit.

The best weights are tested, on data that chose nothing, and nothing moves. A stored configuration
is data.
"""

import json
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from fixtures import Log, Patch, Shown, refused
from in_process import composed, csv_rows, differing, scalars, train

from mpframe import Trainer, checkpoint
from mpframe.checkpoint.folder import best_in
from mpframe.cli.commands.evaluate import evaluate, main
from mpframe.config.command_line import check_config
from mpframe.config.stored import config_of
from mpframe.core.errors import ConfigError, MpframeError, RunInterrupted
from mpframe.data import Task, digits
from mpframe.run.run import Run
from mpframe.tracking.summary import Summary
from mpframe.training.evaluation import Evaluation

# The learning rate is too high on purpose: the last weights are not the best ones.
OPTIONS = ["ops.modules={head:fp32}", "model.width=8", "ops.allow+=[batch_norm]", "dtype=mixed"]
OPTIONS += ["trainer.ema_decay=0.5", "trainer.epochs=1"]
OPTIONS += ["trainer.max_steps=6", "trainer.eval_every=2", "scheduler=none", "optimizer.lr=0.3"]
OPTIONS += ["trainer.log_every=4", "dataset.batch_size=128", "seed=3"]
MLP = [*OPTIONS[2:], "model=mlp", "model.hidden=8"]


def trainer_of(folder: Path, *options: str) -> Any:
    """Of a run that has ended."""
    own = composed("callbacks.progress_bar=null", *options)
    run = Run(check_config(own), own, folder)
    run.train()
    return run.trainer


@pytest.fixture(scope="module")
def tested(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run whose best checkpoint is not its last, made once; and the trainer that it had."""
    folder = tmp_path_factory.mktemp("tested")
    return folder, trainer_of(folder, *OPTIONS)


@pytest.fixture
def done(tested: tuple[Path, Any]) -> Path:
    return tested[0]


def row_of_the_test(folder: Path) -> dict[str, str]:
    """It holds nothing else."""
    (row,) = (row for row in csv_rows(folder / "metrics.csv") if row["test_loss"])
    return {name: cell for name, cell in row.items() if cell}


def test_the_best_weights_are_tested_and_all_places_say_the_same(done: Path) -> None:
    summary, (best,), last = Summary.read(done), best_in(done, 1), checkpoint.newest(done)
    row = row_of_the_test(done)
    assert best != last
    assert summary.tested == "best"
    for path, split in ((done, None), (best, "test")):
        found = evaluate(path, [], split=split)
        assert (found.split, found.samples, found.weights) == ("test", 180, "ema")
        assert found.evaluation.loss == summary.test_loss
        assert found.evaluation.metrics == summary.test_metrics
    assert evaluate(last, [], split="test").evaluation.loss != summary.test_loss
    # The event file keeps 32 bits of each number, metrics.csv nine digits.
    curve = [(6, pytest.approx(summary.test_metric, rel=2.0**-24))]
    assert scalars(done)["metric/accuracy/test"] == curve
    assert float(row["test_accuracy"]) == pytest.approx(summary.test_metric, rel=1e-8)
    assert row.keys() == {"step", "epoch", "test_loss", "test_accuracy"}


def test_the_trainer_holds_the_tested_weights_bit_for_bit(tested: tuple[Path, Any]) -> None:
    folder, trainer = tested
    (best,) = best_in(folder, 1)
    saved = checkpoint.load(best)["trainer"]
    assert not differing(saved["ema"], trainer.state_dict()["ema"])
    for name, parameter in trainer.model.named_parameters():
        assert parameter.equal(saved["weights"][name].to(parameter.dtype)), name


def test_what_a_model_keeps_beside_its_weights_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    """A memory that grows, and one that is not persistent: the best has less of both."""
    model = "model._target_=own_parts.NoisyNet"
    trainer_of(tmp_path, *OPTIONS[2:], model, "dtype=fp32", "optimizer.lr=3")
    summary, (best,) = Summary.read(tmp_path), best_in(tmp_path, 1)
    assert best != checkpoint.newest(tmp_path)
    assert evaluate(best, [model], split="test").evaluation.loss == summary.test_loss
    saved = checkpoint.load(best)["trainer"]
    assert set(saved["extra_state"]) == {"means", "sum", "count"}


def validated_with(monkeypatch: Patch, accuracies: dict[int, float]) -> None:
    evaluate = Trainer.evaluate

    def planned(trainer: Trainer, loader: Any, split: str = "validation") -> Evaluation:
        done, step = evaluate(trainer, loader, split), trainer.progress.global_step
        own = {"accuracy": accuracies.get(step, 0.25)}
        return done if split == "test" else replace(done, metrics=own)

    monkeypatch.setattr(Trainer, "evaluate", planned)


def test_best_weights_gone_are_not_claimed(tmp_path: Path, monkeypatch: Patch, caplog: Log) -> None:
    """Others are left, which would be taken for the best ones."""
    written = checkpoint.save

    def save(folder: Path, snapshot: checkpoint.Snapshot) -> Path:
        path = written(folder, snapshot)
        if snapshot.global_step == 4:
            shutil.rmtree(path)
        return path

    monkeypatch.setattr(checkpoint, "save", save)
    validated_with(monkeypatch, {2: 0.5, 4: 0.75, 6: 0.25})
    caplog.set_level("INFO")
    summary = train(tmp_path, *MLP, "trainer.keep_last=9")
    assert (summary.tested, summary.best, summary.best_step) == ("last", 0.75, 4)
    assert summary.searched == 0.25  # A search goes by the weights that were tested.
    assert (
        "warning: trainer.keep_best=1: the best validation, accuracy 0.75 (step 4), has no "
        "checkpoint in this folder, so the last weights are tested"
    ) in caplog.messages
    assert "(last weights), val_accuracy 0.2500, " in caplog.messages[-1]
    assert evaluate(tmp_path, []).evaluation.loss == summary.test_loss


def test_best_weights_are_saved_after_a_skipped_step(tmp_path: Path, monkeypatch: Patch) -> None:
    validated_with(monkeypatch, {2: 0.75, 4: 0.5, 6: 0.25})
    scaler = "init_scale=1 growth_interval=1 growth_factor=1e30 max_scale=1e30 backoff_factor=1e-30"
    skips_each_second_step = [f"loss_scaling.{word}" for word in scaler.split()]
    summary = train(tmp_path, *MLP, "loss_scaling=Backoff", *skips_each_second_step)
    progress = checkpoint.load(tmp_path / "checkpoints/step_00000002")["trainer"]["progress"]
    assert (progress["steps"], progress["skipped_in_a_row"]) == (1, 1)
    assert (summary.tested, summary.best_step, summary.searched) == ("best", 2, 0.75)


def test_a_test_cut_short_is_made_anew(done: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    made = Trainer.test

    def signalled(trainer: Trainer, loader: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return made(trainer, loader)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "test", signalled)
        with pytest.raises(RunInterrupted):
            train(tmp_path, *OPTIONS)
    stopped = Summary.read(tmp_path)
    assert (stopped.status, stopped.test_loss, stopped.tested) == ("interrupted", None, None)
    resumed, whole = train(tmp_path, *OPTIONS, "resume=auto"), Summary.read(done)
    assert (resumed.test_loss, resumed.test_metrics) == (whole.test_loss, whole.test_metrics)
    assert scalars(tmp_path)["loss/test"] == scalars(done)["loss/test"]


def test_it_is_printed_and_written_beside_others(done: Path, here: Path, capsys: Shown) -> None:
    run_copy = Path(shutil.copytree(done, here / "run"))
    own = run_copy / "evaluation_val_step_00000006.json"
    main([f"checkpoint={run_copy}", "split=val"])
    (line,) = capsys.readouterr().out.splitlines()
    summary, written = Summary.read(run_copy), json.loads(own.read_text())
    assert (written["val_loss"], written["val_accuracy"]) == (summary.val_loss, summary.val_metric)
    assert (written["step"], written["weights"], written["samples"]) == (6, "ema", 180)
    assert (written["precision"], written["batch_size"]) == ("mixed(float16)", 128)
    assert f"val_loss {summary.val_loss:.6g}, val_accuracy {summary.val_metric:.6g}" in line
    before = own.read_bytes()
    # Of a checkpoint, it lies in the run's folder, too.
    newest = checkpoint.newest(run_copy)
    main([f"checkpoint={newest}", "split=val", "weights=trained", "dtype=amp"])
    assert own.read_bytes() == before
    other = run_copy / "evaluation_val_step_00000006,dtype=amp,weights=trained.json"
    assert json.loads(other.read_text())["val_loss"] != written["val_loss"]


def stored_in(run: Path) -> dict[Any, Any]:
    return yaml.safe_load((checkpoint.newest(run) / "config.yaml").read_text())


def test_no_stored_optimizer_is_looked_at(done: Path) -> None:
    hostile = {key: {"_target_": "os.system"} for key in ("optimizer", "scheduler")}
    text = yaml.safe_dump(stored_in(done) | hostile)
    assert config_of(text, done, []).optimizer["_target_"] == "torch.optim.SGD"


TOUCH = {"_target_": "os.system", "path": "touch attacked"}
BERT = {"_target_": "transformers.BertConfig", "vocab_size": 9}  # conf/model/bert_spans.yaml


@pytest.mark.parametrize(("part", "own", "text"), [
    ("dataset", {"_target_": "os.system"}, "dataset._target_=os.system: not mpframe's own"),
    ("model", {"_target_": ["os.system"]}, ": not mpframe's own"),
    ("model", {"_target_": "mpframe.workloads.images.torch.load"}, ": not mpframe's own"),
    ("model", {"width": [1, [TOUCH]]}, "model.width._target_ is refused"),
    ("model", {"config": {**BERT, "attn_implementation": "a/b"}}, "config._target_ is refused"),
    ("model", {"other": BERT}, "model.other._target_ is refused"),
    ("model", {"config": {**BERT, "vocab_size": BERT}}, "config.vocab_size._target_ is ref"),
    ("model", {"_partial_": True}, "model._partial_ is refused"),
    ("dataset", {"root": "\\${oc.env:HOME}"}, "dataset.root refers to what is not in the file"),
    ("", {3: 4}, "3 is refused"),
    ("", {"model": "os.system"}, "model._target_=None: not mpframe's own"),
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
def test_a_hostile_stored_file_is_inert(
    done: Path, part: str, own: Any, text: str, here: Path
) -> None:
    if part != "file":
        tree = stored_in(done)
        (tree[part] if part else tree).update(own)
        own = yaml.safe_dump(tree)
    assert re.search(text, refused(MpframeError, config_of, own, done, []))
    assert not (here / "attacked").exists()


def untested() -> Task:
    return replace(digits(), test=None)


def test_a_dataset_may_lack_a_test_part(tmp_path: Path) -> None:
    own = "dataset._target_=test_evaluate.untested"
    options = ["model=mlp", own, "model.in_features=64", "model.classes=10", "trainer.max_steps=2"]
    summary, found = train(tmp_path, *options), evaluate(tmp_path, [own])
    assert (summary.status, summary.test_loss, summary.tested) == ("finished", None, None)
    assert (found.split, found.evaluation.loss) == ("val", summary.val_loss)
    line = "split=test: the dataset has no test part; use split=val"
    assert refused(ConfigError, evaluate, tmp_path, [own], split="test") == line


@pytest.mark.parametrize(("words", "text"), [
    ("", "checkpoint: must be given, e.g. checkpoint=runs/2026-11-21/05-45-42"),
    ("weights=emma", "weights=emma: choose trained, ema; nearest: ema"),
    ("dtype=fp32,amp", "dtype=fp32,amp: give one value; there is no sweep"),
    ("experiment=digits_mlp", "has no part in an evaluation"),
    ("model.width=3", "has shape (8, 1, 3, 3) in the checkpoint"),
    ("out=/nonexistent/x.json", "x.json: cannot be written (No such"),
    ("checkpoint=/nonexistent", "/nonexistent: no readable checkpoint"),
])  # fmt: skip
def test_a_mistake_is_one_line(done: Path, words: str, text: str, capsys: Shown) -> None:
    before = sorted(path.name for path in done.iterdir())
    with pytest.raises(SystemExit) as ended:
        main([f"checkpoint={done}", words] if words else [])
    (line,) = capsys.readouterr().err.splitlines()
    assert (ended.value.code, line.startswith("mpframe: "), text in line) == (1, True, True), line
    assert sorted(path.name for path in done.iterdir()) == before
