"""mpframe evaluate: the run's numbers bit for bit; a stored configuration is data."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from in_process import StartRun, scalars, train

from mpframe import checkpoint
from mpframe.cli.commands.evaluate import evaluate, main
from mpframe.config.stored import config_of
from mpframe.core.errors import CheckpointError, MpframeError
from mpframe.tracking.summary import Summary

SMALL = ["model.width=8", "trainer.epochs=2", "trainer.log_every=100"]
RUNS = [
    "dtype=fp32",
    "dtype=fp32 trainer.ema_decay=0.9",
    "dtype=mixed",
    "dtype=mixed trainer.ema_decay=0.9",
    "dtype=mixed trainer.ema_decay=0.9 loss_scaling=LogMax",
    "dtype=mixed_bf16 trainer.ema_decay=0.9 dataset.batch_size=48",
    "dtype=amp trainer.ema_decay=0.9",
    "dtype=amp_bf16 optimizer=sgd scheduler=onecycle",
    "dtype=mixed ops=none",
    "dtype=mixed ops.allow+=[batch_norm] ops.modules={head:fp32}",
    "dtype=mixed model=mlp model.hidden=32 optimizer=muon_adamw",
    "dtype=mixed experiment=digits_gan",
    "dtype=mixed model=mlp model.hidden=24 trainer.ema_decay=0.9",
]


@pytest.mark.parametrize("options", RUNS)
def test_the_numbers_are_the_runs_bit_for_bit(
    options: str, start_run: StartRun, tmp_path: Path
) -> None:
    small = SMALL[1:] if "model=" in options or "gan" in options else SMALL
    summary = start_run(tmp_path, *small, *options.split())
    done = evaluate(tmp_path, [], split="val")
    assert done.evaluation.loss == summary.val_loss
    assert done.evaluation.value == summary.val_metric
    assert done.step == summary.steps + summary.skipped_steps
    assert done.weights == ("ema" if "ema_decay" in options else "trained")
    done = evaluate(tmp_path, [])
    assert (done.split, summary.tested) == ("test", "last" if "gan" in options else "best")
    assert (done.evaluation.loss, done.evaluation.value) == (summary.test_loss, summary.test_metric)


def test_an_older_checkpoint_gives_what_the_curve_shows(
    start_run: StartRun, tmp_path: Path
) -> None:
    start_run(tmp_path, *SMALL, "dtype=mixed", "trainer.ema_decay=0.9")
    curve = dict(scalars(tmp_path)["metric/accuracy/val"])
    for folder in checkpoint.all_in(tmp_path):
        done = evaluate(folder, [], split="val")
        # The event file keeps 32 bits of each number.
        assert curve[done.step] == pytest.approx(done.evaluation.value, rel=2.0**-24)
    assert len(curve) == 2


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an average, made once."""
    folder = tmp_path_factory.mktemp("trained")
    train(folder, *SMALL, "trainer.ema_decay=0.9", "dtype=mixed")
    return folder


@pytest.fixture
def run_copy(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_the_result_is_printed_and_written(
    run_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([f"checkpoint={run_copy}", "split=val"])
    summary = json.loads((run_copy / "summary.json").read_text())
    written = json.loads((run_copy / "evaluation_val_step_00000044.json").read_text())
    assert written["val_loss"] == summary["val_loss"]
    assert written["val_accuracy"] == summary["val_accuracy"]
    assert (written["step"], written["weights"], written["samples"]) == (44, "ema", 180)
    assert (written["precision"], written["batch_size"]) == ("mixed(float16)", 64)
    (line,) = capsys.readouterr().out.splitlines()
    assert f"val_loss {summary['val_loss']:.6g}, val_accuracy {summary['val_accuracy']:.6g}" in line


def test_changed_options_leave_the_runs_own_evaluation_as_it_is(run_copy: Path) -> None:
    own = run_copy / "evaluation_val_step_00000044.json"
    main([f"checkpoint={run_copy}", "split=val"])
    before = own.read_bytes()
    main([f"checkpoint={run_copy}", "split=val", "dtype=fp32"])
    main([f"checkpoint={run_copy}", "split=val", "weights=trained", "dtype=amp"])
    assert own.read_bytes() == before
    names = {path.name for path in run_copy.glob("evaluation_*")} - {own.name}
    assert names == {
        "evaluation_val_step_00000044,dtype=fp32.json",
        "evaluation_val_step_00000044,dtype=amp,weights=trained.json",
    }


def test_options_may_be_changed(run_copy: Path) -> None:
    as_run = evaluate(run_copy, [])
    assert evaluate(run_copy, ["dtype=fp32"]).precision == "fp32"
    assert evaluate(run_copy, ["dtype=amp", "dtype.half=bfloat16"]).precision == "amp(bfloat16)"
    assert evaluate(run_copy, [], "trained").evaluation.loss != as_run.evaluation.loss
    assert evaluate(run_copy, ["dataset.batch_size=100"]).batch_size == 100
    # A choice that names the stored class again keeps the stored options (here width 8).
    assert evaluate(run_copy, ["model=cnn"]).evaluation == as_run.evaluation
    assert evaluate(run_copy, ["model=cnn", "model.dropout=0.5"]).evaluation == as_run.evaluation


def test_an_evaluation_has_a_batch_size_of_its_own(
    trained: Path, start_run: StartRun, tmp_path: Path
) -> None:
    """Validated in batches of 7, tested and evaluated too; training does not see it."""
    options = [*SMALL, "trainer.ema_decay=0.9", "dtype=mixed", "dataset.eval_batch_size=7"]
    ours, theirs = start_run(tmp_path, *options), Summary.read(trained)
    assert ours.train_loss == theirs.train_loss
    assert (ours.val_metric, ours.test_metric) == (theirs.val_metric, theirs.test_metric)
    # A float16 logit may round the other way where a sum is taken in another order.
    assert ours.val_loss == pytest.approx(theirs.val_loss, rel=2.0**-10)
    done = evaluate(tmp_path, [])
    assert (done.batch_size, done.evaluation.loss) == (7, ours.test_loss)


OWN = """
import torch
def net(classes, width):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, width), torch.nn.ReLU(),
                               torch.nn.Linear(width, classes))
"""


def test_a_metric_of_the_users_is_made_once_it_is_named_again(trained: Path) -> None:
    text = (checkpoint.newest(trained) / "config.yaml").read_text()
    stored = yaml.safe_load(text) | {"metrics": {"top": {"_target_": "own.Top", "k": 5}}}
    option = "metrics.top._target_=own.Top"
    with pytest.raises(CheckpointError) as refused:
        config_of(yaml.safe_dump(stored), trained, [])
    assert str(refused.value) == (
        f"{trained}: {option} is not mpframe's own, and a stored configuration runs nothing; if "
        f"you trust it, add +{option}"
    )
    config = config_of(yaml.safe_dump(stored), trained, [f"+{option}"])
    assert config.metrics == {"top": {"_target_": "own.Top", "k": 5}}


def test_a_class_of_the_users_is_built_once_it_is_named_again(
    start_run: StartRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_net.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    run = tmp_path / "run"
    model = "model._target_=own_net.net"
    summary = start_run(run, model, "model.width=12", "model.classes=10", "trainer.max_steps=3")
    sys.modules.pop("own_net")
    with pytest.raises(CheckpointError) as refused:
        evaluate(run, [])
    assert str(refused.value) == (
        f"{run}/checkpoints/step_00000003/config.yaml: model._target_=own_net.net is not "
        "mpframe's own, and a "
        "stored configuration runs nothing; if you trust it, add model._target_=own_net.net"
    )
    assert "own_net" not in sys.modules
    assert evaluate(run, [model]).evaluation.loss == summary.test_loss


# What a stored configuration may not do


def stored(run: Path, text: str) -> None:
    """Put a configuration into the newest checkpoint, sealed as a real one."""
    snapshot = checkpoint.read(run)
    checkpoint.save(run, replace(snapshot, config=text))


def changed(run: Path, section: str, entries: dict[Any, Any]) -> None:
    tree = yaml.safe_load(checkpoint.read(run).config)
    (tree[section] if section else tree).update(entries)
    stored(run, yaml.safe_dump(tree))


TOUCH = {"_target_": "os.system", "path": "touch attacked"}
BERT = {"_target_": "transformers.BertConfig", "vocab_size": 9}  # conf/model/bert_spans.yaml
HOSTILE: list[tuple[str, dict[Any, Any], str]] = [
    ("model", {"_target_": "os.system"}, "model._target_=os.system is not mpframe's own"),
    ("dataset", {"_target_": "os.system"}, "dataset._target_=os.system is not mpframe's own"),
    ("model", {"_target_": ["os.system"]}, "is not mpframe's own"),
    ("model", {"_target_": "mpframe.workloads.images.torch.load"}, "is not mpframe's own"),
    ("model", {"_target_": "torch.load"}, "model._target_=torch.load is not mpframe's own"),
    ("model", {"width": TOUCH}, "model.width._target_ is refused"),
    ("model", {"width": [1, [TOUCH]]}, "model.width._target_ is refused"),
    ("trainer", {"ema_decay": TOUCH}, "trainer.ema_decay._target_ is refused"),
    ("model", {"config": {**BERT, "attn_implementation": "a/b"}}, "config._target_ is refused"),
    ("model", {"other": BERT}, "model.other._target_ is refused"),
    ("dataset", {"config": BERT}, "dataset.config._target_ is refused"),
    ("model", {"config": {**BERT, "vocab_size": BERT}}, "config.vocab_size._target_ is refused"),
    (
        "model",
        {"config": BERT},
        "model.config={.*}: mpframe.workloads.images.cnn takes no such argument",
    ),
    ("model", {"_args_": [1]}, "model._args_ is refused"),
    ("model", {"_partial_": True}, "model._partial_ is refused"),
    ("model", {"_recursive_": False}, "model._recursive_ is refused"),
    ("dataset", {"root": "${oc.env:HOME}"}, "dataset.root refers to what is not in the file"),
    ("dataset", {"root": "\\${oc.env:HOME}"}, "dataset.root refers to what is not in the file"),
    ("", {"run_name": "${hydra:runtime.cwd}"}, "run_name refers to what is not in the file"),
    ("", {"extra": TOUCH}, "extra._target_ is refused"),
    ("", {3: 4}, "3 is refused"),
    ("dataset", {"batch_size": 0}, "dataset.batch_size=0: must be"),
    ("dataset", {"batch_size": "many"}, "dataset.batch_size=many: must be"),
    ("", {"model": "os.system"}, "model._target_=None is not mpframe's own"),
    ("", {"trainer": [1]}, "trainer=\\[1\\]: must be a mapping"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "entries", "text"), HOSTILE)
def test_a_hostile_stored_configuration_is_refused(
    run_copy: Path,
    monkeypatch: pytest.MonkeyPatch,
    section: str,
    entries: dict[Any, Any],
    text: str,
) -> None:
    monkeypatch.chdir(run_copy)
    changed(run_copy, section, entries)
    with pytest.raises(MpframeError, match=text) as refused:
        evaluate(run_copy, [])
    assert "\n" not in str(refused.value)
    assert not (run_copy / "attacked").exists()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a: &a [x]\nb: [*a, *a]\n", "has no aliases"),
        ("model: !!python/object/apply:os.system ['touch attacked']\n", "not a stored config"),
        ("model: {", "not a stored configuration"),
        ("", "not a stored configuration; use a checkpoint of a run"),
        ("- 1\n", "not a stored configuration"),
        ("[" * 60_000, "at most 16 levels"),
        ("a: " + "x" * 2**16, "at most 65536 letters"),
        ("at: 2026-11-21\n", "at is a date; refused"),
    ],
)
def test_a_hostile_file_is_refused(
    run_copy: Path, monkeypatch: pytest.MonkeyPatch, content: str, text: str
) -> None:
    monkeypatch.chdir(run_copy)
    stored(run_copy, content)
    with pytest.raises(CheckpointError, match=text) as refused:
        evaluate(run_copy, [])
    assert "\n" not in str(refused.value)
    assert not (run_copy / "attacked").exists()


def test_a_hostile_optimizer_is_not_looked_at(run_copy: Path) -> None:
    changed(run_copy, "optimizer", {"_target_": "os.system"})
    changed(run_copy, "", {"scheduler": {"_target_": "os.system"}})
    text = checkpoint.read(run_copy).config
    assert "os.system" in text
    assert config_of(text, run_copy, []).optimizer["_target_"] == "torch.optim.SGD"


# Bad input


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "checkpoint: must be given, e.g. checkpoint=runs/2026-11-21/05-45-42"),
        (["checkpoint="], "checkpoint: must be given"),
        (["chekpoint=RUN"], "checkpoint: must be given"),
        (["checkpoint=RUN", "-m"], "-m: no such option; give option=value"),
        (["checkpoint=RUN", "weights=emma"], "weights=emma: choose trained, ema; nearest: ema"),
        (["checkpoint=RUN", "dtype=fp32,amp"], "dtype=fp32,amp: give one value; there is no sweep"),
        (["checkpoint=RUN", "dtype=fp23"], "dtype=fp23: choose "),
        (["checkpoint=RUN", "experiment=digits_mlp"], "has no part in an evaluation"),
        (["checkpoint=RUN", "optimizer.lr=1"], "optimizer.lr=1: has no part in an evaluation"),
        (["checkpoint=RUN", "hydra.run.dir=x"], "has no part in an evaluation"),
        (["checkpoint=RUN", "model.widht=3"], "model.widht: no such option; nearest: model.width"),
        (["checkpoint=RUN", "model.width=3"], "has shape (8, 1, 3, 3) in the checkpoint"),
        (["checkpoint=RUN", "model=mlp"], "weights: "),
        (
            ["checkpoint=RUN", "out=/nonexistent/x.json"],
            "x.json: cannot be written (No such",
        ),
        (["checkpoint=RUN/nope"], "RUN/nope: no readable checkpoint"),
    ],
)
def test_a_mistake_is_one_line(
    trained: Path, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path.name for path in trained.iterdir())
    with pytest.raises(SystemExit) as ended:
        main([word.replace("RUN", str(trained)) for word in words])
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mpframe: ")
    assert text.replace("RUN", str(trained)) in line
    assert sorted(path.name for path in trained.iterdir()) == before
