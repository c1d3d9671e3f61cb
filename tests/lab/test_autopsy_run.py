"""Runs in trouble: what is saved, what the report says, and the program that reads it again."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures import Log, Patch, Shown
from in_process import StartRun, train
from vocabulary import differing

from mpframe import checkpoint
from mpframe.checkpoint.saving import save_as
from mpframe.cli.commands import autopsy as autopsy_command
from mpframe.core.errors import CheckpointError, DivergedError, MpframeError
from mpframe.lab.autopsy import evidence
from mpframe.lab.ranges import read_ranges

OWN = "model._target_=planted.beyond"
SHORT = ["dataset=digits", "device=cpu", "dataset.batch_size=32", "trainer.max_steps=3"]
STOPS = "trainer.max_consecutive_skips=4"
HIGH = ["loss_scaling=Backoff", "loss_scaling.init_scale=16777216"]


def report(folder: Path, step: int = 1) -> str:
    return (evidence.folder_of(folder, step) / "report.md").read_text()


def diverge(folder: Path, *words: str) -> str:
    """The text of the error that a run ends with."""
    with pytest.raises(DivergedError) as error:
        train(folder, *SHORT, STOPS, *words)
    return str(error.value)


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that fails in its first step."""
    folder = tmp_path_factory.mktemp("failed")
    assert diverge(folder, OWN).endswith("step_00000001/report.md")
    return folder


def test_a_run_that_diverges_has_a_report(failed: Path, capsys: Shown) -> None:
    summary = json.loads((failed / "summary.json").read_text())
    assert summary["status"] == "diverged"
    assert summary["reason"].endswith(f"; see {evidence.folder_of(failed, 1) / 'report.md'}")
    text = report(failed)
    assert text.startswith("# autopsy of step 1: activation beyond float16 in gain\n")
    assert "- **where**: gain (Gain), op mul, forward pass" in text
    assert "'ops.modules={gain:fp32}'   (replayed with it: finite)" in text
    assert "epoch 0, batch 0" in text
    _, weights, _ = evidence.load(evidence.folder_of(failed, 1))
    assert not weights["norm.running_mean"].any()  # As before the step.
    for folder in (failed, evidence.folder_of(failed, 1)):
        autopsy_command.main([f"run={folder}", OWN])
        assert capsys.readouterr().out.startswith(text.splitlines()[0][2:])
        assert report(failed) == text


def test_the_last_line_says_what_the_autopsy_found(tmp_path: Path) -> None:
    """The backward pass of sqrt at 0 is not finite in any format: no scale and no pin helps."""
    error = diverge(tmp_path, "model._target_=planted.Root")
    assert error == (
        "trainer.max_consecutive_skips=4 reached: not finite in fp32 too: model or data; "
        f"see {evidence.all_in(tmp_path)[0] / 'report.md'}"
    )
    assert json.loads((tmp_path / "summary.json").read_text())["reason"] == error


def test_weights_ruined_without_masters_need_masters(tmp_path: Path) -> None:
    diverge(tmp_path, "model=mlp", "dtype.master_weights=false")
    advice = "start again with dtype.master_weights=true: the optimizer's eps=1e-08 is 0 in float16"
    (step,) = evidence.all_in(tmp_path)
    assert f"- **do**: {advice}, the format it works in\n" in (step / "report.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "run: must be given"),
        ("run=/nowhere", "no readable checkpoint"),
        (f"run={{}} {OWN} trainer.clip_norm=1.0", "clip_norm=1.0: has no part in an autop"),
        (f"run={{}} step=7 {OWN}", "step=7: .* holds the evidence of 1"),
        ("run={}", "if you trust it, add model._target_=planted.beyond"),
    ],
)
def test_mistakes_are_one_line(arguments: str, said: str, failed: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(MpframeError, match=said) as error:
        autopsy_command.main(arguments.format(failed).split())
    assert "\n" not in str(error.value)


def changed(failed: Path, run: Path, **entries: object) -> Path:
    """A sealed copy of the evidence with entries of its state replaced."""
    snapshot = checkpoint.read(evidence.folder_of(failed, 1))
    state = {**snapshot.state, **entries}
    return save_as(evidence.folder_of(run, 1), replace(snapshot, state=state))


@pytest.mark.parametrize(
    ("entry", "value"), [("scales", {"": -1.0}), ("random", [1, None]), ("weights", {"": 1})]
)
def test_what_is_none_is_refused(entry: str, value: object, failed: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not the evidence of a step"):
        evidence.load(changed(failed, tmp_path, **{entry: value}))


def test_evidence_that_does_not_fit_the_model_is_said_so(failed: Path, tmp_path: Path) -> None:
    folder = changed(failed, tmp_path, batches=[(torch.zeros(4, 3), torch.zeros(4).long())])
    with pytest.raises(CheckpointError, match=r"^.*does not run with this model and data.*$"):
        autopsy_command.of_evidence(folder, [OWN])


@pytest.mark.parametrize(
    ("words", "title", "said"),
    [
        ("optimizer.lr=1e4 trainer.max_steps=200", "diverging, in fp32", "lower optimizer.lr"),
        ("dtype=fp32 optimizer=sgd optimizer.lr=1e30", "step 2: not finite in fp32 too", ""),
        ("loss_scaling=static loss_scaling.scale=16777216", "step 1: scale too high", "floor"),
    ],
)
def test_a_rate_is_told_from_a_format(words: str, title: str, said: str, tmp_path: Path) -> None:
    diverge(tmp_path, "model=mlp", *words.split())
    (folder,) = evidence.all_in(tmp_path)
    text = (folder / "report.md").read_text()
    assert title in text.splitlines()[0]
    assert said in text


def test_a_scale_on_its_way_down_is_normal(tmp_path: Path, start_run: StartRun) -> None:
    more = ["callbacks.autopsy.after=2", "trainer.accumulate=3"]
    start_run(tmp_path, "model=mlp", *SHORT, *HIGH, *more)
    text = report(tmp_path, 2)
    assert text.startswith("# autopsy of step 2: scale too high (normal)\n")
    assert "2 steps in a row were skipped" in text
    assert "nothing: the scale goes from 8.38861e+06 to" in text


def test_off_or_failing_it_does_nothing(tmp_path: Path, monkeypatch: Patch, caplog: Log) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr("mpframe.lab.autopsy.report.diagnose", fail)
    failing = diverge(tmp_path / "failing", OWN)
    assert "the autopsy of a failed step failed: out of memory" in caplog.text
    assert diverge(tmp_path / "off", OWN, "callbacks.autopsy=null") == failing
    assert not (tmp_path / "off" / "autopsy").exists()


def test_it_changes_no_bit(tmp_path: Path, start_run: StartRun, monkeypatch: Patch) -> None:
    monkeypatch.setattr("mpframe.lab.range_watch.RangeWatch.draw", lambda self: None)
    options = [OWN, *SHORT, *HIGH, "ops.modules={gain:fp32}", "numerics=on", "numerics.every=1"]
    folders = [tmp_path / name for name in ("with", "without")]
    for folder, own in zip(folders, (".after=1", "=null"), strict=True):
        assert start_run(folder, *options, f"callbacks.autopsy{own}").steps == 3
    assert evidence.all_in(folders[0])
    assert not differing(*(checkpoint.load(folder)["trainer"]["weights"] for folder in folders))
    watched = [read_ranges(folder) for folder in folders]
    assert len(watched[0]) > 3
    for one, other in zip(*watched, strict=True):
        assert np.array_equal(one.rows, other.rows)  # No replay was counted.


@pytest.mark.parametrize(
    ("scale", "verdict", "advice"),
    [
        ("1024", "no fault found", "nothing"),
        ("1e-6", "underflow: scale too low", "loss_scaling.scale=262144"),
    ],
)
def test_on_demand_the_next_step_of_a_checkpoint_is_examined(
    tmp_path: Path, start_run: StartRun, capsys: Shown, scale: str, verdict: str, advice: str
) -> None:
    start_run(tmp_path, "model=mlp", *SHORT, "loss_scaling=static", f"loss_scaling.scale={scale}")
    autopsy_command.main([f"run={tmp_path}"])
    printed = capsys.readouterr().out
    assert printed.startswith(f"autopsy of step 4: {verdict}\n")
    assert advice in printed
    assert (tmp_path / "autopsy_after_step_00000003.md").exists()


def test_two_losses_are_told_apart(tmp_path: Path) -> None:
    words = ["experiment=digits_gan", "device=cpu", "optimizer.parts.generator.lr=1e6"]
    with pytest.raises(DivergedError):
        train(tmp_path, *words, STOPS)
    (folder,) = evidence.all_in(tmp_path)
    assert set(evidence.load(folder)[0].scales) == {"discriminator", "generator"}
    autopsy_command.main([f"run={tmp_path}"])
    assert "- **loss**: discriminator" in (folder / "report.md").read_text()
