"""What an autopsy says, and what it advises to type."""

import math
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from mpframe.core.objective import NamedObjective, supervised
from mpframe.core.precision import Precision
from mpframe.lab.autopsy.diagnosis import Culprit, Diagnosis, Kind
from mpframe.lab.autopsy.evidence import Evidence
from mpframe.lab.autopsy.replay import Case, Pass, Replay, Setting
from mpframe.lab.autopsy.report import Report, report_on
from mpframe.lab.autopsy.watch import OpCall, Trace

FOUND = Culprit(OpCall("0", "linear"), "forward", 1e5, "result", 65504.0, "float16")
STEP = Evidence(
    12, "the loss is nan", [], [range(100, 120)], 2, 5, {"": 1024.0}, {"": 1.0}, "Backoff"
)


def report(
    kind: Kind, scaling: str = "Backoff", floor: float = 1.0, step: Evidence = STEP, **more: object
) -> Report:
    model = nn.Sequential(nn.Linear(2, 2))
    precision = Precision("amp")
    model, _ = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    objective = NamedObjective("", supervised(nn.MSELoss()))
    case = Case(model, precision, [objective], [], {"": 1024.0}, {"": floor}, scaling)
    replays = (Replay(Setting(fp32=True), [Pass(0, "", 1.0, 1e7, Trace(), True)]),)
    arguments: dict[str, object] = {"culprit": FOUND, "replays": replays, **more}
    diagnosis = Diagnosis(kind, **arguments)  # type: ignore[arg-type]
    return report_on(diagnosis, case, replace(step, first_loss=2.0))


def advice(made: Report) -> str:
    return dict(made.facts)["do"]


def test_a_remedy_that_was_tried_is_given_as_words_for_the_command_line() -> None:
    remedy = Setting(pins=("fc", "0"), denied=("mul",))
    made = report(Kind.BEYOND_FORMAT, remedy=remedy, proven=True)
    words = "'ops.modules={fc:fp32}' ops.modules.0=fp32 'ops.deny+=[mul]'"
    assert advice(made) == f"add to the command line: {words}   (replayed with it: finite)"


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
    normal = "(normal)" if floor == 1.0 else ", and the scaler does not go lower"
    assert made.title == f"autopsy of step 12: scale too high {normal}".replace(" ,", ",")
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


def test_a_remedy_that_does_not_help_is_not_sold_as_one() -> None:
    made = report(Kind.BEYOND_FORMAT, remedy=Setting(pins=("fc",)), proven=False)
    assert made.title == "autopsy of step 12: activation beyond float16 in 0"
    assert advice(made) == (
        "train with dtype=fp32 or dtype.half=bfloat16; 'ops.modules={fc:fp32}' alone does not help"
    )


@pytest.mark.parametrize(
    ("direction", "call", "said"),
    [
        ("data", OpCall("", "inputs"), "correct or remove the samples"),
        ("weights", OpCall("0", "bias"), "lower optimizer.lr; or start from an earlier"),
        ("forward", OpCall("0", "linear"), "no format helps: lower optimizer.lr"),
    ],
)
def test_what_fp32_cannot_hold_either(direction: str, call: OpCall, said: str) -> None:
    culprit = replace(FOUND, direction=direction, call=call, value=math.nan, samples=(103, 104))
    made = report(Kind.NOT_FINITE_IN_FP32, culprit=culprit)
    assert advice(made).startswith(said)
    assert dict(made.facts)["samples"] == "103, 104 (2 of 20), epoch 2, batch 5"
    if direction == "weights":  # Before any update they were never finite.
        never = advice(report(Kind.NOT_FINITE_IN_FP32, culprit=culprit, step=FIRST))
        assert never.startswith("start from a checkpoint whose weights are finite")


CLIPS, FIRST = replace(STEP, clips=True), replace(STEP, updates=0)
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
    loss = "in fp32 too the loss is 1e+07, and it was 2 at the first step"
    assert advice(report(Kind.DIVERGING, step=step)) == f"{advised}: {loss}"


def test_the_terminal_and_the_page_say_the_same() -> None:
    made = report(Kind.DIVERGING)
    text, page = made.text(), made.markdown()
    assert text.splitlines()[0] == page.splitlines()[0].removeprefix("# ") == made.title
    for word, sentence in made.facts:
        assert f"- **{word}**: {sentence}" in page
        assert re.search(rf"^  {word} +{re.escape(sentence)}$", text, re.M)
