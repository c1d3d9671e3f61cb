"""mpframe evaluate: the run's numbers bit for bit; a stored configuration is data."""

import json
import shutil
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

SMALL = ["trainer.max_steps=4", "trainer.eval_every=2", "trainer.log_every=100"]
CNN = [*SMALL, "model.width=8", "trainer.ema_decay=0.9", "dtype=mixed"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an average and two checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    train(folder, *CNN, "trainer.checkpoint_every=2", "trainer.keep_last=9")
    return folder


@pytest.fixture
def run_copy(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def assert_evaluated_alike(run: Path) -> None:
    summary, done = Summary.read(run), evaluate(run, [], split="val")
    assert (done.evaluation.loss, done.evaluation.value) == (summary.val_loss, summary.val_metric)
    assert done.step == summary.steps + summary.skipped_steps
    done = evaluate(run, [])
    assert done.split == "test"
    assert (done.evaluation.loss, done.evaluation.value) == (summary.test_loss, summary.test_metric)


def test_an_evaluation_with_averages_is_the_runs_bit_for_bit(trained: Path) -> None:
    assert_evaluated_alike(trained)
    assert Summary.read(trained).tested == "best"
    assert evaluate(trained, []).weights == "ema"


@pytest.mark.parametrize(
    "options",
    [
        "dtype=fp32 model.width=8",
        "dtype=amp_bf16 optimizer=sgd scheduler=onecycle dataset.batch_size=48 model.width=8",
        "dtype=mixed ops.allow+=[batch_norm] ops.modules={head:fp32} model.width=8",
        "dtype=mixed model=mlp model.hidden=32 optimizer=muon_adamw",
        "dtype=mixed experiment=digits_gan",
    ],
)
def test_the_numbers_are_the_runs_bit_for_bit(
    options: str, start_run: StartRun, tmp_path: Path
) -> None:
    start_run(tmp_path, *SMALL, *options.split())
    assert_evaluated_alike(tmp_path)
    assert Summary.read(tmp_path).tested == ("last" if "gan" in options else "best")


def test_an_older_checkpoint_gives_what_the_curve_shows(trained: Path) -> None:
    curve = dict(scalars(trained)["metric/accuracy/val"])
    assert list(curve) == [2, 4]
    for folder in checkpoint.all_in(trained):
        done = evaluate(folder, [], split="val")
        # The event file keeps 32 bits of each number.
        assert curve[done.step] == pytest.approx(done.evaluation.value, rel=2.0**-24)


def test_the_result_is_printed_and_written_and_stays_beside_others(
    run_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An evaluation with other options is another file than the run's own evaluation."""
    own = run_copy / "evaluation_val_step_00000004.json"
    main([f"checkpoint={run_copy}", "split=val"])
    (line,) = capsys.readouterr().out.splitlines()
    summary, written = Summary.read(run_copy), json.loads(own.read_text())
    assert (written["val_loss"], written["val_accuracy"]) == (summary.val_loss, summary.val_metric)
    assert (written["step"], written["weights"], written["samples"]) == (4, "ema", 180)
    assert (written["precision"], written["batch_size"]) == ("mixed(float16)", 64)
    assert f"val_loss {summary.val_loss:.6g}, val_accuracy {summary.val_metric:.6g}" in line
    before = own.read_bytes()
    main([f"checkpoint={run_copy}", "split=val", "weights=trained", "dtype=amp"])
    assert own.read_bytes() == before
    (other,) = set(run_copy.glob("evaluation_*")) - {own}
    assert other.name == "evaluation_val_step_00000004,dtype=amp,weights=trained.json"
    assert json.loads(other.read_text())["val_loss"] != written["val_loss"]


def test_options_may_be_changed(trained: Path) -> None:
    done = evaluate(trained, ["dtype=amp", "dtype.half=bfloat16", "dataset.batch_size=100"])
    assert (done.precision, done.batch_size) == ("amp(bfloat16)", 100)
    # A choice that names the stored class again keeps the stored options (here width 8).
    done = evaluate(trained, ["model=cnn", "model.dropout=0.5"])
    assert done.evaluation.loss == Summary.read(trained).test_loss


def test_an_evaluation_has_a_batch_size_of_its_own(
    trained: Path, start_run: StartRun, tmp_path: Path
) -> None:
    """Validated in batches of 7, tested and evaluated too; training does not see it."""
    ours, theirs = start_run(tmp_path, *CNN, "dataset.eval_batch_size=7"), Summary.read(trained)
    assert ours.train_loss == theirs.train_loss
    assert (ours.val_metric, ours.test_metric) == (theirs.val_metric, theirs.test_metric)
    # A float16 logit may round the other way where a sum is taken in another order.
    assert ours.val_loss == pytest.approx(theirs.val_loss, rel=2.0**-10)
    done = evaluate(tmp_path, [])
    assert (done.batch_size, done.evaluation.loss) == (7, ours.test_loss)


# What a stored configuration may not do


def stored_in(run: Path) -> dict[Any, Any]:
    tree: dict[Any, Any] = yaml.safe_load((checkpoint.newest(run) / "config.yaml").read_text())
    return tree


@pytest.mark.parametrize(
    ("section", "node", "target", "again"),
    [
        ("metrics", {"top": {"_target_": "own.Top", "k": 5}}, "metrics.top._target_=own.Top", "+"),
        ("model", {"_target_": "own.Net", "width": 12}, "model._target_=own.Net", ""),
    ],
)
def test_a_class_of_the_users_is_made_once_it_is_named_again(
    trained: Path, section: str, node: dict[str, Any], target: str, again: str
) -> None:
    text = yaml.safe_dump({**stored_in(trained), section: node})
    with pytest.raises(CheckpointError) as refused:
        config_of(text, trained, [])
    assert str(refused.value) == (
        f"{trained}: {target} is not mpframe's own, and a stored configuration runs nothing; if "
        f"you trust it, add {again}{target}"
    )
    assert getattr(config_of(text, trained, [again + target]), section) == node


TOUCH = {"_target_": "os.system", "path": "touch attacked"}
BERT = {"_target_": "transformers.BertConfig", "vocab_size": 9}  # conf/model/bert_spans.yaml
HOSTILE: list[tuple[str, dict[Any, Any], str]] = [
    ("dataset", {"_target_": "os.system"}, "dataset._target_=os.system is not mpframe's own"),
    ("model", {"_target_": ["os.system"]}, "is not mpframe's own"),
    ("model", {"_target_": "mpframe.workloads.images.torch.load"}, "is not mpframe's own"),
    ("model", {"width": [1, [TOUCH]]}, "model.width._target_ is refused"),
    ("trainer", {"ema_decay": TOUCH}, "trainer.ema_decay._target_ is refused"),
    ("model", {"config": {**BERT, "attn_implementation": "a/b"}}, "config._target_ is refused"),
    ("model", {"other": BERT}, "model.other._target_ is refused"),
    ("model", {"config": {**BERT, "vocab_size": BERT}}, "config.vocab_size._target_ is refused"),
    ("model", {"_partial_": True}, "model._partial_ is refused"),
    ("dataset", {"root": "\\${oc.env:HOME}"}, "dataset.root refers to what is not in the file"),
    ("", {3: 4}, "3 is refused"),
    ("", {"model": "os.system"}, "model._target_=None is not mpframe's own"),
    ("", {"trainer": [1]}, "trainer=\\[1\\]: must be a mapping"),
]


@pytest.mark.parametrize(("section", "entries", "text"), HOSTILE)
def test_a_hostile_stored_configuration_is_refused(
    trained: Path, section: str, entries: dict[Any, Any], text: str
) -> None:
    tree = stored_in(trained)
    (tree[section] if section else tree).update(entries)
    with pytest.raises(MpframeError, match=text) as refused:
        config_of(yaml.safe_dump(tree), trained, [])
    assert "\n" not in str(refused.value)


def test_a_hostile_stored_configuration_runs_nothing(
    run_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a checkpoint that is sealed as a real one, and through the whole command."""
    monkeypatch.chdir(run_copy)
    text = yaml.safe_dump(stored_in(run_copy) | {"model": {"width": TOUCH}})
    checkpoint.save(run_copy, replace(checkpoint.read(run_copy), config=text))
    with pytest.raises(MpframeError, match="not mpframe's own"):
        evaluate(run_copy, [], split="val")
    assert not (run_copy / "attacked").exists()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a: &a [x]\nb: [*a, *a]\n", "has no aliases"),
        ("model: !!python/object/apply:os.system ['touch attacked']\n", "not a stored config"),
        ("", "not a stored configuration; use a checkpoint of a run"),
        ("- 1\n", "not a stored configuration"),
        ("[" * 60_000, "at most 16 levels"),
        ("a: " + "x" * 2**16, "at most 65536 letters"),
        ("at: 2026-11-21\n", "at is a date; refused"),
    ],
)
def test_a_hostile_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=text) as refused:
        config_of(content, tmp_path, [])
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "attacked").exists()


def test_a_hostile_optimizer_is_not_looked_at(trained: Path) -> None:
    hostile = {name: {"_target_": "os.system"} for name in ("optimizer", "scheduler")}
    text = yaml.safe_dump(stored_in(trained) | hostile)
    assert config_of(text, trained, []).optimizer["_target_"] == "torch.optim.SGD"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "checkpoint: must be given, e.g. checkpoint=runs/2026-11-21/05-45-42"),
        (["checkpoint=RUN", "-m"], "-m: no such option; give option=value"),
        (["checkpoint=RUN", "weights=emma"], "weights=emma: choose trained, ema; nearest: ema"),
        (["checkpoint=RUN", "split=tset"], "split=tset: choose val, test; nearest: test"),
        (["checkpoint=RUN", "dtype=fp32,amp"], "dtype=fp32,amp: give one value; there is no sweep"),
        (["checkpoint=RUN", "experiment=digits_mlp"], "has no part in an evaluation"),
        (["checkpoint=RUN", "model.widht=3"], "model.widht: no such option; nearest: model.width"),
        (["checkpoint=RUN", "model.width=3"], "has shape (8, 1, 3, 3) in the checkpoint"),
        (["checkpoint=RUN", "out=/nonexistent/x.json"], "x.json: cannot be written (No such"),
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
