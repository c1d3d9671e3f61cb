"""Runs whose batches are dicts or objects of a user's own: trained, resumed, looked into."""

from pathlib import Path

import pytest
import torch
from in_process import StartRun, assert_same_run, cut
from own_parts import Texted

from mpframe.cli.commands import autopsy as autopsy_command
from mpframe.core.errors import DataError, DivergedError
from mpframe.lab.autopsy import evidence

OWN = [
    "model=own", "model._target_=own_parts.Reader", "dataset=own",
    "dataset._target_=own_parts.texts", "dataset.batch_size=8", "device=cpu",
]  # fmt: skip


def test_a_resumed_run_and_one_of_objects_equal_the_undisturbed_one(
    start_run: StartRun, tmp_path: Path
) -> None:
    """Twelve steps are an epoch of seven and five more; the cut is in the first one."""
    options = [*OWN, "trainer.max_steps=12", "trainer.checkpoint_every=4", "trainer.keep_last=100"]
    whole = start_run(tmp_path / "whole", *options)
    resumed = cut(tmp_path / "whole", tmp_path / "resumed")
    start_run(resumed, *options, "dataset.workers=2", "resume=auto")
    assert_same_run(tmp_path / "whole", resumed)
    objects = start_run(tmp_path / "objects", *options, "+dataset.as_object=true")
    assert (whole.train_loss, whole.val_loss) == (objects.train_loss, objects.val_loss)


def test_the_autopsy_keeps_such_a_batch_and_names_its_samples(
    start_run: StartRun, tmp_path: Path
) -> None:
    beyond = "+model.gain=1e6", "trainer.max_consecutive_skips=3", "trainer.max_steps=12"
    with pytest.raises(DivergedError, match=r"report\.md"):
        start_run(tmp_path, *OWN, *beyond, "+dataset.as_object=true")
    (folder,) = evidence.all_in(tmp_path)
    step, _, _ = evidence.load(folder)
    (batch,) = step.batches
    assert type(batch) is dict
    assert [f"text {index}" for index in step.samples[0]] == batch["names"]
    written = (folder / "report.md").read_text()
    assert "beyond float16" in written.splitlines()[0]
    again = autopsy_command.of_evidence(folder, [OWN[1], OWN[3]])  # The classes, named once more.
    assert again.markdown() == written
    example = Texted(torch.zeros(1), torch.zeros(1), ["text"])
    assert type(step.like(example).batches[0]) is Texted


BOXES = [
    "model=own", "model._target_=own_parts.detector", "dataset=own",
    "dataset._target_=own_parts.pictures", "dataset.batch_size=3", "device=cpu", "trainer.epochs=1",
]  # fmt: skip


def test_lists_of_pictures_of_different_sizes(start_run: StartRun, tmp_path: Path) -> None:
    done = start_run(tmp_path / "run", *BOXES, "dtype=mixed")
    assert (done.status, done.steps, done.samples) == ("finished", 5, 15)
    # The mean over the samples, not over the batches: the last one of validation has one picture.
    assert done.val_metric is not None
    # Each loss is a mean in fp32 of 12 squared differences: 3 + 12 roundings of at most 2^-24.
    assert done.val_loss == pytest.approx(done.val_metric**2, rel=15 * 2.0**-24)
    with pytest.raises(DataError, match=r"sample 11 holds NaN or inf in its targets\.boxes"):
        start_run(tmp_path / "bad", *BOXES, "+dataset.bad=11")
