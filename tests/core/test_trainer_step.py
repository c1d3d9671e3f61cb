"""The trainer's step against loops by hand, and its promise to be all or nothing."""

import copy
from types import SimpleNamespace

import pytest
import torch
from fixtures import refused
from torch import nn
from torch.optim import LBFGS, SGD, AdamW
from vocabulary import differing, same_bits

from mpframe import Backoff, LogMax, Precision, Static, Trainer
from mpframe.core.callback import Algorithm
from mpframe.core.errors import ConfigError
from mpframe.core.objective import supervised
from mpframe.training.callbacks.ema import Ema
from mpframe.training.callbacks.schedules import Schedules, warmup_cosine
from mpframe.training.evaluation import Evaluator
from mpframe.training.plan import Plan
from mpframe.training.trainers.lbfgs import ClosureTrainer

INF = float("inf")  # through BatchNorm it reaches the running statistics and every gradient


def small_net():
    torch.manual_seed(0)
    convolution = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*convolution, nn.Linear(256, 10))


def batches(count):
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(8, 1, 8, 8, generator=generator) for _ in range(count)]
    return [(x, torch.randint(0, 10, (8,), generator=generator)) for x in inputs]


def overflowing(batch):
    return batch[0] * INF, batch[1]


def make_trainer(mode="fp32", half="float16", optimizer=AdamW, plan=None, scaler=None, **hyper):
    model, precision = small_net(), Precision(mode, half)
    plain = optimizer(model.parameters(), **{"lr": 1e-2, **hyper})
    schedule = Schedules(warmup_cosine(plain, total_steps=200))
    _, masters = precision.prepare(model, plain)
    ema = Ema(model, {p: masters.master_of(p) for p in model.parameters()}, 0.9)
    algorithms = {"schedule": schedule, "ema": ema}
    kind = ClosureTrainer if masters.needs_closure else Trainer
    objective, evaluator = supervised(nn.CrossEntropyLoss()), Evaluator()
    options = {"algorithms": algorithms, "plan": plan or Plan(), "evaluator": evaluator}
    return kind(model, masters, objective, precision, scaler, **options)


OPTIONS = {
    "plain": {},
    "clip_norm": {"plan": Plan(clip_norm=0.5)},
    "clip_value": {"scaler": Static(2.0**10), "plan": Plan(clip_value=2.0**-6)},
    "scaled": {"scaler": Static(2.0**-7), "plan": Plan(clip_norm=0.5)},
    "lbfgs": {"optimizer": LBFGS, "lr": 0.1, "max_iter": 5},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_fp32_equals_a_loop_by_hand(options) -> None:
    """BatchNorm's statistics and the schedule included: an evaluation of LBFGS moves the former."""
    trainer, model = make_trainer(**options), small_net()
    hyper = {"lr": 1e-2} | {key: options[key] for key in ("lr", "max_iter") if key in options}
    optimizer = options.get("optimizer", AdamW)(model.parameters(), **hyper)
    schedule = warmup_cosine(optimizer, total_steps=200)
    for inputs, targets in batches(15):

        def closure(inputs=inputs, targets=targets):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            if trainer.plan.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), trainer.plan.clip_norm)
            if trainer.plan.clip_value is not None:
                nn.utils.clip_grad_value_(model.parameters(), trainer.plan.clip_value)
            return loss

        loss = optimizer.step(closure)
        schedule.step()
        assert torch.equal(trainer.train_step((inputs, targets)).loss, loss.detach())
    state, expected = trainer.state_dict(), (model.state_dict(), optimizer.state_dict())
    assert differing((state["weights"], state["optimizer"]), expected) == []
    assert trainer.progress.steps == 15


@pytest.mark.parametrize(
    ("mode", "half", "scaler"),
    [
        ("fp32", "float16", LogMax),
        ("mixed", "float16", Backoff),
        ("mixed", "bfloat16", lambda: Static(2.0**10)),
        ("amp", "float16", LogMax),
    ],
)
def test_a_loop_of_ones_own_makes_the_same_steps_of_the_same_parts(mode, half, scaler) -> None:
    by_hand, trainer = (
        make_trainer(mode, half, scaler=scaler(), plan=Plan(clip_norm=1.0)) for _ in range(2)
    )
    trainer.algorithms, data, skipped = {}, batches(10), []
    data[3] = overflowing(data[3])
    for inputs, targets in data:  # as it is documented
        with by_hand.precision.cast():
            loss = nn.functional.cross_entropy(by_hand.model(inputs), targets)
        (loss * by_hand.scaler.scale).backward()
        result = by_hand.optimizer.step(by_hand.scaler, max_norm=1.0)
        by_hand.optimizer.zero_grad()
        skipped.append(bool(result.skipped))
        trainer.train_step((inputs, targets))
    assert [step for step, own in enumerate(skipped) if own] == [3]
    assert same_bits(by_hand.model.parameters(), trainer.model.parameters())


def test_what_does_not_go_with_a_closure_and_a_step_without_a_batch_are_refused() -> None:
    clipping = "clipping; use trainer.clip_norm=null trainer.clip_value=null"
    for options, text in (
        ({"mode": "mixed"}, "half weights; use dtype=fp32"),
        ({"mode": "amp"}, "ops cast to half; use dtype=fp32"),
        ({"scaler": Static(2.0)}, "loss scaling; use loss_scaling=none"),
        ({"plan": Plan(clip_norm=1.0)}, clipping),
        ({"plan": Plan(clip_value=1.0)}, clipping),
        ({"plan": Plan(accumulate=2)}, "accumulation; use trainer.accumulate=1"),
    ):
        said = refused(ConfigError, make_trainer, optimizer=LBFGS, **options)
        assert said.startswith(f"optimizer=LBFGS: a closure goes without {text} or")
    said = refused(ConfigError, make_trainer().train_step)
    assert said.startswith("train_step: there is no batch; give it one")


@pytest.mark.parametrize("mode", ["fp32", "mixed"])
def test_a_step_starts_without_the_gradients_that_others_left(mode) -> None:
    plain, measured = make_trainer(mode), make_trainer(mode)
    for batch in batches(3):
        measured.backward(batch)
        norms = [trainer.train_step(batch).grad_norm for trainer in (plain, measured)]
        assert torch.equal(*norms)
    assert same_bits(plain.model.parameters(), measured.model.parameters())


@pytest.mark.parametrize(("mode", "scale"), [("fp32", 2**12), ("mixed", 2**12), ("amp", 2.0**-4)])
def test_amax_and_norm_are_unscaled(mode, scale) -> None:
    scaled = make_trainer(mode, scaler=Static(scale)).train_step(batches(1)[0])
    reference = make_trainer().train_step(batches(1)[0])
    # One rounding to half of each factor and each result: a few parts in 2^11, and sums of
    # hundreds of such terms average the errors out.
    tolerance = 0.0 if mode == "fp32" else 2.0**-4
    found, expected = ((own.amax, own.grad_norm) for own in (scaled, reference))
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=0.0)
    assert float(scaled.scale) == scale


FUSED, MOMENTUM = {"fused": True}, {"optimizer": SGD, "momentum": 0.9}


@pytest.mark.parametrize(
    ("mode", "half", "scaler", "window", "options"),
    [
        ("fp32", "float16", None, 1, {}),
        ("fp32", "float16", LogMax, 3, MOMENTUM | FUSED),
        ("mixed", "float16", Backoff, 1, FUSED),
        ("mixed", "float16", LogMax, 3, {"foreach": False}),
        ("mixed", "bfloat16", Static, 3, MOMENTUM),
        ("amp", "float16", Backoff, 3, FUSED),
        ("amp", "bfloat16", None, 1, MOMENTUM | FUSED),
    ],
)
def test_a_skipped_step_changes_nothing_but_the_scale(mode, half, scaler, window, options) -> None:
    trainer, data = make_trainer(mode, half, scaler=scaler and scaler(), **options), batches(6)
    trainer.train_step(*data[:window])
    before = copy.deepcopy(trainer.state_dict())
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    result = trainer.train_step(*(overflowing(batch) for batch in data[3 : 3 + window]))
    assert (bool(result.skipped), bool(torch.isfinite(result.amax))) == (True, False)
    changed = differing(before, trainer.state_dict())
    assert {path.split("/")[1] for path in changed} <= {"scaler", "progress"}
    counted = ["skipped", "skipped_in_a_row", *(["dropped"] if window > 1 else [])]
    assert [p for p in changed if "progress" in p] == [f"/progress/{name}" for name in counted]
    assert same_bits(trainer.model.parameters(), weights)


@pytest.mark.parametrize(("mode", "half"), [("fp32", "float16"), ("mixed", "bfloat16")])
def test_one_bad_micro_batch_is_dropped_and_the_divisor_corrected(mode, half) -> None:
    good, bad, other = batches(3)
    with_bad, without = (make_trainer(mode, half, scaler=Static(4.0)) for _ in range(2))
    result = with_bad.train_step(good, overflowing(bad), other)
    expected = without.train_step(good, other)
    assert (int(result.dropped), with_bad.progress.dropped, bool(result.skipped)) == (1, 1, False)
    assert same_bits([result.loss, result.amax], [expected.loss, expected.amax])
    assert differing(with_bad.state_dict(), without.state_dict()) == ["/progress/dropped"]


def test_evaluation_uses_the_average_and_leaves_the_state_and_the_mode_of_each_module() -> None:
    """A pretrained BatchNorm often stays in eval mode. A layer may act when its mode changes."""
    trainer, loader = make_trainer(), SimpleNamespace(epoch=lambda _: batches(2))
    for batch in batches(5):
        trainer.train_step(batch)
    before, last, seen = copy.deepcopy(trainer.state_dict()), trainer.model[-1], []
    trainer.model[1].eval()
    last.train = lambda mode=True: seen.append(mode) or nn.Linear.train(last, mode)
    with_average = trainer.evaluate(loader)
    assert differing(before, trainer.state_dict()) == []
    modes = [module.training for module in trainer.model.modules()]
    assert (modes, seen) == ([True, True, False, True, True, True], [False, True])
    trainer.algorithms = {}
    assert trainer.evaluate(loader).loss != with_average.loss


@pytest.mark.parametrize("order", [(True, False), (False, True), (False, False)])
def test_any_algorithm_may_skip_a_step(order) -> None:
    trainer = make_trainer()
    trainer.algorithms = {str(number): Algorithm() for number in range(2)}
    for algorithm, skips in zip(trainer.algorithms.values(), order, strict=True):
        algorithm.before_update = lambda *_, skips=skips: torch.tensor(skips)
    assert bool(trainer.train_step(batches(1)[0]).skipped) is any(order)
