"""Runs in trouble: what is saved, what the report says, and the program that reads it again."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from in_process import StartRun

from mpframe import checkpoint
from mpframe.checkpoint.saving import save_as
from mpframe.cli.commands import autopsy as autopsy_command
from mpframe.core.errors import CheckpointError, DivergedError, MpframeError
from mpframe.lab.autopsy import evidence
from mpframe.lab.ranges import read_ranges

OWN = "model._target_=overflowing.Overflowing"
SHORT = ["dataset=digits", "device=cpu", "dataset.batch_size=32", "trainer.max_steps=3"]
STOPS = "trainer.max_consecutive_skips=4"


def report(folder: Path, step: int = 1) -> str:
    return (evidence.folder_of(folder, step) / "report.md").read_text()


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that fails in its first step."""
    from conftest import train

    folder = tmp_path_factory.mktemp("failed")
    with pytest.raises(DivergedError, match=r"step_00000001/report\.md$"):
        train(folder, OWN, *SHORT, STOPS)
    return folder


def test_a_run_that_ends_as_diverged_points_to_its_report(failed: Path) -> None:
    summary = json.loads((failed / "summary.json").read_text())
    assert summary["status"] == "diverged"
    assert summary["reason"].endswith(f"; see {evidence.folder_of(failed, 1) / 'report.md'}")
    assert [path.name for path in evidence.all_in(failed)] == ["step_00000001"]


def test_the_report_names_the_module_and_the_line_to_type(failed: Path) -> None:
    text = report(failed)
    assert text.startswith("# autopsy of step 1: activation beyond float16 in gain\n")
    assert "- **where**: gain (Gain), op mul, forward pass" in text
    assert "float16 ends at 65504" in text
    assert "'ops.modules={gain:fp32}'   (replayed with it: finite)" in text
    assert "epoch 0, batch 0" in text


def test_the_line_to_type_mends_the_run(tmp_path: Path, start_run: StartRun) -> None:
    summary = start_run(tmp_path, OWN, *SHORT, STOPS, "ops.modules={gain:fp32}")
    assert (summary.steps, summary.skipped_steps) == (3, 0)
    assert not (tmp_path / "autopsy").exists()


def test_the_last_line_says_what_the_autopsy_found(tmp_path: Path, start_run: StartRun) -> None:
    """The backward pass of sqrt at 0 is not finite in any format: no scale and no pin helps."""
    with pytest.raises(DivergedError) as error:
        start_run(tmp_path, "model._target_=overflowing.Root", *SHORT, STOPS)
    report_of = evidence.all_in(tmp_path)[0] / "report.md"
    assert str(error.value) == (
        "trainer.max_consecutive_skips=4 reached: not finite in fp32 too: model or data; "
        f"see {report_of}"
    )
    assert json.loads((tmp_path / "summary.json").read_text())["reason"] == str(error.value)


def test_the_program_says_the_same_again(failed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = report(failed)
    autopsy_command.main([f"run={failed}", OWN])
    assert report(failed) == before
    printed = capsys.readouterr().out
    assert printed.startswith("autopsy of step 1: activation beyond float16 in gain\n")
    autopsy_command.main([f"run={evidence.folder_of(failed, 1)}", OWN])
    assert capsys.readouterr().out == printed


def test_weights_ruined_without_masters_need_masters(
    tmp_path: Path, start_run: StartRun, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DivergedError):
        start_run(tmp_path, "model=mlp", "dtype.master_weights=false", *SHORT, STOPS)
    (step,) = evidence.all_in(tmp_path)
    advice = (
        "start again with dtype.master_weights=true: the optimizer's eps=1e-08 is 0 in float16, "
        "the format it works in"
    )
    assert f"- **do**: {advice}\n" in (step / "report.md").read_text()
    autopsy_command.main([f"run={step}"])
    assert advice in capsys.readouterr().out
    repaired = start_run(tmp_path / "repaired", "model=mlp", "dtype.master_weights=true", *SHORT)
    assert repaired.status == "finished"


def test_evidence_holds_the_step_and_no_code(failed: Path) -> None:
    step, weights, config = evidence.load(evidence.folder_of(failed, 1))
    assert (step.step, step.epoch, step.batch, step.reason) == (1, 0, 0, "the loss is nan")
    assert (step.scales, step.floors, step.scaling) == ({"": 2.0**16}, {"": 1.0}, "Backoff")
    assert len(step.samples[0]) == len(step.batches[0][1]) == 32
    assert weights["first.weight"].dtype == torch.float32
    assert torch.equal(weights["norm.running_mean"], torch.zeros(32))  # As before the step.
    assert "overflowing.Overflowing" in config


def test_a_class_of_the_users_must_be_named_again(
    failed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        autopsy_command.main([f"run={failed}"])
    error = capsys.readouterr().err
    assert "if you trust it, add model._target_=overflowing.Overflowing" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "run: must be given"),
        (["run=/nowhere"], "no readable checkpoint"),
        (["run={failed}", OWN, "trainer.clip_norm=1.0"], "clip_norm=1.0: has no part in an autop"),
        (["run={failed}", "step=7", OWN], "step=7: .* holds the evidence of 1"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], said: str, failed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(MpframeError, match=said) as error:
        autopsy_command.main([argument.format(failed=failed) for argument in arguments])
    assert "\n" not in str(error.value)


def test_damaged_evidence_is_refused(failed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "autopsy" / "step_00000001"
    folder.mkdir(parents=True)
    for file in evidence.folder_of(failed, 1).iterdir():
        content = bytearray(file.read_bytes())
        if file.name == "state.pt":
            content[len(content) // 2] ^= 1
        (folder / file.name).write_bytes(content)
    with pytest.raises(MpframeError, match="damaged"):
        evidence.load(folder)


def changed(failed: Path, folder: Path, **entries: object) -> Path:
    """A sealed copy of the evidence with entries of its state replaced."""
    snapshot = checkpoint.read(evidence.folder_of(failed, 1))
    state = {**snapshot.state, **entries}
    return save_as(folder, replace(snapshot, state=state))


@pytest.mark.parametrize(
    "entries",
    [
        {"scales": {"": -1.0}},
        {"scales": {"": "large"}},
        {"random": [torch.zeros(3), None]},
        {"batches": [1]},
        {"weights": {"first.weight": 1}},
        {"samples": 3},
    ],
)
def test_evidence_that_is_none_is_refused(
    entries: dict[str, object], failed: Path, tmp_path: Path
) -> None:
    folder = changed(failed, tmp_path / "autopsy" / "step_00000001", **entries)
    with pytest.raises(CheckpointError, match="not the evidence of a step"):
        evidence.load(folder)


def test_evidence_that_does_not_fit_the_model_is_said_so(failed: Path, tmp_path: Path) -> None:
    batches = [(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))]
    folder = changed(failed, tmp_path / "autopsy" / "step_00000001", batches=batches)
    with pytest.raises(CheckpointError, match="does not run with this model and data") as error:
        autopsy_command.of_evidence(folder, [OWN])
    assert "\n" not in str(error.value)


def test_a_learning_rate_that_diverges_is_told_from_a_format_that_ends(
    tmp_path: Path, start_run: StartRun
) -> None:
    with pytest.raises(DivergedError, match=r"report\.md$"):
        start_run(tmp_path, "experiment=digits_mlp", "device=cpu", "optimizer.lr=1e4", STOPS)
    (folder,) = evidence.all_in(tmp_path)
    text = (folder / "report.md").read_text()
    assert "diverging, in fp32 too" in text.splitlines()[0]
    assert "lower optimizer.lr" in text


def test_an_fp32_run_that_diverges_gets_its_verdict(tmp_path: Path, start_run: StartRun) -> None:
    sgd = ["optimizer=sgd", "optimizer.lr=1e30"]
    with pytest.raises(DivergedError):
        start_run(tmp_path, *SHORT, "model=mlp", "dtype=fp32", *sgd, STOPS)
    assert "not finite in fp32 too" in report(tmp_path, 2).splitlines()[0]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_scale_that_is_on_its_way_down_is_called_normal(
    tmp_path: Path, start_run: StartRun, accumulate: int
) -> None:
    high = ["loss_scaling=Backoff", "loss_scaling.init_scale=16777216", "callbacks.autopsy.after=2"]
    start_run(tmp_path, "model=mlp", *SHORT, *high, f"trainer.accumulate={accumulate}")
    text = report(tmp_path, 2)
    assert text.startswith("# autopsy of step 2: scale too high (normal)\n")
    assert "2 steps in a row were skipped" in text
    assert "nothing: the scale goes from 8.38861e+06 to" in text


def test_a_static_scale_that_is_too_high_is_named(tmp_path: Path, start_run: StartRun) -> None:
    static = ["loss_scaling=static", "loss_scaling.scale=16777216", STOPS]
    with pytest.raises(DivergedError):
        start_run(tmp_path, "model=mlp", *SHORT, *static)
    assert "the step was skipped at the scaler's floor" in report(tmp_path)
    assert "loss_scaling.scale=" in report(tmp_path)


def test_off_is_off(tmp_path: Path, start_run: StartRun) -> None:
    with pytest.raises(DivergedError) as error:
        start_run(tmp_path, OWN, *SHORT, STOPS, "callbacks.autopsy=null")
    assert "report.md" not in str(error.value)
    assert not (tmp_path / "autopsy").exists()


def test_a_run_is_bit_for_bit_the_same_with_it_and_without(
    tmp_path: Path, start_run: StartRun
) -> None:
    high = ["loss_scaling=Backoff", "loss_scaling.init_scale=16777216", "callbacks.autopsy.after=1"]
    pin = "ops.modules={gain:fp32}"
    ranges = ["numerics=on", "numerics.every=1"]
    for name, switch in (("with", []), ("without", ["callbacks.autopsy=null"])):
        start_run(tmp_path / name, OWN, *SHORT, *high, pin, *ranges, *switch)
    assert evidence.all_in(tmp_path / "with")
    first, second = (
        checkpoint.load(tmp_path / name)["trainer"]["weights"] for name in ("with", "without")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    watched = [read_ranges(tmp_path / name) for name in ("with", "without")]
    assert len(watched[0]) > 3
    for one, other in zip(*watched, strict=True):
        assert np.array_equal(one.rows, other.rows)  # No replay was counted.


def test_a_failing_autopsy_does_not_end_the_run(
    tmp_path: Path,
    start_run: StartRun,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr("mpframe.lab.autopsy.report.diagnose", fail)
    with caplog.at_level(logging.WARNING), pytest.raises(DivergedError) as error:
        start_run(tmp_path, OWN, *SHORT, STOPS)
    assert "the autopsy of a failed step failed: out of memory" in caplog.text
    assert "report.md" not in str(error.value)


@pytest.mark.parametrize(
    ("scale", "verdict", "advice"),
    [
        ("1024", "no fault found", "nothing"),
        ("1e-6", "underflow: scale too low", "loss_scaling.scale=262144"),
    ],
)
def test_on_demand_the_next_step_of_a_checkpoint_is_examined(
    tmp_path: Path,
    start_run: StartRun,
    capsys: pytest.CaptureFixture[str],
    scale: str,
    verdict: str,
    advice: str,
) -> None:
    start_run(tmp_path, "model=mlp", *SHORT, "loss_scaling=static", f"loss_scaling.scale={scale}")
    autopsy_command.main([f"run={tmp_path}"])
    printed = capsys.readouterr().out
    assert printed.startswith(f"autopsy of step 4: {verdict}\n")
    assert advice in printed
    assert (tmp_path / "autopsy_after_step_00000003.md").exists()


def test_two_losses_are_told_apart(tmp_path: Path, start_run: StartRun) -> None:
    lr = "optimizer.parts.generator.lr=1e6"
    with pytest.raises(DivergedError, match=r"report\.md"):
        start_run(tmp_path, "experiment=digits_gan", "device=cpu", lr, STOPS)
    (folder,) = evidence.all_in(tmp_path)
    step, _, _ = evidence.load(folder)
    assert set(step.scales) == {"discriminator", "generator"}
    autopsy_command.main([f"run={tmp_path}"])
    assert "- **loss**: discriminator" in (folder / "report.md").read_text()
