"""Planted faults, and what the autopsy says of them: module, direction and diagnosis."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpframe.lowbit  # noqa: F401  # Recipes are named.
from mpframe.checkpoint.state import RandomState
from mpframe.core.casting.op_lists import OpLists
from mpframe.core.objective import NamedObjective, StepOutput, supervised
from mpframe.core.optim.master_weights import MasterWeights
from mpframe.core.precision import Precision
from mpframe.lab.autopsy.diagnosis import Kind, diagnose, underflow_share
from mpframe.lab.autopsy.evidence import Evidence
from mpframe.lab.autopsy.replay import Case, Setting, replay
from mpframe.lab.autopsy.report import report_on
from mpframe.lab.autopsy.watch import OUTSIDE, OpCall
from mpframe.training.objectives import model_loss

MODES = [(mode, compute) for mode in ("mixed", "amp") for compute in ("emulated", "native")]
ROWS = 8


class Times(nn.Module):
    """Multiplies by a number in the forward pass."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class _Louder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class Louder(nn.Module):
    """The identity, whose backward pass multiplies by a number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return _Louder.apply(x, self.factor)


class Exp(nn.Module):
    """e^(x + shift)."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(0.01 * x + self.shift)


class Sum(nn.Module):
    """The sum over the features, beside each of them."""

    def forward(self, x: Tensor) -> Tensor:
        return (0.0 * x + 10_000.0).sum(dim=-1, keepdim=True).expand_as(x)


class Attention(nn.Module):
    """Self-attention over a sequence of length 2."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        pair = torch.stack([x, x], dim=1)
        return self.inner(pair, pair, pair, need_weights=False)[0].mean(dim=1)


class Recurrent(nn.Module):
    """A GRU over a sequence of length 1, its projection behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(16, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[:, None])[0][:, 0]


class Twice(nn.Module):
    """Two users of one tensor, whose gradients fit in half one by one and not together."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.left, self.right = Louder(factor), Louder(factor)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(x)


def conv(dimensions: int, transposed: bool = False) -> nn.Module:
    """A convolution over 16 features seen as channels and places."""
    name = f"Conv{'Transpose' * transposed}{dimensions}d"
    sizes = {1: (4, 4), 2: (4, 2, 2), 3: (2, 2, 2, 2)}[dimensions]
    layer = getattr(nn, name)(sizes[0], sizes[0], 1)
    return nn.Sequential(nn.Unflatten(1, sizes), layer, nn.Flatten())


def net(middle: nn.Module) -> nn.Module:
    """Layers around a middle; the norm behind it keeps what it does from the others."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), middle, nn.LayerNorm(16), nn.Linear(16, 4))


def loud(layer: nn.Module) -> nn.Module:
    """The layer, and a loud backward pass before it."""
    return nn.Sequential(OrderedDict(loud=Louder(1e9), layer=layer))


def unbalanced() -> nn.Module:
    """Small numbers in front of a large factor: the forward pass fits, the backward does not."""
    return nn.Sequential(Times(1e-6), Times(1e6))


def large(layer: nn.Module, factor: float = 1e5) -> nn.Module:
    """The same layer with large weights."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(factor)
    return layer


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, 16, generator=generator)
    return inputs, torch.randint(0, 4, (ROWS,), generator=generator)


def case_of(*arguments: Any, **more: Any) -> Case:
    return prepared(*arguments, **more)[0]


def prepared(
    model: nn.Module,
    mode: str = "mixed",
    compute: str = "emulated",
    half: str = "float16",
    **more: Any,
) -> tuple[Case, MasterWeights]:
    ops = more.pop("ops", None)
    products = more.pop("products", "none")
    precision = Precision(mode, half, compute=compute, ops=ops, products=products)
    model, masters = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    objective = NamedObjective("", supervised(nn.CrossEntropyLoss()))
    scale = more.pop("scale", 1024.0)
    batches = more.pop("batches", [data()])
    return Case(model, precision, [objective], batches, {"": scale}, **more), masters


@dataclass(frozen=True)
class Fault:
    """What is planted and what the autopsy has to say."""

    name: str
    middle: Callable[[], nn.Module]
    module: str
    kind: Kind
    direction: str = "forward"
    options: dict[str, Any] = field(default_factory=dict)
    op: str | None = None


BEYOND, TOO_HIGH = Kind.BEYOND_FORMAT, Kind.SCALE_TOO_HIGH
FP32, LOW = Kind.NOT_FINITE_IN_FP32, Kind.UNDERFLOW
HALF = {"ops": OpLists.named().moved({"exp": "allow", "sum": "allow"})}

FAULTS = [
    Fault("linear forward", lambda: large(nn.Linear(16, 16)), "2", BEYOND, op="linear"),
    Fault("conv1d forward", lambda: large(conv(1)), "2.1", BEYOND, op="conv1d"),
    Fault("conv2d forward", lambda: large(conv(2)), "2.1", BEYOND, op="conv2d"),
    Fault("conv3d forward", lambda: large(conv(3)), "2.1", BEYOND, op="conv3d"),
    Fault("transposed", lambda: large(conv(2, True)), "2.1", BEYOND, op="conv_transpose2d"),
    Fault("attention forward", lambda: large(Attention(), 400.0), "2.inner", BEYOND),
    Fault("product forward", lambda: Times(1e6), "2", BEYOND, op="mul"),
    Fault("exp", lambda: Exp(13.0), "2", BEYOND, op="exp", options=HALF),
    Fault("exp in fp32", lambda: nn.Sequential(Exp(13.0), nn.Linear(16, 16)), "2.0", BEYOND),
    Fault("exp beyond fp32", lambda: Exp(100.0), "2", FP32, op="exp"),
    Fault("sum", lambda: Sum(), "2", BEYOND, op="sum", options=HALF),
    Fault("sum in fp32", lambda: nn.Sequential(Sum(), nn.Linear(16, 16)), "2.0", BEYOND),
    Fault("linear backward", lambda: loud(nn.Linear(16, 16)), "2.loud", BEYOND, "backward"),
    Fault("conv backward", lambda: loud(conv(2)), "2.loud", BEYOND, "backward"),
    Fault("own function", lambda: Louder(1e9), "2", BEYOND, "backward", op="_Louder"),
    Fault("product backward", unbalanced, "2.1", BEYOND, "backward"),
    Fault("beyond fp32 backward", lambda: Louder(1e38 * 1e3), "2", FP32, "backward"),
    Fault("scale too high", nn.Identity, OUTSIDE, TOO_HIGH, "backward", {"scale": 2.0**22}),
    Fault("scale too low", nn.Identity, "", LOW, "backward", {"scale": 2.0**-12}),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "compute"), MODES)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: Fault, mode: str, compute: str) -> None:
    torch.manual_seed(0)  # `large` weights drawn at random overflow in most draws, not in all.
    case = case_of(net(fault.middle()), mode, compute, **fault.options)
    diagnosis = diagnose(case)
    culprit = diagnosis.culprit
    assert diagnosis.kind is fault.kind
    assert culprit is not None
    call = culprit.origin or culprit.call
    assert culprit.direction == fault.direction
    assert call.module == (fault.module or call.module)
    if fault.op:
        assert call.op == fault.op
    if fault.kind is BEYOND:
        assert diagnosis.proven
        assert culprit.value > culprit.limit == 65504.0


@pytest.mark.parametrize("factor", [1.0, 64.0])
def test_a_product_that_saturates_is_named(factor: float) -> None:
    """The history knows of values 64 times smaller; behind the layer a norm makes up for them."""
    torch.manual_seed(0)
    layers = nn.Linear(16, 16), Times(1.0), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)
    model = nn.Sequential(*layers)
    case, masters = prepared(model, half="bfloat16", products="fp8_delayed", scale=1.0)
    with case.precision.cast():
        y = case.model(data()[0])
    nn.functional.cross_entropy(y.float(), data()[1]).backward()
    masters.step()
    layers[1].factor = factor
    diagnosis = diagnose(case)
    if factor == 1.0:
        assert (diagnosis.kind, diagnosis.saturation) == (Kind.NO_FAULT, None)
        return
    assert diagnosis.kind is Kind.SATURATED
    found = diagnosis.saturation
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


@pytest.mark.parametrize("mode", ["fp32", "mixed", "amp"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_sample_is_named_by_its_index(mode: str, bad: float) -> None:
    inputs, targets = data()
    inputs[3, 2] = bad
    samples = [list(range(100, 100 + ROWS))]
    case = case_of(net(nn.Identity()), mode, batches=[(inputs, targets)], samples=samples)
    diagnosis = diagnose(case)
    assert diagnosis.kind is FP32
    assert diagnosis.culprit is not None
    assert (diagnosis.culprit.direction, diagnosis.culprit.samples) == ("data", (103,))
    assert diagnosis.culprit.call.op == "inputs"


def test_a_bad_tensor_of_any_batch_is_named_by_its_path() -> None:
    inputs, targets = data()
    inputs[5, 2] = float("inf")
    cross_entropy = supervised(nn.CrossEntropyLoss())
    whole = NamedObjective("", lambda m, batch: cross_entropy(m, (batch["views"][1], batch["y"])))
    batch = {"views": [torch.zeros(ROWS), inputs], "y": targets}
    case = replace(case_of(net(nn.Identity()), batches=[batch]), objectives=[whole])
    culprit = diagnose(case).culprit
    assert culprit is not None
    assert (culprit.direction, culprit.call.op, culprit.samples) == ("data", "views[1]", (5,))


@pytest.mark.parametrize("mode", ["fp32", "mixed", "amp"])
def test_a_weight_that_is_nan_is_named(mode: str) -> None:
    case, masters = prepared(net(nn.Linear(16, 16)), mode)
    with torch.no_grad():
        case.model[2].bias[1] = float("nan")
        masters.master_of(case.model[2].bias)[1] = float("nan")
    diagnosis = diagnose(case)
    assert diagnosis.kind is FP32
    assert diagnosis.culprit is not None
    call = diagnosis.culprit.call
    assert (call.module, call.op, diagnosis.culprit.direction) == ("2", "bias", "weights")


def test_samples_that_overflow_are_named() -> None:
    inputs, targets = data()
    inputs[[1, 6]] *= 1e5
    case = case_of(net(nn.Linear(16, 16)), batches=[(inputs, targets)], samples=[range(50, 58)])
    diagnosis = diagnose(case)
    assert diagnosis.kind is BEYOND
    assert diagnosis.culprit is not None
    assert diagnosis.culprit.call.module == "0"
    assert diagnosis.culprit.samples == (51, 56)


@pytest.mark.parametrize("mode", ["mixed", "amp"])
@pytest.mark.parametrize("first_loss", [None, 1.4])
def test_weights_that_ran_away_are_not_a_matter_of_formats(
    mode: str, first_loss: float | None
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)), nn.Linear(16, 4))
    case = case_of(large(model, 1e4), mode, first_loss=first_loss)
    diagnosis = diagnose(case)
    # Who does not know what the loss was can only see large activations.
    assert diagnosis.kind is (BEYOND if first_loss is None else Kind.DIVERGING)
    assert diagnosis.culprit is not None


def test_gradients_that_overflow_in_their_sum_are_told_from_one_that_does() -> None:
    # Each user hands back up to half of what fp16 holds and a bit, both together more.
    case = case_of(net(Twice(1.0)), scale=1.0)
    full = replay(case, Setting(fp32=True))
    through = {
        call.module: seen.outputs.largest for call, seen in full.passes[0].trace.backward.items()
    }
    factor = 0.75 * 65504.0 / through["2.left"]  # in steps of 2^-10 of it, half's unit there
    diagnosis = diagnose(case_of(net(Twice(factor)), scale=1.0))
    first = diagnosis.replays[1].passes[0].trace.nonfinite_in("backward")[0]
    assert first.summed
    assert first.call.module == "1"
    assert diagnosis.kind is BEYOND


class Masked(nn.Module):
    """Softmax over what is small, the rest masked by filling."""

    def forward(self, x: Tensor) -> Tensor:
        return x.masked_fill(x > 0.5, float("-inf")).softmax(dim=-1) + 0.0 * x


class MaskedByAdding(nn.Module):
    """Softmax over the first half, the rest masked by a buffer of -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]).repeat_interleave(8))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.mask).softmax(dim=-1) + 0.0 * x


class Clamped(nn.Module):
    """A quotient that is infinite in any format, and clamped."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1.0 / x.detach().relu()).clamp(max=1.0)


@pytest.mark.parametrize("harmless", [Masked, MaskedByAdding, Clamped])
def test_an_infinity_that_does_no_harm_is_no_fault(harmless: Callable[[], nn.Module]) -> None:
    assert diagnose(case_of(net(harmless()))).kind is Kind.NO_FAULT
    beyond = diagnose(case_of(net(nn.Sequential(harmless(), Times(1e7), nn.Linear(16, 16)))))
    assert beyond.culprit is not None
    call = beyond.culprit.origin or beyond.culprit.call
    assert (beyond.kind, call.module) == (BEYOND, "2.1")


@pytest.mark.parametrize("harmless", [Masked, MaskedByAdding])
def test_a_mask_is_not_taken_for_what_fp32_cannot_hold(harmless: Callable[[], nn.Module]) -> None:
    diagnosis = diagnose(case_of(net(nn.Sequential(harmless(), Exp(100.0)))))
    assert diagnosis.culprit is not None
    assert (diagnosis.kind, diagnosis.culprit.call) == (FP32, OpCall("2.1", "exp"))


def test_the_bad_micro_batch_is_named() -> None:
    inputs, targets = data()
    good, bad = (inputs, targets), (inputs * 1e6, targets)
    diagnosis = diagnose(case_of(net(nn.Identity()), batches=[good, bad, good]))
    assert diagnosis.kind is BEYOND
    assert diagnosis.culprit is not None
    assert diagnosis.culprit.batch == 1


@pytest.mark.parametrize("mode", ["mixed", "amp"])
def test_a_model_that_returns_its_loss_is_judged_as_one_beside_a_loss(mode: str) -> None:
    """Dict batches: the same module, op and samples."""

    class OwnLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net(nn.Linear(16, 16))

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.body(x)
            return {"logits": logits, "loss": nn.functional.cross_entropy(logits, labels)}

    inputs, targets = data()
    inputs[[1, 6]] *= 1e6
    samples = [range(50, 50 + ROWS)]
    plain = case_of(net(nn.Linear(16, 16)), mode, batches=[(inputs, targets)], samples=samples)
    own = case_of(OwnLoss(), mode, batches=[{"x": inputs, "labels": targets}], samples=samples)
    first = diagnose(plain)
    second = diagnose(replace(own, objectives=[NamedObjective("", model_loss)]))
    assert first.kind is second.kind is BEYOND
    assert first.culprit is not None
    assert second.culprit is not None
    assert second.culprit.call.module == f"body.{first.culprit.call.module}"
    assert second.culprit.call.op == first.culprit.call.op
    assert second.culprit.samples == first.culprit.samples == (51, 56)


def test_only_the_loss_that_was_skipped_is_judged() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = net(nn.Identity()), net(Times(1e6))

    def loss_of(part: str, model: nn.Module, batch: Any) -> StepOutput:
        return supervised(nn.CrossEntropyLoss())(getattr(model, part), batch)

    def case(skipped: frozenset[str] | None) -> Case:
        base = case_of(Two())
        parts = {n: list(getattr(base.model, n).parameters()) for n in "ab"}
        objectives = [NamedObjective(n, partial(loss_of, n), parameters=parts[n]) for n in "ab"]
        return replace(base, objectives=objectives, scales={"a": 8.0, "b": 8.0}, skipped=skipped)

    diagnosis = diagnose(case(None))
    assert diagnosis.culprit is not None
    assert (diagnosis.culprit.call.module, diagnosis.culprit.objective) == ("b.2", "b")
    assert diagnose(case(frozenset("a"))).kind is Kind.NO_FAULT


@pytest.mark.parametrize("floor", [1.0, 2.0**16, 2.0**-8])
@pytest.mark.parametrize("exponent", [18, 19, 20, 21, 22])
def test_the_scale_that_is_named_is_the_largest_that_does(floor: float, exponent: int) -> None:
    case = case_of(net(nn.Identity()), scale=2.0**exponent, floors={"": floor})
    diagnosis = diagnose(case)
    assert diagnosis.kind is TOO_HIGH
    assert replay(case, Setting(octaves=diagnosis.octaves)).finite
    assert not replay(case, Setting(octaves=diagnosis.octaves + 1)).finite


def test_below_one_a_scale_is_tried_only_where_the_scaler_may_go_there() -> None:
    case = case_of(net(Louder(2.0**19)), scale=4.0)
    assert diagnose(case).kind is BEYOND
    lower = diagnose(replace(case, floors={"": 2.0**-12}))
    assert (lower.kind, lower.octaves) == (
        TOO_HIGH,
        diagnose(replace(case, scales={"": 2.0**10}, floors={"": 2.0**-12})).octaves + 8,
    )


def test_a_scale_that_would_lose_the_other_gradients_is_not_the_way_out() -> None:
    class Wide(nn.Module):
        """Two branches, the gradients of one 2^30 times those of the other."""

        def __init__(self) -> None:
            super().__init__()
            layers = nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 16)
            self.quiet = nn.Sequential(*layers, Louder(2.0**-16))
            self.loud = nn.Sequential(nn.Linear(16, 2), Louder(2.0**14), nn.Linear(2, 16))

        def forward(self, x: Tensor) -> Tensor:
            return self.quiet(x) + self.loud(x)

    model = nn.Sequential(Wide(), nn.LayerNorm(16), nn.Linear(16, 4))
    diagnosis = diagnose(case_of(model, scale=2.0**16))
    lower = [one for one in diagnosis.replays if not one.setting.recast and one.setting.octaves < 0]
    assert any(one.finite for one in lower)
    assert diagnosis.kind is BEYOND
    assert diagnosis.proven
    assert all(pin.startswith("0.loud") for pin in diagnosis.remedy.pins)


@pytest.mark.parametrize("mode", ["mixed", "amp"])
def test_a_quarter_of_the_gradients_may_be_lost(mode: str) -> None:
    case = case_of(net(nn.Linear(16, 16)), mode)
    full = replay(case, Setting(fp32=True))
    kinds, lost = set(), 0
    for exponent in range(6, -14, -1):
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


@pytest.mark.parametrize(("mode", "compute"), MODES)
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_a_step_without_fault_is_called_so(mode: str, compute: str, half: str) -> None:
    diagnosis = diagnose(case_of(net(nn.Dropout(0.5)), mode, compute, half))
    assert (diagnosis.kind, diagnosis.culprit) == (Kind.NO_FAULT, None)


def test_a_step_of_an_fp32_run_with_nothing_wrong() -> None:
    assert diagnose(case_of(net(nn.Identity()), "fp32", scale=1.0)).kind is Kind.NO_FAULT


@pytest.mark.parametrize("layer", [Attention, Recurrent, lambda: conv(2)])
@pytest.mark.parametrize("ops", ["default", "none"])
def test_layers_and_rungs_replay(layer: Callable[[], nn.Module], ops: str) -> None:
    middle = nn.Sequential(layer(), nn.BatchNorm1d(16))
    diagnosis = diagnose(case_of(net(middle), ops=OpLists.named(ops)))
    assert diagnosis.kind is Kind.NO_FAULT


@pytest.mark.parametrize("mode", ["fp32", "mixed", "amp"])
def test_nothing_is_left_changed(mode: str) -> None:
    middle = nn.Sequential(Times(1e6), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5))
    case = case_of(net(middle), mode, random=RandomState.now(torch.device("cpu")))
    case.model.eval()
    for parameter in case.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = copy.deepcopy(case.model.state_dict())
    torch.rand(5)
    random = torch.get_rng_state()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in case.model.modules()]
    diagnose(case)
    assert torch.equal(torch.get_rng_state(), random)
    assert not case.model.training
    after = case.model.state_dict()
    assert all(
        torch.equal(before[n], after[n]) and before[n].dtype == after[n].dtype for n in after
    )
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in case.model.parameters())
    now = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in case.model.modules()]
    assert now == hooks


def test_a_replay_draws_the_random_numbers_of_the_step() -> None:
    random = RandomState.now(torch.device("cpu"))
    case = case_of(net(nn.Dropout(0.5)), "fp32", scale=1.0)
    case = replace(case, random=random)
    random.restore(torch.device("cpu"))
    inputs, targets = case.batches[0]
    loss = nn.functional.cross_entropy(case.model(inputs), targets)
    torch.rand(7)
    assert replay(case, Setting()).loss == float(loss.detach())
    assert replay(case, Setting(fp32=True)).loss == float(loss.detach())


@pytest.mark.parametrize("mode", ["mixed", "amp"])
def test_gradients_that_are_all_0_are_an_underflow(mode: str) -> None:
    """The loss itself is in fp32, so the size of its gradient does not bound the scale."""
    diagnosis = diagnose(_with_loss_times(1e-9, case_of(net(nn.Linear(16, 16)), mode, scale=1.0)))
    assert diagnosis.kind is LOW
    assert diagnosis.underflow == diagnosis.zeros == 1.0
    assert diagnosis.underflow_then < 0.1


def _with_loss_times(factor: float, case: Case) -> Case:
    (whole,) = case.objectives

    def objective(model: nn.Module, batch: Any) -> StepOutput:
        output = whole.objective(model, batch)
        return replace(output, loss=output.loss.float() * factor)

    return replace(case, objectives=[NamedObjective("", objective)])
