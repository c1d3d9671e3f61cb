"""What an autopsy says, and what it advises to type."""

import math
import re
from dataclasses import replace

import pytest
from faulty_steps import case_of
from torch import nn

from mpframe.lab.autopsy.diagnosis import Culprit, Diagnosis, Kind
from mpframe.lab.autopsy.evidence import Evidence
from mpframe.lab.autopsy.replay import Pass, Replay, Setting
from mpframe.lab.autopsy.report import Report, report_on
from mpframe.lab.autopsy.watch import OpCall, Trace

FOUND = Culprit(OpCall("0", "linear"), "forward", 1e5, "result", 65504.0, "float16")
STEP = Evidence(
    12, "the loss is nan", [], [range(100, 120)], 2, 5, {"": 1024.0}, {"": 1.0}, "Backoff"
)
CLIPS, FIRST = replace(STEP, clips=True), replace(STEP, updates=0)
REPLAYS = (Replay(Setting(fp32=True), [Pass(0, "", 1.0, 1e7, Trace(), True)]),)


def report(
    kind: Kind, scaling: str = "Backoff", floor: float = 1.0, step: Evidence = STEP, **more: object
) -> Report:
    case = case_of(nn.Sequential(nn.Linear(2, 2)), "amp", batches=[])
    case = replace(case, floors={"": floor}, scaling=scaling)
    diagnosis = Diagnosis(kind, **{"culprit": FOUND, "replays": REPLAYS, **more})
    return report_on(diagnosis, case, replace(step, first_loss=2.0))


def advice(made: Report) -> str:
    return dict(made.facts)["do"]


def test_a_remedy_is_given_as_words_and_one_that_does_not_help_is_not_sold_as_one() -> None:
    remedy = Setting(pins=("fc", "0"), denied=("mul",))
    words = "'ops.modules={fc:fp32}' ops.modules.0=fp32 'ops.deny+=[mul]'"
    proven = f"add to the command line: {words}   (replayed with it: finite)"
    assert advice(report(Kind.BEYOND_FORMAT, remedy=remedy, proven=True)) == proven
    made = report(Kind.BEYOND_FORMAT, remedy=Setting(pins=("fc",)), proven=False)
    assert made.title == "autopsy of step 12: activation beyond float16 in 0"
    assert advice(made) == (
        "train with dtype=fp32 or dtype.half=bfloat16; 'ops.modules={fc:fp32}' alone does not help"
    )


@pytest.mark.parametrize(
    ("scaling", "floor", "said"),
    [
        ("Backoff", 1.0, "nothing: the scale goes from 1024 to 16 by itself, in about 6 skipped"),
        ("Backoff", 64.0, "loss_scaling.min_scale=16: there the step is finite"),
        ("static", 1024.0, "loss_scaling.scale=16 is finite; or loss_scaling=Backoff"),
    ],
)
def test_a_scale_that_is_too_high(scaling: str, floor: float, said: str) -> None:
    made = report(Kind.SCALE_TOO_HIGH, scaling, floor, octaves=-6, proven=True)
    normal = " (normal)" if floor == 1.0 else ", and the scaler does not go lower"
    assert made.title == f"autopsy of step 12: scale too high{normal}"
    assert advice(made).startswith(said)


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ("static", "loss_scaling.scale=8192: at scale 8192 it is 2%"),
        ("none", "loss_scaling=static loss_scaling.scale=8192: "),
        ("LogMax", "loss_scaling.init_scale=8192: "),
    ],
)
def test_a_scale_that_is_too_low(scaling: str, said: str) -> None:
    shares = {"underflow": 0.9, "underflow_then": 0.02, "zeros": 0.4}
    made = report(Kind.UNDERFLOW, scaling, octaves=3, proven=True, **shares)
    assert advice(made).startswith(said)
    assert "90% of all gradients are below it, and 40% are 0" in dict(made.facts)["value"]


@pytest.mark.parametrize(
    ("step", "direction", "said"),
    [
        (STEP, "data", "correct or remove the samples"),
        (STEP, "weights", "lower optimizer.lr; or start from an earlier"),
        (FIRST, "weights", "start from a checkpoint whose weights are finite"),  # Never were.
        (STEP, "forward", "no format helps: lower optimizer.lr"),
    ],
)
def test_what_fp32_cannot_hold_either(step: Evidence, direction: str, said: str) -> None:
    culprit = replace(FOUND, direction=direction, value=math.nan, samples=(103, 104))
    made = report(Kind.NOT_FINITE_IN_FP32, culprit=culprit, step=step)
    assert advice(made).startswith(said)
    assert dict(made.facts)["samples"] == "103, 104 (2 of 20), epoch 2, batch 5"


ZERO = "look for a division by zero, a logarithm of zero, or first weights that are too large"


@pytest.mark.parametrize(
    ("step", "advised", "cause"),
    [
        (STEP, "lower optimizer.lr or set trainer.clip_norm", "model, data or learning rate"),
        (CLIPS, "lower optimizer.lr", "model, data or learning rate"),
        (FIRST, ZERO, "model or data"),
    ],
)
def test_what_is_set_or_cannot_be_the_cause_is_not_advised(
    step: Evidence, advised: str, cause: str
) -> None:
    made = report(Kind.NOT_FINITE_IN_FP32, step=step)
    then = "and look at these samples and at this op's inputs"
    assert advice(made) == f"no format helps: {advised}, {then}"
    assert made.title == f"autopsy of step 12: not finite in fp32 too: {cause}"
    made = report(Kind.DIVERGING, step=step)
    loss = "in fp32 too the loss is 1e+07, and it was 2 at the first step"
    assert advice(made) == f"{advised}: {loss}"
    assert made.text().startswith(f"{made.title}\n")
    assert made.markdown().startswith(f"# {made.title}\n")
    for word, sentence in made.facts:  # The terminal and the page say the same.
        assert f"- **{word}**: {sentence}" in made.markdown()
        assert re.search(rf"^  {word} +{re.escape(sentence)}$", made.text(), re.M)
