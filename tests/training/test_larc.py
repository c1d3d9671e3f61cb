"""LARC, LARS, penalties and norms: by hand, on masters, whatever the loss is scaled by."""

import copy
from functools import partial
from math import hypot
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures import Patch, refused
from omegaconf import OmegaConf
from prepared import prepared
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW
from vocabulary import same_bits

from mpframe import MasterWeights, Plan, Precision, Static, Trainer
from mpframe.config import CONF
from mpframe.core.errors import ConfigError
from mpframe.core.optim import gradients
from mpframe.run.target import make
from mpframe.training.callbacks.step_hooks import LARC, GradientNorms, Penalty, StepHook
from mpframe.training.optimizers.multi_optimizer import MultiOptimizer
from mpframe.training.trainer import run_callbacks
from mpframe.training.trainers.lbfgs import ClosureTrainer

OPTIMIZERS: dict[str, Any] = {
    "SGD": partial(SGD, lr=0.05, momentum=0.9, weight_decay=1e-2),
    "fused SGD": partial(SGD, lr=0.05, momentum=0.9, fused=True),
    "AdamW": partial(AdamW, lr=0.05, weight_decay=1e-2),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    nn.init.zeros_(model[2].bias)
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    targets = torch.randint(0, 3, (8,), generator=generator)
    return torch.randn(8, 6, generator=generator), targets


def by_hand(weight: Tensor, gradient: Tensor, lr: float, mode: str, **own: float) -> Tensor:
    """The gradient after OpenSeq2Seq's formula, from fp32 values."""
    least, epsilon = torch.tensor(own.get("min_update", 1e-7)), own.get("epsilon", 1e-7)
    size, slope = torch.linalg.vector_norm(weight), torch.linalg.vector_norm(gradient)
    if mode == "clip":
        factor = max(own["eta"] * size / (lr * (slope + epsilon)), least)
        return gradient * min(factor, torch.tensor(1.0))
    return gradient * max(own["eta"] * size / (slope + epsilon), least)


@pytest.mark.parametrize(("dtype", "half", "mode", "name", "settings"), [
    ("fp32", "float16", "clip", "SGD", {"eta": 1e-3}),  # as OpenSeq2Seq
    ("mixed", "float16", "scale", "AdamW", {"eta": 10.0}),
    ("mixed", "bfloat16", "clip", "fused SGD", {"eta": 1e-3, "min_update": 0.02, "epsilon": 0.5}),
    ("amp", "float16", "clip", "AdamW", {"eta": 10.0}),
    ("amp", "bfloat16", "scale", "SGD", {"eta": 1e-3}),
])  # fmt: skip
def test_the_formula_by_hand(dtype: str, half: str, mode: str, name: str, settings: Any) -> None:
    """Bounds each make some factor: of eta, of 1, and the least update of a bias of 0."""
    precision, scaler, model = Precision(dtype, half), Static(2.0**10), net()
    groups = [{"params": model[0].parameters(), "lr": 0.3}, {"params": model[2].parameters()}]
    wrapped = precision.prepare(model, OPTIMIZERS[name](groups))[1]
    wrapped.register_step_pre_hook(LARC(mode=mode, **settings))
    expected = [wrapped.master_of(p).detach().clone() for p in model.parameters()]
    plain = OPTIMIZERS[name]([{"params": expected[:2], "lr": 0.3}, {"params": expected[2:]}])
    for step in range(4):
        inputs, targets = batch(step)
        with precision.cast():
            loss = nn.functional.cross_entropy(model(inputs), targets)
        (loss * scaler.scale).backward()
        for own, p, lr in zip(expected, model.parameters(), [0.3, 0.3, 0.05, 0.05], strict=True):
            assert p.grad is not None
            own.grad = by_hand(own, p.grad.float() / scaler.scale, lr, mode, **settings)
        plain.step()
        assert not wrapped.step(scaler).skipped
        assert all(map(torch.equal, map(wrapped.master_of, model.parameters()), expected))


@pytest.mark.parametrize("mode", ["clip", "scale"])
def test_a_weight_of_zeros_takes_the_least_update_at_a_rate_of_0(mode: str) -> None:
    """A warm-up may begin there."""
    wrapped = MasterWeights(SGD([weight := nn.Parameter(torch.zeros(3))], lr=0.0))
    wrapped.register_step_pre_hook(LARC(eta=1e-3, mode=mode, min_update=0.25))
    weight.grad = kept = torch.ones(3)
    assert not wrapped.step().skipped
    assert torch.equal(kept, torch.full((3,), 0.25))
    assert torch.equal(weight, torch.zeros(3))


def test_a_factor_beyond_half_is_held_at_its_end() -> None:
    """Without masters the gradient is half: 70000 would become inf and reach the weight."""
    half = nn.Parameter(torch.ones(4, dtype=torch.float16))
    half.grad = torch.full((4,), 2.0**-24, dtype=torch.float16)
    wrapped = MasterWeights(SGD([half], lr=2.0**-10), keep_masters=False)
    wrapped.register_step_pre_hook(LARC(eta=1.0, mode="scale"))
    wrapped.step()
    assert half.isfinite().all()


def trainer(mode: str = "fp32", half: str = "float16", cls: Any = SGD, **plan: Any) -> Trainer:
    kind, optimizer = ClosureTrainer if cls is LBFGS else Trainer, partial(cls, lr=0.1)
    own: Any = {"optimizer": optimizer, "cls": kind, "plan": Plan(**plan)}
    return prepared(net(), nn.CrossEntropyLoss(), mode, half, **own)


def hooked(hook: StepHook, run: Trainer) -> dict[int, Any]:
    """Sets it up in a run, and returns the numbers that it logs there, by their step."""
    logged: dict[int, Any] = {}
    context: Any = SimpleNamespace(tracker=SimpleNamespace(scalars=logged.__setitem__))
    hook.setup(run, context)
    run.callbacks = {"hook": hook}
    return logged


def train(run: Trainer, *batches: tuple[Tensor, Tensor]) -> Any:
    """The result of the last step."""
    for one in batches:
        run_callbacks(run.callbacks, "on_step_begin", run, [one])
        result = run.train_step(one)
    return result


def test_the_callback_acts_on_what_is_not_left_out_while_the_run_trains_and_no_longer() -> None:
    run, plain = trainer(), trainer()
    rates = LARC(eta=1e-3, without=["*.bias"])
    hooked(rates, run)
    for one in (run, plain):
        one.model[0].weight.requires_grad_(False)  # type: ignore[index]
        one.train_step(batch(0))
    bound, free = (dict(one.model.named_parameters()) for one in (run, plain))
    assert [name for name in bound if not torch.equal(bound[name], free[name])] == ["2.weight"]
    rates.teardown(run, None)
    run.load_weights(copy.deepcopy(plain.weights()))
    for one in (run, plain):
        one.train_step(batch(1))
    assert all(torch.equal(bound[name], free[name]) for name in bound)


@pytest.mark.usefixtures("waited_for")
def test_the_rates_are_logged_by_name_and_step_however_late_the_verdict_comes() -> None:
    """Each is the learning rate times the factor, which is below 1 here."""
    fused = partial(SGD, fused=True)
    at_once, late = (trainer("mixed", cls=fused) for _ in range(2))
    own = {"eta": 1e-3, "without": ["*.bias"], "log_every": 2}
    expected, logged = (hooked(LARC(**own), run) for run in (at_once, late))
    for step in range(4):
        train(at_once, batch(step))
        at_once.read_verdicts()
    train(late, *map(batch, range(4)))
    assert late.progress.pending > 1
    late.read_verdicts()
    assert logged == expected
    assert list(logged) == [2, 4]
    assert logged[2] != logged[4]
    for rates in logged.values():
        assert rates.keys() == {"larc/rate/0.weight", "larc/rate/2.weight"}
        assert all(0 < rate < 0.05 for rate in rates.values())


def penalty(strength: float, *without: str) -> Penalty:
    tree: Any = OmegaConf.load(CONF / "callbacks" / "penalty.yaml")
    node = {**tree["penalty"], "strength": strength, "without": list(without)}
    return make("callbacks.penalty", node)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("mode", "half", "more", "few"), [
    ("fp32", "float16", {}, -1),
    ("mixed", "float16", {}, 2**20),
    ("mixed", "bfloat16", {"clip_value": 2.0**-6}, -1),
    ("amp", "float16", {"clip_value": 2.0**-6}, 2**20),
])  # fmt: skip
def test_a_penalty_is_added_to_the_masters_in_fp32(
    mode: str, half: str, more: Any, few: int, monkeypatch: Patch
) -> None:
    """2^-20 is nothing beside a half weight or its gradient; the clipping comes before it."""
    monkeypatch.setattr(gradients, "_FEW", few)
    monkeypatch.setattr(gradients, "_SIZE_ON_CPU", 1)
    run, plain = (trainer(mode, half, **more) for _ in range(2))
    hooked(penalty(2.0**-20, "*.bias"), run)

    def add_by_hand(own: Any, *_: object) -> None:
        for weight in own.param_groups[0]["params"]:
            if weight.dim() > 1 and weight.grad is not None:
                weight.grad = weight.grad + 2.0**-20 * weight.detach().sign()

    plain.optimizer.register_step_pre_hook(add_by_hand)
    for one in (run, plain):
        one.train_step(batch(0))
    assert same_bits(run.weights().values(), plain.weights().values())


@pytest.mark.parametrize(("make", "plan", "line"), [
    (lambda: LARC(0.0), {}, "larc.eta=0.0: must be a finite number > 0; 0.001 is usual"),
    (lambda: LARC(0.1, mode="lars"), {}, "larc.mode=lars: choose clip (LARC) or scale (LARS)"),
    (lambda: LARC(1), {"clip_norm": 5.0},
     "trainer.clip_norm=5.0: LARC scales each gradient after the clipping, and would undo it; "
     "set trainer.clip_norm=null, or leave callbacks=larc out"),
    (lambda: LARC(1, without=["*.bais"]), {},
     "callbacks.larc.without=[*.bais]: matches no parameter; nearest: 0.bias, 2.bias"),
    (lambda: LARC(1), {"cls": LBFGS},
     "callbacks.larc: the optimizer makes its gradients within its step, where no hook reaches "
     "them; choose an optimizer without a closure"),
    (lambda: penalty(float("nan")), {},
     "callbacks.penalty.strength=nan: must be a finite number > 0"),
    (lambda: GradientNorms(groups={"a": "b*"}), {},
     "callbacks.gradient_norms.groups.a=[b*]: matches no parameter; the names are 0.weight, "
     "0.bias, 2.weight, 2.bias, ..."),
])  # fmt: skip
def test_it_refuses_what_it_cannot_stand_beside(make: Any, plan: Any, line: str) -> None:
    assert refused(ConfigError, lambda: hooked(make(), trainer(**plan))) == line


@pytest.mark.parametrize(("options", "groups"), [
    ({}, ["0", "1"]),
    ({"depth": 2}, ["0.0", "0.2", "1"]),
    ({"groups": {"first": "0.0.*"}}, ["first", "others"]),
])  # fmt: skip
def test_the_groups_norms_make_up_the_gradients(options: Any, groups: list[str]) -> None:
    """After clipping; a skipped step has none."""
    model = nn.Sequential(net(), nn.Linear(3, 3))
    run = prepared(model, nn.CrossEntropyLoss(), "amp", plan=Plan(clip_norm=0.01))
    logged = hooked(GradientNorms(**options, log_every=1), run)
    inputs, targets = batch(2)
    assert train(run, batch(1)).grad_norm > 0.01
    assert train(run, (inputs * torch.inf, targets)).skipped
    (norms,) = logged.values()
    assert sorted(norms) == [f"grad/group/{name}" for name in groups]
    # torch clips to 0.01 / (1 + 1e-6 / norm).
    assert hypot(*norms.values()) == pytest.approx(0.01, rel=1e-4)


def test_a_group_that_two_optimizers_share_has_the_norm_of_both() -> None:
    run = trainer()
    weights, biases = ([p for p in run.model.parameters() if p.dim() == n] for n in (2, 1))
    parts = {"weights": weights, "biases": biases}
    run.optimizer = MultiOptimizer({n: MasterWeights(SGD(own, 0.1)) for n, own in parts.items()})
    logged = hooked(GradientNorms(groups={"all": "*"}, log_every=1), run)
    norm = float(train(run, batch(1)).grad_norm)
    assert float(logged[1]["grad/group/all"]) == pytest.approx(norm, rel=1e-6)
