"""Hints, doctor, ranges, autopsy and search on the shipped workloads, each at a small size."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from in_process import StartRun
from tiny_experiments import EXPERIMENTS, TINY, tiny

from mpframe.cli.commands import search as search_command
from mpframe.cli.commands.doctor import subject_of
from mpframe.config.command_line import jobs
from mpframe.lab import hints
from mpframe.lab.autopsy.diagnosis import diagnose
from mpframe.lab.doctor import Severity, examine
from mpframe.lab.ranges import KINDS, RangeProbe

# Pairs, dicts, lists of dicts, two losses, recurrent layers: each kind of batch and step once.
KINDS_OF_WORK = ("digits_mlp", "bert_spans", "detection_ssd", "digits_gan", "speech_lstm")
WHOLE = [name for name in EXPERIMENTS if not name.endswith("_small")]


def rows(names: list[str], cheap: tuple[str, ...]) -> list[object]:
    return [n if n in cheap else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.parametrize("experiment", rows(WHOLE, KINDS_OF_WORK[:-1]))
def test_it_starts_without_a_hint_and_the_tools_see_its_first_step(
    experiment: str, tiny_data: Path
) -> None:
    assert sorted(TINY) == EXPERIMENTS
    (job,) = jobs([*tiny(experiment, tiny_data), "device=cpu", "dtype=mixed"])
    own = subject_of(job.config, job.overrides)
    assert hints.hints_on(own) == []
    assert [str(f) for f in examine(own) if f.severity is Severity.ERROR] == []
    # At a scale of 2^40 the gradient of the loss itself is beyond float16.
    loud = replace(own.case, scales=dict.fromkeys(own.case.scales, 2.0**40))
    culprit = diagnose(loud).culprit
    assert culprit is not None
    assert (culprit.direction, culprit.value > culprit.limit) == ("backward", True)
    probe = RangeProbe(own.trainer, torch.float16)
    own.trainer.train_step(own.batch)
    ranges = probe.ranges()
    assert all(ranges.bins(kind).sum() > 0 or kind == "updates" for kind in KINDS)


@pytest.mark.parametrize("experiment", rows(list(KINDS_OF_WORK), ("digits_gan",)))
def test_the_search_ends_with_lists_to_use(
    experiment: str, tiny_data: Path, start_run: StartRun, tmp_path: Path
) -> None:
    small = ["batches=1", "prove=1", "seeds=1", "target=0.5", f"out={tmp_path}"]
    words = [*tiny(experiment, tiny_data), "device=cpu", "dtype=mixed"]
    search_command.main([*words, *small, "callbacks.progress_bar=null"])
    found = yaml.safe_load((tmp_path / "ops.yaml").read_text())
    pins = ",".join(f"{name}:{pin}" for name, pin in found["modules"].items())
    lists = ["trainer.max_steps=2", "trainer.eval_every=2", f"ops.modules={{{pins}}}"]
    assert start_run(tmp_path / "run", *words, *lists).status == "finished"
