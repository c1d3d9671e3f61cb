"""Planted faults, and what the autopsy says of them: module, direction and diagnosis."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
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
    total,
)
from torch import Tensor, nn

from mpframe.core.casting.op_lists import OpLists
from mpframe.core.objective import NamedObjective, StepOutput, supervised
from mpframe.lab.autopsy.diagnosis import Culprit, Diagnosis, Kind, diagnose, underflow_share
from mpframe.lab.autopsy.evidence import Evidence
from mpframe.lab.autopsy.replay import Setting, replay
from mpframe.lab.autopsy.report import report_on
from mpframe.lab.autopsy.watch import OUTSIDE, OpCall
from mpframe.training.objectives import model_loss

MODES = [(mode, compute) for mode in ("mixed", "amp") for compute in ("emulated", "native")]
BEYOND, TOO_HIGH = Kind.BEYOND_FORMAT, Kind.SCALE_TOO_HIGH
FP32, LOW = Kind.NOT_FINITE_IN_FP32, Kind.UNDERFLOW


def blamed(diagnosis: Diagnosis) -> Culprit:
    assert diagnosis.culprit is not None
    return diagnosis.culprit


@dataclass(frozen=True)
class Fault:
    """What is planted and what the autopsy has to say."""

    name: str
    middle: Callable[[], nn.Module]
    module: str
    kind: Kind = BEYOND
    direction: str = "forward"
    options: dict[str, Any] = field(default_factory=dict)
    op: str | None = None


HALF = {"ops": OpLists.named().moved({"exp": "allow", "sum": "allow"})}
BACK = "backward"
# Small numbers in front of a large factor: the forward pass fits, the backward does not.
UNBALANCED = partial(nn.Sequential, times(1e-6), times(1e6))

FAULTS = [
    Fault("linear forward", lambda: large(linear()), "2", op="linear"),
    Fault("conv1d forward", lambda: large(conv(1)), "2.1", op="conv1d"),
    Fault("conv2d forward", lambda: large(conv(2)), "2.1", op="conv2d"),
    Fault("conv3d forward", lambda: large(conv(3)), "2.1", op="conv3d"),
    Fault("transposed", lambda: large(conv(2, True)), "2.1", op="conv_transpose2d"),
    Fault("attention forward", lambda: large(attention(), 400.0), "2.inner"),
    Fault("product forward", lambda: times(1e6), "2", op="mul"),
    Fault("exp", lambda: exp(13.0), "2", op="exp", options=HALF),
    Fault("exp in fp32", lambda: nn.Sequential(exp(13.0), linear()), "2.0"),
    Fault("exp beyond fp32", lambda: exp(100.0), "2", FP32, op="exp"),
    Fault("sum", total, "2", op="sum", options=HALF),
    Fault("sum in fp32", lambda: nn.Sequential(total(), linear()), "2.0"),
    Fault("linear backward", lambda: loud(linear()), "2.loud", BEYOND, BACK),
    Fault("conv backward", lambda: loud(conv(2)), "2.loud", BEYOND, BACK),
    Fault("own function", lambda: louder(1e9), "2", BEYOND, BACK, op="_Louder"),
    Fault("product backward", UNBALANCED, "2.1", BEYOND, BACK),
    Fault("beyond fp32 backward", lambda: louder(1e38 * 1e3), "2", FP32, BACK),
    Fault("scale too high", nn.Identity, OUTSIDE, TOO_HIGH, BACK, {"scale": 2.0**22}),
    Fault("scale too low", nn.Identity, "", LOW, BACK, {"scale": 2.0**-12}),
]


@pytest.mark.parametrize(
    ("fault", "mode", "compute"),
    [pytest.param(f, *MODES[n % 4], id=f"{f.name}-{n % 4}") for n, f in enumerate(FAULTS)],
)
def test_a_planted_fault_is_found(fault: Fault, mode: str, compute: str) -> None:
    torch.manual_seed(0)  # `large` weights drawn at random overflow in most draws, not in all.
    diagnosis = diagnose(case_of(net(fault.middle()), mode, compute, **fault.options))
    culprit = blamed(diagnosis)
    assert diagnosis.kind is fault.kind
    call = culprit.origin or culprit.call
    assert culprit.direction == fault.direction
    assert call.module == (fault.module or call.module)
    assert call.op == (fault.op or call.op)
    if fault.kind is BEYOND:
        assert diagnosis.proven
        assert culprit.value > culprit.limit == 65504.0


@pytest.mark.parametrize("factor", [1.0, 64.0])
def test_a_product_that_saturates_is_named(factor: float) -> None:
    """The history knows of values 64 times smaller; behind the layer a norm makes up for them."""
    torch.manual_seed(0)
    model = nn.Sequential(linear(), times(1.0), linear(), nn.LayerNorm(16), linear())
    case, masters = prepared(model, half="bfloat16", products="fp8_delayed", scale=1.0)
    with case.precision.cast():
        y = case.model(data()[0])
    nn.functional.cross_entropy(y.float(), data()[1]).backward()
    masters.step()
    model[1].function = times(factor)
    diagnosis = diagnose(case)
    found = diagnosis.saturation
    if factor == 1.0:
        assert (diagnosis.kind, found) == (Kind.NO_FAULT, None)
        return
    assert diagnosis.kind is Kind.SATURATED
    assert found is not None
    assert (found.layer, found.operand) == ("2", "forward.x")
    # Of values cut off at 1/64 of the largest 63/64 of nearly all is lost: below 1 dB.
    assert found.noise.saturated > 0.5
    assert found.noise.snr_db < 1
    step = Evidence(1, "asked", [], [], 0, 0, {"": 1.0}, {}, "none")
    text = report_on(diagnosis, case, step).text()
    assert "autopsy of step 1: saturated: beyond the scale of a product" in text
    assert "where  2, operand forward.x of its products" in text
    assert "add to the command line: ops.modules.2=none, which keeps its products in half" in text


@pytest.mark.parametrize(("mode", "bad"), [("fp32", "nan"), ("mixed", "inf"), ("amp", "nan")])
def test_a_bad_sample_is_named_by_its_index(mode: str, bad: str) -> None:
    inputs, targets = data()
    inputs[3, 2] = float(bad)
    samples = [list(range(100, 100 + ROWS))]
    case = case_of(net(nn.Identity()), mode, batches=[(inputs, targets)], samples=samples)
    diagnosis = diagnose(case)
    culprit = blamed(diagnosis)
    assert (diagnosis.kind, culprit.direction, culprit.samples) == (FP32, "data", (103,))
    assert culprit.call.op == "inputs"


def test_a_bad_tensor_of_any_batch_is_named_by_its_path() -> None:
    inputs, targets = data((5,), float("inf"))
    cross_entropy = supervised(nn.CrossEntropyLoss())
    whole = NamedObjective("", lambda m, batch: cross_entropy(m, (batch["views"][1], batch["y"])))
    batch = {"views": [torch.zeros(ROWS), inputs], "y": targets}
    case = replace(case_of(net(nn.Identity()), batches=[batch]), objectives=[whole])
    culprit = blamed(diagnose(case))
    assert (culprit.direction, culprit.call.op, culprit.samples) == ("data", "views[1]", (5,))


@pytest.mark.parametrize("mode", ["fp32", "mixed"])
def test_a_weight_that_is_nan_is_named(mode: str) -> None:
    case, masters = prepared(net(linear()), mode)
    with torch.no_grad():
        case.model[2].bias[1] = float("nan")
        masters.master_of(case.model[2].bias)[1] = float("nan")
    diagnosis = diagnose(case)
    culprit = blamed(diagnosis)
    assert (diagnosis.kind, culprit.direction) == (FP32, "weights")
    assert culprit.call == OpCall("2", "bias")


class OwnLoss(nn.Module):
    """A model that returns its loss."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.body(x)
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits, labels)}


@pytest.mark.parametrize("mode", ["mixed", "amp"])
def test_samples_that_overflow_are_named(mode: str) -> None:
    """Of pairs, and of a model that returns its loss for batches that are dicts."""
    samples = [range(50, 50 + ROWS)]
    inputs, targets = data((1, 6), 1e6)
    first = diagnose(case_of(net(linear()), mode, batches=[(inputs, targets)], samples=samples))
    keyed = [{"x": inputs, "labels": targets}]
    own = case_of(OwnLoss(net(linear())), mode, batches=keyed, samples=samples)
    second = diagnose(replace(own, objectives=[NamedObjective("", model_loss)]))
    assert first.kind is second.kind is BEYOND
    assert blamed(first).call.module == "0"
    assert blamed(second).call == replace(blamed(first).call, module="body.0")
    assert blamed(first).samples == blamed(second).samples == (51, 56)


@pytest.mark.parametrize(("mode", "first_loss"), [("mixed", None), ("mixed", 1.4), ("amp", 1.4)])
def test_weights_that_ran_away_are_not_a_matter_of_formats(
    mode: str, first_loss: float | None
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(linear() for _ in range(3)), nn.Linear(16, 4))
    diagnosis = diagnose(case_of(large(model, 1e4), mode, first_loss=first_loss))
    # Who does not know what the loss was can only see large activations.
    assert diagnosis.kind is (BEYOND if first_loss is None else Kind.DIVERGING)
    assert diagnosis.culprit is not None


def test_gradients_that_overflow_in_their_sum_are_told_from_one_that_does() -> None:
    """Each user hands back up to half of what fp16 holds and a bit, both together more."""

    def twice(factor: float) -> nn.Module:
        left, right = louder(factor), louder(factor)
        return Each(lambda x: left(x) + right(x), left=left, right=right)

    full = replay(case_of(net(twice(1.0)), scale=1.0), Setting(fp32=True))
    through = {
        call.module: seen.outputs.largest for call, seen in full.passes[0].trace.backward.items()
    }
    factor = 0.75 * 65504.0 / through["2.left"]  # in steps of 2^-10 of it, half's unit there
    diagnosis = diagnose(case_of(net(twice(factor)), scale=1.0))
    first = diagnosis.replays[1].passes[0].trace.nonfinite_in("backward")[0]
    assert first.summed
    assert first.call.module == "1"
    assert diagnosis.kind is BEYOND


def test_an_op_of_the_model_itself_moves_to_fp32() -> None:
    body, head = linear(), nn.Linear(16, 4)
    diagnosis = diagnose(case_of(Each(lambda x: head(body(x) * 1e6 / 1e6), body=body, head=head)))
    assert (diagnosis.kind, diagnosis.proven) == (BEYOND, True)
    assert diagnosis.remedy == Setting(octaves=-10, denied=("mul",))


def masked() -> nn.Module:
    """Softmax over what is small, the rest masked by filling."""
    return Each(lambda x: x.masked_fill(x > 0.5, float("-inf")).softmax(dim=-1) + 0.0 * x)


def masked_by_adding() -> nn.Module:
    """Softmax over the first half, the rest masked by a buffer of -inf."""
    own = Each(lambda x: (x + own.mask).softmax(dim=-1) + 0.0 * x)
    own.register_buffer("mask", torch.tensor([0.0, float("-inf")]).repeat_interleave(8))
    return own


def clamped() -> nn.Module:
    """A quotient that is infinite in any format, and clamped."""
    return Each(lambda x: x * (1.0 / x.detach().relu()).clamp(max=1.0))


@pytest.mark.parametrize("harmless", [masked, masked_by_adding, clamped])
def test_an_infinity_that_does_no_harm_is_no_fault(harmless: Callable[[], nn.Module]) -> None:
    assert diagnose(case_of(net(harmless()))).kind is Kind.NO_FAULT
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
    model = nn.ModuleDict({"a": net(nn.Identity()), "b": net(times(1e6))})

    def loss_of(part: str, model: Any, batch: Any) -> StepOutput:
        return supervised(nn.CrossEntropyLoss())(model[part], batch)

    base = case_of(model)
    parts = {n: list(base.model[n].parameters()) for n in "ab"}
    objectives = [NamedObjective(n, partial(loss_of, n), parameters=parts[n]) for n in "ab"]
    case = replace(base, objectives=objectives, scales={"a": 8.0, "b": 8.0})
    culprit = blamed(diagnose(case))
    assert (culprit.call.module, culprit.objective) == ("b.2", "b")
    assert diagnose(replace(case, skipped=frozenset("a"))).kind is Kind.NO_FAULT


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
    model = nn.Sequential(wide, nn.LayerNorm(16), nn.Linear(16, 4))
    diagnosis = diagnose(case_of(model, scale=2.0**16))
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
        underflow = underflow_share(replay(lower, Setting()), full)
        diagnosis = diagnose(lower)
        assert diagnosis.underflow == underflow
        assert diagnosis.zeros <= underflow
        lost += underflow > diagnosis.zeros > 0
        assert diagnosis.kind is (LOW if underflow > 0.25 else Kind.NO_FAULT)
        kinds.add((diagnosis.kind, underflow > 0))
    assert kinds == {(Kind.NO_FAULT, False), (Kind.NO_FAULT, True), (LOW, True)}
    assert lost  # Some are 0 where others are only small.


@pytest.mark.parametrize("mode", ["mixed", "amp"])
def test_gradients_that_are_all_0_are_an_underflow(mode: str) -> None:
    """The loss itself is in fp32, so the size of its gradient does not bound the scale."""
    case = case_of(net(linear()), mode, scale=1.0)
    (whole,) = case.objectives

    def faint(model: nn.Module, batch: Any) -> StepOutput:
        output = whole.objective(model, batch)
        return replace(output, loss=output.loss.float() * 1e-9)

    diagnosis = diagnose(replace(case, objectives=[NamedObjective("", faint)]))
    assert diagnosis.kind is LOW
    assert diagnosis.underflow == diagnosis.zeros == 1.0
    assert diagnosis.underflow_then < 0.1


@pytest.mark.parametrize(
    ("layer", "mode", "compute", "half", "ops"),
    [
        (attention, "mixed", "emulated", "float16", "default"),
        (recurrent, "amp", "native", "float16", "default"),
        (lambda: conv(2), "mixed", "native", "bfloat16", "none"),
        (linear, "amp", "emulated", "bfloat16", "default"),
        (linear, "fp32", "emulated", "float16", "default"),
    ],
)
def test_a_step_without_fault_is_called_so(
    layer: Callable[[], nn.Module], mode: str, compute: str, half: str, ops: str
) -> None:
    middle = nn.Sequential(layer(), nn.BatchNorm1d(16), nn.Dropout(0.5))
    diagnosis = diagnose(case_of(net(middle), mode, compute, half, ops=OpLists.named(ops)))
    assert (diagnosis.kind, diagnosis.culprit) == (Kind.NO_FAULT, None)
