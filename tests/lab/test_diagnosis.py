"""Planted faults, and what the autopsy says of them: module, direction and diagnosis."""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from typing import Any

import pytest
import torch
from planted import faint
from torch import Tensor, nn

from mpframe.core.objective import NamedObjective, supervised
from mpframe.lab.autopsy.diagnosis import (
    Culprit,
    Diagnosis,
    Kind,
    diagnose,
    underflow_share,
)
from mpframe.lab.autopsy.replay import Case, Setting, replay
from mpframe.lab.autopsy.watch import OUTSIDE, OpCall
from mpframe.precision.op_lists import OpLists
from mpframe.precision.precision import Precision

BEYOND, TOO_HIGH, NONE = Kind.BEYOND_FORMAT, Kind.SCALE_TOO_HIGH, Kind.NO_FAULT
FP32, LOW = Kind.NOT_FINITE_IN_FP32, Kind.UNDERFLOW
CROSS_ENTROPY = supervised(nn.CrossEntropyLoss())
ROWS = 8
linear = partial(nn.Linear, 16, 16)


class Each(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor], **children: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class _Louder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def louder(factor: float) -> nn.Module:
    """The identity, whose backward pass multiplies by a number."""
    return Each(lambda x: _Louder.apply(x, factor))


def times(factor: float) -> nn.Module:
    return Each(lambda x: x * factor)


def exp(shift: float) -> nn.Module:
    return Each(lambda x: torch.exp(0.01 * x + shift))


def attention() -> nn.Module:
    """Self-attention over a sequence of length 2."""
    inner = nn.MultiheadAttention(16, 2, batch_first=True)
    return Each(
        lambda x: inner(*[torch.stack([x, x], dim=1)] * 3, need_weights=False)[0].mean(dim=1),
        inner=inner,
    )


def large(layer: nn.Module, factor: float = 1e5) -> nn.Module:
    """The same layer with large weights."""
    for parameter in layer.parameters():
        parameter.detach().mul_(factor)
    return layer


def net(middle: nn.Module) -> nn.Module:
    """Layers around a middle; the norm behind it keeps what it does from the others."""
    torch.manual_seed(0)
    return nn.Sequential(linear(), nn.Tanh(), middle, nn.LayerNorm(16), nn.Linear(16, 4))


def data(rows: tuple[int, ...] = (), factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Random numbers, some rows of them multiplied."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, 16, generator=generator)
    inputs[list(rows)] *= factor
    return inputs, torch.randint(0, 4, (ROWS,), generator=generator)


def case_of(
    model: nn.Module, mode: str = "mixed", compute: str = "emulated", half: str = "float16",
    ops: OpLists | None = None, products: Any = "none", scale: float = 1024.0, **more: Any,
) -> Case:  # fmt: skip
    precision = Precision(mode, half, compute=compute, ops=ops, products=products)
    model, _ = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    own = {"batches": [data()], **more}
    objectives = [NamedObjective("", CROSS_ENTROPY)]
    return Case(model, precision, objectives, scales={"": scale}, **own)


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


def loud() -> nn.Module:
    return nn.Sequential(OrderedDict(loud=louder(1e9), layer=linear()))


@pytest.mark.parametrize(
    ("mode", "middle", "options", "found"),
    [
        fault("linear forward", lambda: large(linear()), "2", "linear"),
        fault("attention forward", lambda: large(attention(), 400.0), "2.inner"),
        fault("product forward", lambda: times(1e6), "2", "mul"),
        fault("exp", lambda: exp(13.0), "2", "exp", ops=HALF_EXP),
        fault("exp in fp32", lambda: nn.Sequential(exp(13.0), linear()), "2.0"),
        fault("exp beyond fp32", lambda: exp(100.0), "2", "exp", FP32),
        fault("linear backward", loud, "2.loud", **BACK),
        fault("own function", lambda: louder(1e9), "2", "_Louder", **BACK),
        fault("product backward", UNBALANCED, "2.1", **BACK),
        fault("beyond fp32 backward", lambda: louder(1e38 * 1e3), "2", "", FP32, **BACK),
        fault("scale too high", nn.Identity, OUTSIDE, "", TOO_HIGH, scale=2.0**22, **BACK),
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


def test_bad_samples_are_named_by_their_path_and_micro_batch_and_a_weight_that_is_nan() -> None:
    inputs, targets = data((3,), math.nan)
    more = {"batches": [(inputs, targets)], "samples": [range(100, 100 + ROWS)]}
    case = case_of(net(nn.Identity()), **more)
    batches = [{"views": [torch.zeros(ROWS), inputs], "y": targets}]
    whole = NamedObjective("", lambda m, batch: CROSS_ENTROPY(m, (batch["views"][1], batch["y"])))
    nested = replace(case, objectives=[whole], batches=batches)
    for own, name in ((case, "inputs"), (nested, "views[1]")):
        diagnosis = diagnose(own)
        culprit = blamed(diagnosis)
        assert (diagnosis.kind, culprit.direction, culprit.samples) == (FP32, "data", (103,))
        assert culprit.call.op == name
    sick = case_of(net(linear()), "amp")
    sick.model[2].bias.data[1] = math.nan
    diagnosis = diagnose(sick)
    assert (diagnosis.kind, blamed(diagnosis).direction) == (FP32, "weights")
    assert blamed(diagnosis).call == OpCall("2", "bias")
    samples = [range(first, first + ROWS) for first in (0, 50, 100)]
    batches = [data(), data((1, 6), 1e6), data()]
    diagnosis = diagnose(case_of(net(linear()), batches=batches, samples=samples))
    culprit = blamed(diagnosis)
    assert (diagnosis.kind, culprit.call.module) == (BEYOND, "0")
    assert (culprit.batch, culprit.samples) == (1, (51, 56))


def test_weights_that_ran_away_are_diverging() -> None:
    torch.manual_seed(0)
    model = large(nn.Sequential(linear(), linear(), linear(), nn.Linear(16, 4)), 1e4)
    case = case_of(model, first_loss=1.4)
    assert diagnose(case).kind is Kind.DIVERGING
    # Who does not know what the loss was can only see large activations.
    assert diagnose(replace(case, first_loss=None)).kind is BEYOND


def test_an_op_of_the_model_itself_moves_to_fp32() -> None:
    body, head = linear(), nn.Linear(16, 4)
    diagnosis = diagnose(case_of(Each(lambda x: head(body(x) * 1e6 / 1e6), body=body, head=head)))
    assert (diagnosis.kind, diagnosis.proven) == (BEYOND, True)
    assert diagnosis.remedy == Setting(octaves=-10, denied=("mul",))


HARMLESS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mask": lambda x, _: x.masked_fill(x > 0.5, -math.inf).softmax(dim=-1) + 0.0 * x,
    "added mask": lambda x, mask: (x + mask).softmax(dim=-1) + 0.0 * x,
    "quotient": lambda x, _: x * (1.0 / x.detach().relu()).clamp(max=1.0),  # inf in any format
}


@pytest.mark.parametrize("name", HARMLESS)
def test_an_infinity_that_does_no_harm_is_no_fault(name: str) -> None:
    def with_it(*behind: nn.Module) -> Diagnosis:
        own = Each(lambda x: HARMLESS[name](x, own.mask))
        mask = torch.tensor([0.0, -math.inf]).repeat_interleave(8)
        own.register_buffer("mask", mask if name == "added mask" else None)
        return diagnose(case_of(net(nn.Sequential(own, *behind))))

    assert with_it().kind is NONE
    beyond = with_it(times(1e7), linear())
    call = blamed(beyond).origin or blamed(beyond).call
    assert (beyond.kind, call.module) == (BEYOND, "2.1")
    if name != "quotient":  # A mask is not taken for what fp32 cannot hold.
        diagnosis = with_it(exp(100.0))
        assert (diagnosis.kind, blamed(diagnosis).call) == (FP32, OpCall("2.1", "exp"))


def test_only_the_loss_that_was_skipped_is_judged() -> None:
    base = case_of(nn.ModuleDict({"a": net(nn.Identity()), "b": net(times(1e6))}))
    objectives = [
        NamedObjective(n, lambda m, b, n=n: CROSS_ENTROPY(m[n], b), parameters=[*own.parameters()])
        for n, own in base.model.items()
    ]
    case = replace(base, objectives=objectives, scales={"a": 8.0, "b": 8.0})
    culprit = blamed(diagnose(case))
    assert (culprit.call.module, culprit.objective) == ("b.2", "b")
    assert diagnose(replace(case, skipped=frozenset("a"))).kind is NONE


def test_the_scale_that_is_named_is_the_largest_that_does_below_one_if_a_scaler_goes() -> None:
    for exponent, floor in ((18, 1.0), (20, 2.0**16), (22, 2.0**-8)):
        case = case_of(net(nn.Identity()), scale=2.0**exponent, floors={"": floor})
        diagnosis = diagnose(case)
        assert diagnosis.kind is TOO_HIGH
        assert replay(case, Setting(octaves=diagnosis.octaves)).finite
        assert not replay(case, Setting(octaves=diagnosis.octaves + 1)).finite
    case = case_of(net(louder(2.0**19)), scale=4.0)
    assert diagnose(case).kind is BEYOND
    assert diagnose(replace(case, floors={"": 2.0**-12})).kind is TOO_HIGH


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


def test_a_quarter_of_the_gradients_may_be_lost() -> None:
    case = case_of(net(linear()))
    full = replay(case, Setting(fp32=True))
    kinds = set()
    for exponent in range(6, -14, -2):
        lower = replace(case, scales={"": 2.0**exponent})
        underflow, found = underflow_share(replay(lower, Setting()), full), diagnose(lower)
        assert found.underflow == underflow
        assert found.kind is (LOW if underflow > 0.25 else NONE)
        kinds.add((found.kind, underflow > 0))
    assert kinds == {(NONE, False), (NONE, True), (LOW, True)}


def test_gradients_that_are_all_0_are_an_underflow() -> None:
    """The loss itself is in fp32, so the size of its gradient does not bound the scale."""
    case = replace(case_of(net(linear()), scale=1.0), objectives=[NamedObjective("", faint)])
    diagnosis = diagnose(case)
    assert (diagnosis.kind, diagnosis.underflow) == (LOW, 1.0)
    assert diagnosis.underflow_then < 0.1
