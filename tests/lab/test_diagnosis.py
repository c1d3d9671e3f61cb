"""Planted faults, and what the autopsy says of them: module, direction and diagnosis."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from typing import Any

import pytest
import torch
from faulty_steps import (
    ROWS,
    Each,
    attention,
    case_of,
    conv,
    data,
    exp,
    large,
    linear,
    loud,
    louder,
    net,
    prepared,
    recurrent,
    times,
)
from torch import nn

from mpframe.core.casting.op_lists import OpLists
from mpframe.core.objective import NamedObjective, StepOutput, supervised
from mpframe.lab.autopsy.diagnosis import Culprit, Diagnosis, Kind, diagnose, underflow_share
from mpframe.lab.autopsy.evidence import Evidence
from mpframe.lab.autopsy.replay import Setting, replay
from mpframe.lab.autopsy.report import report_on
from mpframe.lab.autopsy.watch import OUTSIDE, OpCall

BEYOND, TOO_HIGH, NONE = Kind.BEYOND_FORMAT, Kind.SCALE_TOO_HIGH, Kind.NO_FAULT
FP32, LOW = Kind.NOT_FINITE_IN_FP32, Kind.UNDERFLOW
CROSS_ENTROPY = supervised(nn.CrossEntropyLoss())


def blamed(diagnosis: Diagnosis) -> Culprit:
    assert diagnosis.culprit is not None
    return diagnosis.culprit


MODES = cycle(product(["mixed", "amp"], ["emulated", "native"]))


def fault(
    name: str, middle: Any, module: str, op: str = "", kind: Kind = BEYOND, **options: Any
) -> Any:
    direction = options.pop("direction", "forward")
    return pytest.param(next(MODES), middle, options, (module, op, kind, direction), id=name)


HALF_EXP = OpLists.named().moved({"exp": "allow"})
# Small numbers in front of a large factor: the forward pass fits, the backward does not.
UNBALANCED = partial(nn.Sequential, times(1e-6), times(1e6))
BACK = {"direction": "backward"}


@pytest.mark.parametrize(
    ("mode", "middle", "options", "found"),
    [
        fault("linear forward", lambda: large(linear()), "2", "linear"),
        fault("conv forward", lambda: large(conv()), "2.1", "conv2d"),
        fault("transposed", lambda: large(conv(nn.ConvTranspose2d)), "2.1", "conv_transpose2d"),
        fault("attention forward", lambda: large(attention(), 400.0), "2.inner"),
        fault("product forward", lambda: times(1e6), "2", "mul"),
        fault("exp", lambda: exp(13.0), "2", "exp", ops=HALF_EXP),
        fault("exp in fp32", lambda: nn.Sequential(exp(13.0), linear()), "2.0"),
        fault("exp beyond fp32", lambda: exp(100.0), "2", "exp", FP32),
        fault("linear backward", lambda: loud(linear()), "2.loud", **BACK),
        fault("own function", lambda: louder(1e9), "2", "_Louder", **BACK),
        fault("product backward", UNBALANCED, "2.1", **BACK),
        fault("beyond fp32 backward", lambda: louder(1e38 * 1e3), "2", "", FP32, **BACK),
        fault("scale too high", nn.Identity, OUTSIDE, "", TOO_HIGH, scale=2.0**22, **BACK),
        fault("scale too low", nn.Identity, "", "", LOW, scale=2.0**-12, **BACK),
    ],
)
def test_a_planted_fault_is_found(mode: Any, middle: Any, options: Any, found: Any) -> None:
    torch.manual_seed(0)  # `large` weights drawn at random overflow in most draws, not in all.
    diagnosis = diagnose(case_of(net(middle()), *mode, **options))
    culprit, (module, op, kind, direction) = blamed(diagnosis), found
    call = culprit.origin or culprit.call
    assert (diagnosis.kind, culprit.direction) == (kind, direction)
    assert (call.module, call.op) == (module or call.module, op or call.op)
    if kind is BEYOND:
        assert diagnosis.proven
        assert culprit.value > culprit.limit == 65504.0


@pytest.mark.parametrize("factor", [1.0, 64.0])
def test_a_product_that_saturates_is_named(factor: float) -> None:
    """The history knows of values 64 times smaller; behind the layer a norm makes up for them."""
    torch.manual_seed(0)
    model = nn.Sequential(linear(), times(1.0), linear(), nn.LayerNorm(16), linear())
    case, masters = prepared(
        model, "mixed", "emulated", "bfloat16", products="fp8_delayed", scale=1.0
    )
    with case.precision.cast():
        y = case.model(data()[0])
    nn.functional.cross_entropy(y.float(), data()[1]).backward()
    masters.step()
    model[1].function = times(factor)
    diagnosis = diagnose(case)
    found = diagnosis.saturation
    if factor == 1.0:
        assert (diagnosis.kind, found) == (NONE, None)
        return
    assert found is not None
    assert (diagnosis.kind, found.layer, found.operand) == (Kind.SATURATED, "2", "forward.x")
    # Of values cut off at 1/64 of the largest 63/64 of nearly all is lost: below 1 dB.
    assert found.noise.saturated > 0.5
    assert found.noise.snr_db < 1
    step = Evidence(1, "asked", [], [], 0, 0, {"": 1.0}, {}, "none")
    text = report_on(diagnosis, case, step).text()
    assert "autopsy of step 1: saturated: beyond the scale of a product" in text
    assert "where  2, operand forward.x of its products" in text
    assert "add to the command line: ops.modules.2=none, which keeps its products in half" in text


@pytest.mark.parametrize(("mode", "bad"), [("fp32", "nan"), ("mixed", "inf")])
def test_a_bad_sample_is_named_by_its_path_and_index(mode: str, bad: str) -> None:
    inputs, targets = data((3,), float(bad))
    more = {"batches": [(inputs, targets)], "samples": [range(100, 100 + ROWS)]}
    case = case_of(net(nn.Identity()), mode, **more)
    nested = {"views": [torch.zeros(ROWS), inputs], "y": targets}
    whole = NamedObjective("", lambda m, batch: CROSS_ENTROPY(m, (batch["views"][1], batch["y"])))
    for own, name in (
        (case, "inputs"),
        (replace(case, objectives=[whole], batches=[nested]), "views[1]"),
    ):
        diagnosis = diagnose(own)
        culprit = blamed(diagnosis)
        assert (diagnosis.kind, culprit.direction, culprit.samples) == (FP32, "data", (103,))
        assert culprit.call.op == name


@pytest.mark.parametrize("mode", ["fp32", "mixed"])
def test_a_weight_that_is_nan_is_named(mode: str) -> None:
    case, masters = prepared(net(linear()), mode)
    with torch.no_grad():
        case.model[2].bias[1] = masters.master_of(case.model[2].bias)[1] = float("nan")
    diagnosis = diagnose(case)
    assert (diagnosis.kind, blamed(diagnosis).direction) == (FP32, "weights")
    assert blamed(diagnosis).call == OpCall("2", "bias")


@pytest.mark.parametrize("mode", ["mixed", "amp"])
def test_samples_that_overflow_are_named(mode: str) -> None:
    more = {"batches": [data((1, 6), 1e6)], "samples": [range(50, 50 + ROWS)]}
    diagnosis = diagnose(case_of(net(linear()), mode, **more))
    assert (diagnosis.kind, blamed(diagnosis).call.module) == (BEYOND, "0")
    assert blamed(diagnosis).samples == (51, 56)


@pytest.mark.parametrize(("mode", "first_loss"), [("mixed", None), ("mixed", 1.4), ("amp", 1.4)])
def test_weights_that_ran_away_are_diverging(mode: str, first_loss: float | None) -> None:
    torch.manual_seed(0)
    model = large(nn.Sequential(linear(), linear(), linear(), nn.Linear(16, 4)), 1e4)
    # Who does not know what the loss was can only see large activations.
    kind = BEYOND if first_loss is None else Kind.DIVERGING
    assert diagnose(case_of(model, mode, first_loss=first_loss)).kind is kind


def test_an_op_of_the_model_itself_moves_to_fp32() -> None:
    body, head = linear(), nn.Linear(16, 4)
    diagnosis = diagnose(case_of(Each(lambda x: head(body(x) * 1e6 / 1e6), body=body, head=head)))
    assert (diagnosis.kind, diagnosis.proven) == (BEYOND, True)
    assert diagnosis.remedy == Setting(octaves=-10, denied=("mul",))


def masked() -> nn.Module:
    return Each(lambda x: x.masked_fill(x > 0.5, float("-inf")).softmax(dim=-1) + 0.0 * x)


def masked_by_adding() -> nn.Module:
    own = Each(lambda x: (x + own.mask).softmax(dim=-1) + 0.0 * x)
    own.register_buffer("mask", torch.tensor([0.0, float("-inf")]).repeat_interleave(8))
    return own


def clamped() -> nn.Module:
    """A quotient that is infinite in any format, and clamped."""
    return Each(lambda x: x * (1.0 / x.detach().relu()).clamp(max=1.0))


@pytest.mark.parametrize("harmless", [masked, masked_by_adding, clamped])
def test_an_infinity_that_does_no_harm_is_no_fault(harmless: Callable[[], nn.Module]) -> None:
    assert diagnose(case_of(net(harmless()))).kind is NONE
    beyond = diagnose(case_of(net(nn.Sequential(harmless(), times(1e7), linear()))))
    call = blamed(beyond).origin or blamed(beyond).call
    assert (beyond.kind, call.module) == (BEYOND, "2.1")
    if harmless is not clamped:  # A mask is not taken for what fp32 cannot hold.
        diagnosis = diagnose(case_of(net(nn.Sequential(harmless(), exp(100.0)))))
        assert (diagnosis.kind, blamed(diagnosis).call) == (FP32, OpCall("2.1", "exp"))


def test_the_bad_micro_batch_is_named() -> None:
    good, bad = data(), data(tuple(range(ROWS)), 1e6)
    diagnosis = diagnose(case_of(net(nn.Identity()), batches=[good, bad, good]))
    assert (diagnosis.kind, blamed(diagnosis).batch) == (BEYOND, 1)


def test_only_the_loss_that_was_skipped_is_judged() -> None:
    base = case_of(nn.ModuleDict({"a": net(nn.Identity()), "b": net(times(1e6))}))

    def loss_of(part: str, model: Any, batch: Any) -> StepOutput:
        return CROSS_ENTROPY(model[part], batch)

    parts = {n: list(base.model[n].parameters()) for n in "ab"}
    objectives = [NamedObjective(n, partial(loss_of, n), parameters=parts[n]) for n in "ab"]
    case = replace(base, objectives=objectives, scales={"a": 8.0, "b": 8.0})
    culprit = blamed(diagnose(case))
    assert (culprit.call.module, culprit.objective) == ("b.2", "b")
    assert diagnose(replace(case, skipped=frozenset("a"))).kind is NONE


@pytest.mark.parametrize(("exponent", "floor"), [(18, 1.0), (20, 2.0**16), (22, 2.0**-8)])
def test_the_scale_that_is_named_is_the_largest_that_does(exponent: int, floor: float) -> None:
    case = case_of(net(nn.Identity()), scale=2.0**exponent, floors={"": floor})
    diagnosis = diagnose(case)
    assert diagnosis.kind is TOO_HIGH
    assert replay(case, Setting(octaves=diagnosis.octaves)).finite
    assert not replay(case, Setting(octaves=diagnosis.octaves + 1)).finite


def test_below_one_a_scale_is_tried_only_where_the_scaler_may_go_there() -> None:
    case = case_of(net(louder(2.0**19)), scale=4.0)
    assert diagnose(case).kind is BEYOND
    lower = diagnose(replace(case, floors={"": 2.0**-12}))
    higher = diagnose(replace(case, scales={"": 2.0**10}, floors={"": 2.0**-12}))
    assert (lower.kind, lower.octaves) == (TOO_HIGH, higher.octaves + 8)


def test_a_scale_that_would_lose_the_other_gradients_is_not_the_way_out() -> None:
    """Two branches, the gradients of one 2^30 times those of the other."""
    torch.manual_seed(0)
    layers = nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 16)
    quiet = nn.Sequential(*layers, louder(2.0**-16))
    noisy = nn.Sequential(nn.Linear(16, 2), louder(2.0**14), nn.Linear(2, 16))
    wide = Each(lambda x: quiet(x) + noisy(x), quiet=quiet, loud=noisy)
    diagnosis = diagnose(
        case_of(nn.Sequential(wide, nn.LayerNorm(16), nn.Linear(16, 4)), scale=2.0**16)
    )
    lower = [one for one in diagnosis.replays if not one.setting.recast and one.setting.octaves < 0]
    assert any(one.finite for one in lower)
    assert (diagnosis.kind, diagnosis.proven) == (BEYOND, True)
    assert all(pin.startswith("0.loud") for pin in diagnosis.remedy.pins)


@pytest.mark.parametrize("mode", ["mixed", "amp"])
def test_a_quarter_of_the_gradients_may_be_lost(mode: str) -> None:
    case = case_of(net(linear()), mode)
    full = replay(case, Setting(fp32=True))
    kinds, lost = set(), 0
    for exponent in range(6, -14, -2):
        lower = replace(case, scales={"": 2.0**exponent})
        underflow, found = underflow_share(replay(lower, Setting()), full), diagnose(lower)
        assert found.underflow == underflow >= found.zeros
        assert found.kind is (LOW if underflow > 0.25 else NONE)
        lost += underflow > found.zeros > 0
        kinds.add((found.kind, underflow > 0))
    assert kinds == {(NONE, False), (NONE, True), (LOW, True)}
    assert lost  # Some are 0 where others are only small.


def test_gradients_that_are_all_0_are_an_underflow() -> None:
    """The loss itself is in fp32, so the size of its gradient does not bound the scale."""

    def faint(model: nn.Module, batch: Any) -> StepOutput:
        output = CROSS_ENTROPY(model, batch)
        return replace(output, loss=output.loss.float() * 1e-9)

    case = case_of(net(linear()), scale=1.0)
    diagnosis = diagnose(replace(case, objectives=[NamedObjective("", faint)]))
    assert (diagnosis.kind, diagnosis.underflow, diagnosis.zeros) == (LOW, 1.0, 1.0)
    assert diagnosis.underflow_then < 0.1


@pytest.mark.parametrize(
    ("layer", "mode"),
    [
        (attention, ("mixed", "emulated", "float16")),
        (recurrent, ("amp", "native", "float16")),
        (conv, ("mixed", "native", "bfloat16")),
    ],
)
def test_a_step_without_fault_is_called_so(layer: Any, mode: tuple[str, ...]) -> None:
    middle = nn.Sequential(layer(), nn.BatchNorm1d(16), nn.Dropout(0.5))
    assert diagnose(case_of(net(middle), *mode)).kind is NONE
