"""Hints, doctor, ranges and autopsy on the shipped workloads, each at a small size."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_data import EXPERIMENTS, TINY, tiny

from mpframe.cli.commands.doctor import subject_of
from mpframe.config.command_line import jobs
from mpframe.lab import hints
from mpframe.lab.autopsy.diagnosis import diagnose
from mpframe.lab.doctor import Severity, examine
from mpframe.lab.ranges import KINDS, RangeProbe

# Pairs, dicts, lists of dicts, two losses: each kind of batch and step once in ./dev.
CHEAP = ("digits_mlp", "bert_spans", "detection_ssd", "digits_gan")
ROWS = [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in CHEAP))
    for name in EXPERIMENTS
    if not name.endswith("_small")
]


@pytest.mark.parametrize("experiment", ROWS)
def test_the_tools_see_the_first_step(experiment: str, tiny_data: Path) -> None:
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
