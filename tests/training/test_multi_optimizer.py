"""Several optimizers, of one loss or with a loss each: loops by hand, and who moves when."""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fixtures import Patch
from prepared import prepared
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR
from vocabulary import differing

from mpframe import Backoff, LogMax, Plan, Precision, Schedules, Static, Trainer
from mpframe.core.callback import Batch
from mpframe.core.errors import CheckpointError, ConfigError, DivergedError, MpframeError
from mpframe.core.objective import Objective, StepOutput, supervised
from mpframe.training.callbacks.guards import SkipGuard
from mpframe.training.optimizers.multi_optimizer import MultiOptimizer
from mpframe.training.trainers.multi_objective import MultiObjectiveTrainer
from mpframe.workloads.gan import Gan, discriminator_objective, generator_objective

# Each with the part, or the loss, that overflows.
BAD = [("fp32", "float16", 0), ("mixed", "float16", 1)]
BAD += [("mixed", "bfloat16", 0), ("amp", "float16", 1)]
INF = float("inf")
PARTS = ("body", "head")
OBJECTIVES = {"discriminator": discriminator_objective, "generator": generator_objective}


def body_and_head() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def batches(count: int) -> list[Batch]:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 8, 6, generator=draw)
    return list(zip(inputs, torch.randint(0, 3, (count, 8), generator=draw), strict=True))


def plain_parts(model: nn.Module) -> dict[str, Optimizer]:
    body, head = model[0].parameters(), model[2].parameters()
    return {"body": AdamW(body, lr=1e-2), "head": SGD(head, 0.1, momentum=0.9)}


def joint(mode: str = "fp32", half: str = "float16", skip: str = "all") -> Any:
    model, precision = body_and_head(), Precision(mode, half)
    parts = {n: precision.prepare(model, own)[1] for n, own in plain_parts(model).items()}
    return model, MultiOptimizer(parts, skip=skip), precision


def snapshot(optimizer: Any) -> dict[str, Any]:
    parts = optimizer.parts.items()
    return {name: copy.deepcopy([part.parameters, part.state_dict()]) for name, part in parts}


def same(one: Any, other: Any) -> bool:
    return not differing(one, other)


def backward(model: nn.Module, precision: Precision) -> None:
    inputs, targets = batches(1)[0]
    with precision.cast():
        outputs = model(inputs)
    nn.functional.cross_entropy(outputs.float(), targets).backward()


def spoil(optimizer: MultiOptimizer, part: str) -> None:
    optimizer.parts[part].parameters[0].grad.view(-1)[0] = INF


@pytest.mark.parametrize(
    ("skip", "clipping"), [("all", {}), ("each", {"max_norm": 0.05}), ("all", {"max_value": 0.005})]
)
def test_in_fp32_it_is_the_loop_by_hand(skip: str, clipping: dict[str, float]) -> None:
    (model, optimizer, _), hand, scaler = joint(skip=skip), body_and_head(), Static(2.0**10)
    plain = plain_parts(hand)
    for inputs, targets in batches(20):
        (nn.functional.cross_entropy(model(inputs), targets) * scaler.scale).backward()
        assert not optimizer.step(scaler, **clipping).skipped
        optimizer.zero_grad()
        hand.zero_grad()
        nn.functional.cross_entropy(hand(inputs), targets).backward()
        if "max_norm" in clipping:
            nn.utils.clip_grad_norm_(hand.parameters(), clipping["max_norm"])
        if "max_value" in clipping:
            nn.utils.clip_grad_value_(hand.parameters(), clipping["max_value"])
        for own in plain.values():
            own.step()
    # The norm of all parameters at once, and that of the parts' norms, differ in their last bit.
    tolerance = 1e-6 if "max_norm" in clipping else 0.0
    mine, theirs = list(model.parameters()), list(hand.parameters())
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("skip", ["all", "each"])
@pytest.mark.parametrize(("mode", "half", "number"), BAD)
def test_all_or_nothing_or_each_on_its_own(mode: str, half: str, number: int, skip: str) -> None:
    bad, good = PARTS[number], PARTS[1 - number]
    (model, optimizer, precision), (twin, alone, _) = (joint(mode, half, skip) for _ in range(2))
    for net, own in ((model, optimizer), (twin, alone)):
        backward(net, precision)
        assert not own.step(Static(1.0)).skipped
        own.zero_grad()
        backward(net, precision)
    before, scaler = snapshot(optimizer), Backoff()
    spoil(optimizer, bad)
    result = optimizer.step(scaler if skip == "all" else Static(1.0), max_norm=1e-3)
    skipped = {name: bool(part.skipped) for name, part in result.each().items()}
    assert bool(result.skipped) == (skip == "all")
    assert skipped == {bad: True, good: skip == "all"}
    if skip == "each":
        alone.parts[bad].zero_grad()
        alone.parts[good].step(Static(1.0), max_norm=1e-3)
        assert not same(before[good], snapshot(alone)[good])
        before[good] = snapshot(alone)[good]
    else:
        assert scaler.scale == 2.0**15
    assert same(before, snapshot(optimizer))


@pytest.mark.parametrize(("skip", "skipped"), [("all", ["body", "head"]), ("each", ["head"])])
def test_a_bad_micro_batch_or_mean_of_all_ranks_is_left_out(skip: str, skipped: list[str]) -> None:
    """An inf on any rank is one in the mean. The amax is that of all parts, for the scaler."""
    (model, optimizer, precision), (twin, other, _) = (joint(skip=skip) for _ in range(2))
    for number in range(3):
        backward(model, precision)
        backward(twin, precision)
        if number == 1:
            spoil(optimizer, "head")
            for name in skipped:
                spoil(other, name)
        assert torch.isfinite(optimizer.accumulate()) == (number != 1)
        for part in other.parts.values():
            part.accumulate()
    assert optimizer.step(None).dropped == 1
    for part in other.parts.values():
        part.step(None)
    assert same(snapshot(optimizer), snapshot(other))
    optimizer.zero_grad()
    backward(model, precision)
    spoil(optimizer, "head")
    means = {parameter: parameter.grad for parameter in model.parameters()}
    optimizer.zero_grad()
    optimizer.set_reduced_grads(means, torch.tensor(INF), torch.tensor(INF))
    parts = optimizer.step(None).each()
    assert [name for name, part in parts.items() if part.skipped] == skipped


@pytest.mark.parametrize(("mode", "half", "number"), BAD[:2])
def test_one_part_of_one_loss_skips_with_buffers_undone(mode: str, half: str, number: int) -> None:
    """The other part steps; the statistics are those of a batch that was not wholly good."""
    bad = PARTS[number]
    model, optimizer, precision = joint(mode, half, "each")
    model[1] = nn.BatchNorm1d(8, affine=False)
    optimizer.parts[bad].parameters[0].register_hook(lambda gradient: gradient * INF)
    trainer = Trainer(model, optimizer, supervised(nn.CrossEntropyLoss()), precision)
    before = copy.deepcopy(list(model.buffers()))
    result = trainer.train_step(batches(1)[0])
    assert [name for name, part in result.each().items() if part.skipped] == [bad]
    assert not result.skipped
    assert same(before, list(model.buffers()))


def gan_trainer(
    mode: str = "fp32", half: str = "float16", skip: str = "each", scaler: Any = None,
    objectives: dict[str, Objective] | None = None, plan: Plan | None = None, fused: bool = False,
) -> Trainer:  # fmt: skip
    torch.manual_seed(0)
    model, precision = Gan([1, 4, 4], latent=4, hidden=8), Precision(mode, half)
    adam = partial(Adam, lr=1e-2, fused=fused)
    plain = {name: adam(getattr(model, name).parameters()) for name in OBJECTIVES}
    parts = {name: precision.prepare(model, own)[1] for name, own in plain.items()}
    schedules = Schedules({name: ExponentialLR(own, 0.9) for name, own in plain.items()})
    optimizer = MultiOptimizer(parts, skip=skip, own_losses=True)
    rest: Any = {"scaler": scaler, "algorithms": {"schedule": schedules}, "plan": plan or Plan()}
    return MultiObjectiveTrainer(model, optimizer, objectives or OBJECTIVES, precision, **rest)


def images(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(8, 1, 4, 4, generator=generator), torch.zeros(8)) for _ in range(count)]


@pytest.mark.parametrize(("skip", "fused"), [("each", False), ("each", True), ("all", True)])
def test_a_gan_in_fp32_is_the_loop_by_hand(skip: str, fused: bool) -> None:
    """Fused optimizers skip on the device: schedules need their verdict before the next step."""
    trainer = gan_trainer(skip=skip, scaler=Static(2.0**8), fused=fused)
    model: Any = copy.deepcopy(trainer.model)
    adam, softplus = partial(Adam, lr=1e-2, fused=fused), nn.functional.softplus
    judge, maker = (adam(getattr(model, name).parameters()) for name in OBJECTIVES)
    rates = [ExponentialLR(own, 0.9) for own in (judge, maker)]
    torch.manual_seed(5)
    for batch in images(6):
        trainer.train_step(batch)
    torch.manual_seed(5)
    for inputs, _ in images(6):
        made = model.generator(torch.randn(len(inputs), model.latent))
        real, fake = model.discriminator(inputs), model.discriminator(made.detach())
        judge.zero_grad()
        (softplus(-real).mean() + softplus(fake).mean()).backward()
        if skip == "each":  # They take turns: the generator meets the updated discriminator.
            judge.step()
        made = model.generator(torch.randn(len(inputs), model.latent))
        maker.zero_grad()
        loss = softplus(-model.discriminator(made)).mean()
        loss.backward(inputs=list(model.generator.parameters()))
        for own in (maker,) if skip == "each" else (judge, maker):
            own.step()
        for rate in rates:
            rate.step()
    assert same(dict(trainer.model.state_dict()), dict(model.state_dict()))


def breaking(name: str) -> dict[str, Objective]:
    def spoiled(model: nn.Module, batch: Any) -> StepOutput:
        output = OBJECTIVES[name](model, batch)
        return replace(output, loss=output.loss * INF)

    return {**OBJECTIVES, name: spoiled}


def test_a_run_that_only_skips_names_the_part_that_did() -> None:
    trainer = gan_trainer(objectives=breaking("generator"))
    trainer.callbacks = {"guard": SkipGuard(3)}
    *first, last = images(3)
    for batch in first:
        trainer.train_step(batch)
    said = r"^trainer\.max_consecutive_skips=3 reached by optimizer\.parts\.generator: the loss its"
    with pytest.raises(DivergedError, match=said):
        trainer.train_step(last)


def state_of(trainer: Trainer) -> dict[str, Any]:
    rates: Any = trainer.algorithms["schedule"]
    parts = snapshot(trainer.optimizer).items()
    return {name: [own, copy.deepcopy(rates.by_name[name].state_dict())] for name, own in parts}


@pytest.mark.parametrize("skip", ["each", "all"])
@pytest.mark.parametrize(("mode", "half", "number"), BAD)
def test_one_loss_overflows_alone_or_for_all(mode: str, half: str, number: int, skip: str) -> None:
    bad, good = list(OBJECTIVES)[number], list(OBJECTIVES)[1 - number]
    scalers = {name: Backoff(growth_interval=1) for name in OBJECTIVES}
    trainer = gan_trainer(mode, half, skip, scalers, breaking(bad))
    before, buffers = state_of(trainer), copy.deepcopy(list(trainer.model.buffers()))
    result: Any = trainer.train_step(images(1)[0])
    done, each = trainer.progress, skip == "each"
    assert same(before[bad], state_of(trainer)[bad])
    assert same(before[good], state_of(trainer)[good]) != each
    assert each or same(buffers, list(trainer.model.buffers()))
    assert scalers[bad].scale <= 2.0**15 < scalers[good].scale
    assert (done.steps, done.skipped, done.skipped_in_a_row) == (each, not each, 1)
    assert not each or done.part_skips == {bad: 1, good: 0}
    assert torch.isfinite(result.parts[good].loss)


@pytest.mark.parametrize("skip", ["each", "all"])
def test_a_shared_scaler_is_told_once_a_step_of_the_largest(skip: str, monkeypatch: Patch) -> None:
    told: list[Tensor] = []
    monkeypatch.setattr(Static, "update", lambda scaler, amax: told.append(amax))
    trainer = gan_trainer(skip=skip, scaler=Static(2.0**4))
    results = [trainer.train_step(batch) for batch in images(4)]
    assert told == [max(part.amax for part in result.each().values()) for result in results]


@pytest.mark.parametrize(
    ("mode", "half", "skip"), [("mixed", "float16", "each"), ("amp", "bfloat16", "all")]
)
def test_a_gan_resumes_bit_for_bit_after_a_probe(mode: str, half: str, skip: str) -> None:
    own: Any = {"plan": Plan(accumulate=2, clip_norm=1.0)}
    own["scaler"] = {name: LogMax(init_scale="probe") for name in OBJECTIVES}
    whole, resumed = (gan_trainer(mode, half, skip, **copy.deepcopy(own)) for _ in range(2))
    before = copy.deepcopy(dict(whole.model.state_dict()))
    whole.probe(images(1)[0])
    assert same(before, dict(whole.model.state_dict()))
    assert not any(scaler.wants_probe for scaler in whole.scalers.values())
    for number in range(4):
        if number == 2:
            resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
        for trainer in (whole, resumed) if number >= 2 else (whole,):
            torch.manual_seed(number)
            trainer.train_step(*images(8)[2 * number : 2 * number + 2])
    assert same(whole.state_dict(), resumed.state_dict())


def parts_of_one(**classes: Any) -> MultiOptimizer:
    model, precision = nn.Linear(2, 2), Precision()
    made = {name: cls(model.parameters(), lr=1.0) for name, cls in classes.items()}
    return MultiOptimizer({name: precision.prepare(model, own)[1] for name, own in made.items()})


@pytest.mark.parametrize(("make", "error", "line"), [
    (lambda: joint(skip="some"), ConfigError, r"optimizer\.skip=some: must be all or each"),
    (lambda: prepared(nn.Linear(2, 2), nn.MSELoss(), scaler={"a": Backoff()}), ConfigError, r"optimizer\.scalers=each: there is one loss, and one backward pass has one scale; use optimizer\.scalers=shared"),
    (lambda: parts_of_one(one=SGD, two=SGD), ConfigError, r"optimizer\.parts: 2 parameters are in one and in two; each belongs to one part"),
    (lambda: joint()[1].load_state_dict({"a": {}}), CheckpointError, r"optimizer\.parts: the checkpoint has a, this run body, head"),
    (lambda: gan_trainer(objectives={"judge": discriminator_objective}), ConfigError, r"optimizer\.parts=discriminator, generator: the losses are judge; give each an optimizer by its name"),
    (lambda: gan_trainer(scaler=dict.fromkeys(OBJECTIVES, Backoff())).load_state_dict(
        gan_trainer(scaler=Backoff()).state_dict()), CheckpointError, "loss_scaling: the checkpoint has a single one, this run discriminator, generator"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(make: Any, error: type[MpframeError], line: str) -> None:
    with pytest.raises(error, match=line):
        make()
