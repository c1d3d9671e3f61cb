"""Several optimizers in one step: exact against loops by hand, and who moves after an overflow."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vocabulary import differing, flat

from mpframe import Backoff, LogMax, Precision, Static, Trainer
from mpframe.core.callback import Batch
from mpframe.core.errors import CheckpointError, ConfigError, DivergedError
from mpframe.core.objective import Objective, StepOutput, supervised
from mpframe.training.callbacks.guards import SkipGuard, saturation_warning
from mpframe.training.callbacks.schedules import Schedules
from mpframe.training.optimizers.multi_objective import MultiObjectiveTrainer
from mpframe.training.optimizers.multi_optimizer import MultiOptimizer
from mpframe.training.plan import Plan
from mpframe.workloads.gan import Gan, discriminator_objective, generator_objective

# Each with the part, or the loss, that overflows.
BAD = [
    ("fp32", "float16", 0),
    ("mixed", "float16", 1),
    ("mixed", "bfloat16", 0),
    ("amp", "float16", 1),
]
INF = float("inf")
PARTS = ("body", "head")
OBJECTIVES = {"discriminator": discriminator_objective, "generator": generator_objective}


def body_and_head() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator))
        for _ in range(count)
    ]


def plain_parts(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    return {
        "body": torch.optim.AdamW(model[0].parameters(), lr=1e-2),
        "head": torch.optim.SGD(model[2].parameters(), lr=1e-1, momentum=0.9),
    }


def joint(
    mode: str = "fp32", half: str = "float16", skip: str = "all"
) -> tuple[nn.Module, MultiOptimizer, Precision]:
    model, precision = body_and_head(), Precision(mode, half)
    parts = {n: precision.prepare(model, own)[1] for n, own in plain_parts(model).items()}
    return model, MultiOptimizer(parts, skip=skip), precision


def snapshot(model: nn.Module, optimizer: MultiOptimizer) -> dict[str, Any]:
    """Weights, masters and optimizer state of each part."""
    return {
        name: copy.deepcopy([part.parameters, part.state_dict()])
        for name, part in optimizer.parts.items()
    }


def same(one: Any, other: Any) -> bool:
    return flat(one).keys() == flat(other).keys() and not differing(one, other)


@pytest.mark.parametrize(
    ("skip", "clipping"), [("all", {}), ("each", {"max_norm": 0.05}), ("all", {"max_value": 0.005})]
)
def test_in_fp32_it_is_the_loop_by_hand(skip: str, clipping: dict[str, float]) -> None:
    model, optimizer, _ = joint(skip=skip)
    hand = body_and_head()
    plain = plain_parts(hand)
    scaler = Static(2.0**10)
    for inputs, targets in batches(20):
        (nn.functional.cross_entropy(model(inputs), targets) * scaler.scale).backward()
        result = optimizer.step(scaler, **clipping)
        optimizer.zero_grad()
        for own in plain.values():
            own.zero_grad()
        nn.functional.cross_entropy(hand(inputs), targets).backward()
        if "max_norm" in clipping:
            nn.utils.clip_grad_norm_(hand.parameters(), clipping["max_norm"])
        if "max_value" in clipping:
            nn.utils.clip_grad_value_(hand.parameters(), clipping["max_value"])
        for own in plain.values():
            own.step()
        assert not result.skipped
    # The norm of all parameters at once, and that of the parts' norms, differ in their last bit.
    tolerance = 1e-6 if "max_norm" in clipping else 0.0
    for mine, theirs in zip(model.parameters(), hand.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("mode", "half", "number"), BAD)
def test_all_or_nothing(mode: str, half: str, number: int) -> None:
    bad = PARTS[number]
    model, optimizer, precision = joint(mode, half, "all")
    one_good_step(model, optimizer, precision)
    before = snapshot(model, optimizer)
    backward(model, precision)
    spoil(optimizer, bad)
    scaler = Backoff()
    result = optimizer.step(scaler)
    assert result.skipped
    assert all(part.skipped for part in result.each().values())
    assert same(before, snapshot(model, optimizer))
    assert scaler.scale == 2.0**15


@pytest.mark.parametrize(("mode", "half", "number"), BAD)
def test_each_on_its_own(mode: str, half: str, number: int) -> None:
    bad, good = PARTS[number], PARTS[1 - number]
    model, optimizer, precision = joint(mode, half, "each")
    twin, alone, _ = joint(mode, half, "each")
    for net, own in ((model, optimizer), (twin, alone)):
        one_good_step(net, own, precision if net is model else _)
    before = snapshot(model, optimizer)
    backward(model, precision)
    backward(twin, _)
    spoil(optimizer, bad)
    result = optimizer.step(Static(1.0), max_norm=1e-3)
    for parameter in alone.parts[bad].parameters:
        parameter.grad = None
    alone.parts[good].step(Static(1.0), max_norm=1e-3)
    after, expected = snapshot(model, optimizer), snapshot(twin, alone)
    assert not result.skipped
    skipped = {name: bool(part.skipped) for name, part in result.each().items()}
    assert skipped == {bad: True, good: False}
    assert same(before[bad], after[bad])
    assert same(expected[good], after[good])
    assert not same(before[good], after[good])


def one_good_step(model: nn.Module, optimizer: MultiOptimizer, precision: Precision) -> None:
    backward(model, precision)
    assert not optimizer.step(Static(1.0)).skipped
    optimizer.zero_grad()


def backward(model: nn.Module, precision: Precision) -> None:
    inputs, targets = batches(1)[0]
    with precision.cast():
        outputs = model(inputs)
    nn.functional.cross_entropy(outputs.float(), targets).backward()


def spoil(optimizer: MultiOptimizer, part: str) -> None:
    gradient = optimizer.parts[part].parameters[0].grad
    assert gradient is not None
    gradient.view(-1)[0] = INF


@pytest.mark.parametrize(("skip", "dropped"), [("all", ["body", "head"]), ("each", ["head"])])
def test_a_bad_micro_batch_is_dropped_by_all_or_by_its_part(skip: str, dropped: list[str]) -> None:
    model, optimizer, precision = joint(skip=skip)
    twin, other, _ = joint(skip=skip)
    for number in range(3):
        backward(model, precision)
        if number == 1:
            spoil(optimizer, "head")
        amax = optimizer.accumulate()
        assert torch.isfinite(amax) == (number != 1)
        backward(twin, _)
        for name in dropped if number == 1 else []:
            for parameter in other.parts[name].parameters:
                parameter.grad = torch.full_like(parameter, INF)
        for part in other.parts.values():
            part.accumulate()
    result = optimizer.step(None)
    for part in other.parts.values():
        part.step(None)
    assert result.dropped == 1
    assert same(snapshot(model, optimizer), snapshot(twin, other))


@pytest.mark.parametrize(("skip", "skipped"), [("all", {"body", "head"}), ("each", {"head"})])
def test_means_of_all_ranks_skip_all_or_their_part(skip: str, skipped: set[str]) -> None:
    """An inf on any rank is one in the mean. The amax is that of all parts, for the scaler."""
    model, optimizer, precision = joint(skip=skip)
    backward(model, precision)
    spoil(optimizer, "head")
    means = {parameter: parameter.grad for parameter in model.parameters()}
    optimizer.zero_grad()
    optimizer.set_reduced_grads(means, torch.tensor(INF), torch.tensor(INF))
    parts = optimizer.step(None).each()
    assert {name for name, part in parts.items() if part.skipped} == skipped


def test_its_state_continues_bit_for_bit() -> None:
    model, optimizer, precision = joint("mixed")
    one_good_step(model, optimizer, precision)
    twin, loaded, other = joint("mixed")
    loaded.load_masters(twin, {**model.state_dict(), **optimizer.masters_by_name(model)})
    loaded.load_state_dict(copy.deepcopy(optimizer.inner_state_dict()))
    for net, own, cast in ((model, optimizer, precision), (twin, loaded, other)):
        one_good_step(net, own, cast)
    assert same(snapshot(model, optimizer), snapshot(twin, loaded))
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_weight_beyond_half_is_held_at_its_end_after_loading() -> None:
    model, optimizer, _ = joint("mixed")
    weights = {**model.state_dict(), **optimizer.masters_by_name(model)}
    weights["0.weight"] = torch.full((8, 6), 1e6)
    optimizer.load_masters(model, weights)
    assert torch.equal(model[0].weight, torch.full((8, 6), 65504.0, dtype=torch.float16))
    assert torch.equal(optimizer.master_of(model[0].weight), weights["0.weight"])
    assert "48 weights" in (saturation_warning(optimizer, model) or "")


def gan_trainer(
    mode: str = "fp32",
    half: str = "float16",
    skip: str = "each",
    scaler: Any = None,
    objectives: dict[str, Objective] | None = None,
    plan: Plan | None = None,
    fused: bool | None = None,
) -> Trainer:
    torch.manual_seed(0)
    model, precision = Gan([1, 4, 4], latent=4, hidden=8), Precision(mode, half)
    plain = {
        name: torch.optim.Adam(getattr(model, name).parameters(), lr=1e-2, fused=fused)
        for name in ("discriminator", "generator")
    }
    parts = {name: precision.prepare(model, own)[1] for name, own in plain.items()}
    schedules = {
        name: torch.optim.lr_scheduler.ExponentialLR(own, 0.9) for name, own in plain.items()
    }
    return MultiObjectiveTrainer(
        model,
        MultiOptimizer(parts, skip=skip, own_losses=True),
        objectives or OBJECTIVES,
        precision,
        scaler=scaler,
        algorithms={"schedule": Schedules(schedules)},
        plan=plan or Plan(),
    )


def images(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(8, 1, 4, 4, generator=generator), torch.zeros(8)) for _ in range(count)]


@pytest.mark.parametrize(("skip", "fused"), [("each", None), ("each", True), ("all", True)])
def test_a_gan_in_fp32_is_the_loop_by_hand(skip: str, fused: bool | None) -> None:
    """Fused optimizers skip on the device: the schedules need their verdict before the next step."""
    trainer = gan_trainer(skip=skip, scaler=Static(2.0**8), fused=fused)
    model = copy.deepcopy(trainer.model)
    judge = torch.optim.Adam(model.discriminator.parameters(), lr=1e-2, fused=fused)
    maker = torch.optim.Adam(model.generator.parameters(), lr=1e-2, fused=fused)
    rates = [torch.optim.lr_scheduler.ExponentialLR(own, 0.9) for own in (judge, maker)]
    torch.manual_seed(5)
    for batch in images(6):
        trainer.train_step(batch)
    torch.manual_seed(5)
    for inputs, _ in images(6):
        take_gradients(model, "discriminator", discriminator_by_hand(model, inputs))
        if skip == "each":  # They take turns: the generator meets the updated discriminator.
            judge.step()
        take_gradients(model, "generator", generator_by_hand(model, inputs))
        if skip == "all":
            judge.step()
        maker.step()
        for rate in rates:
            rate.step()
    for (name, mine), theirs in zip(
        trainer.model.state_dict().items(), model.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, theirs), name


def discriminator_by_hand(model: Any, inputs: Tensor) -> Tensor:
    made = model.generator(torch.randn(len(inputs), model.latent))
    real, fake = model.discriminator(inputs), model.discriminator(made.detach())
    return nn.functional.softplus(-real).mean() + nn.functional.softplus(fake).mean()


def generator_by_hand(model: Any, inputs: Tensor) -> Tensor:
    made = model.generator(torch.randn(len(inputs), model.latent))
    return nn.functional.softplus(-model.discriminator(made)).mean()


def take_gradients(model: Any, name: str, loss: Tensor) -> None:
    """The gradients of a loss, in the parameters of its own part and nowhere else."""
    parameters = list(getattr(model, name).parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient


def broken(objective: Objective) -> Objective:
    """The loss times inf: its gradients are not finite."""

    def spoiled(model: nn.Module, batch: Any) -> StepOutput:
        output = objective(model, batch)
        return replace(output, loss=output.loss * INF)

    return spoiled


def test_a_run_that_only_skips_names_the_part_that_did() -> None:
    objectives = {**OBJECTIVES, "generator": broken(OBJECTIVES["generator"])}
    trainer = gan_trainer(objectives=objectives)
    trainer.callbacks = {"guard": SkipGuard(3)}
    part = r"optimizer\.parts\.generator"
    said = rf"^trainer\.max_consecutive_skips=3 reached by {part}: the loss itself"
    first, second, third = images(3)
    trainer.train_step(first)
    trainer.train_step(second)
    with pytest.raises(DivergedError, match=said):
        trainer.train_step(third)


def state_of(trainer: Trainer, name: str) -> Any:
    part = trainer.optimizer.parts[name]  # type: ignore[union-attr]
    rate = trainer.algorithms["schedule"].by_name[name].state_dict()  # type: ignore[attr-defined]
    return copy.deepcopy([part.parameters, part.state_dict(), rate])


@pytest.mark.parametrize(("mode", "half", "number"), BAD)
def test_one_loss_overflows_and_the_other_goes_on(mode: str, half: str, number: int) -> None:
    bad, good = list(OBJECTIVES)[number], list(OBJECTIVES)[1 - number]
    scalers = {"discriminator": Backoff(), "generator": LogMax()}
    objectives = {**OBJECTIVES, bad: broken(OBJECTIVES[bad])}
    trainer = gan_trainer(mode, half, "each", scalers, objectives)
    before = {name: state_of(trainer, name) for name in OBJECTIVES}
    result = trainer.train_step(images(1)[0])
    assert same(before[bad], state_of(trainer, bad))
    assert not same(before[good], state_of(trainer, good))
    assert scalers[bad].scale <= 2.0**15
    assert scalers[good].scale > scalers[bad].scale
    assert trainer.progress.part_skips == {bad: 1, good: 0}
    assert (trainer.progress.steps, trainer.progress.skipped) == (1, 0)
    assert trainer.progress.skipped_in_a_row == 1
    assert result.parts is not None
    assert torch.isfinite(result.parts[good].loss)  # type: ignore[arg-type]


@pytest.mark.parametrize(("mode", "half", "number"), BAD)
def test_one_loss_overflows_and_nobody_moves(mode: str, half: str, number: int) -> None:
    bad = list(OBJECTIVES)[number]
    objectives = {**OBJECTIVES, bad: broken(OBJECTIVES[bad])}
    scaler = Backoff()
    trainer = gan_trainer(mode, half, "all", scaler, objectives)
    buffers = copy.deepcopy(list(trainer.model.buffers()))
    before = {name: state_of(trainer, name) for name in OBJECTIVES}
    assert trainer.train_step(images(1)[0]).skipped
    assert same(before, {name: state_of(trainer, name) for name in OBJECTIVES})
    assert same(buffers, list(trainer.model.buffers()))
    assert scaler.scale == 2.0**15
    assert (trainer.progress.steps, trainer.progress.skipped) == (0, 1)


@pytest.mark.parametrize(("mode", "half", "number"), BAD[:2])
def test_one_part_of_one_loss_is_skipped_and_the_buffers_are_undone(
    mode: str, half: str, number: int
) -> None:
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


@pytest.mark.parametrize("skip", ["each", "all"])
def test_a_shared_scaler_is_told_once_a_step_of_the_largest(skip: str) -> None:
    class Noting(Static):
        def __init__(self) -> None:
            super().__init__(2.0**4)
            self.told: list[Tensor] = []

        def update(self, amax: Tensor) -> None:
            self.told.append(amax)

    scaler = Noting()
    trainer = gan_trainer(skip=skip, scaler=scaler)
    results = [trainer.train_step(batch) for batch in images(4)]
    assert [r.parts is not None for r in results] == [True] * 4
    largest = [max(part.amax for part in result.each().values()) for result in results]
    assert scaler.told == largest


@pytest.mark.parametrize(("skip", "shared"), [("each", False), ("all", True)])
def test_every_scaler_can_start_from_a_probe(skip: str, shared: bool) -> None:
    def waiting() -> LogMax:
        return LogMax(init_scale="probe")

    scaler: Any = waiting() if shared else {name: waiting() for name in OBJECTIVES}
    trainer = gan_trainer("mixed", skip=skip, scaler=scaler)
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.probe(images(1)[0])
    assert not any(own.wants_probe for own in trainer.scalers.values())  # type: ignore[attr-defined]
    assert same(dict(before), dict(trainer.model.state_dict()))
    # The probe sees each weight's whole gradient. Those of a discriminator's two uses nearly cancel
    # in it, and each of them has to fit into half: a first step may be skipped.
    skipped = [trainer.train_step(images(1)[0]).any_skipped() for _ in range(3)]
    assert not skipped[-1]


@pytest.mark.parametrize(
    ("mode", "half", "skip"), [("mixed", "float16", "each"), ("amp", "bfloat16", "all")]
)
def test_a_gan_resumes_bit_for_bit(mode: str, half: str, skip: str) -> None:
    def fresh() -> Trainer:
        scalers = {"discriminator": Backoff(), "generator": LogMax()}
        return gan_trainer(mode, half, skip, scalers, plan=Plan(accumulate=2, clip_norm=1.0))

    whole, first, second = fresh(), fresh(), fresh()
    data = images(8)
    pairs = list(zip(data[::2], data[1::2], strict=True))
    torch.manual_seed(7)
    for pair in pairs:
        whole.train_step(*pair)
    torch.manual_seed(7)
    for pair in pairs[:2]:
        first.train_step(*pair)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for pair in pairs[2:]:
        second.train_step(*pair)
    assert same(whole.state_dict(), second.state_dict())


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: joint(skip="some"), r"optimizer\.skip=some: must be all or each"),
        (lambda: gan_trainer(scaler={"generator": Backoff()}), r"loss_scaling: scalers for generator; the losses are discriminator, generator"),
        (lambda: gan_trainer(objectives={"judge": discriminator_objective}), r"optimizer\.parts=discriminator, generator: the losses are judge; give each an optimizer by its name"),
        (lambda: one_loss({"a": Backoff()}), r"optimizer\.scalers=each: there is one loss, and one backward pass has one scale; use optimizer\.scalers=shared"),
        (lambda: parts_of_one(one=torch.optim.SGD, two=torch.optim.SGD), r"optimizer\.parts: 2 parameters are in one and in two; each belongs to one part"),
        (lambda: parts_of_one(one=torch.optim.LBFGS), r"optimizer\.parts\.one=LBFGS: needs a closure, and steps alone; choose an optimizer without one"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(make: Callable[[], Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        make()


def one_loss(scaler: Any) -> Trainer:
    model, optimizer, precision = joint()
    return Trainer(model, optimizer, supervised(nn.CrossEntropyLoss()), precision, scaler=scaler)


def parts_of_one(**classes: Any) -> MultiOptimizer:
    model, precision = nn.Linear(2, 2), Precision()
    made = {name: cls(model.parameters(), lr=1.0) for name, cls in classes.items()}
    return MultiOptimizer({name: precision.prepare(model, own)[1] for name, own in made.items()})


def test_another_runs_parts_and_scalers_are_refused() -> None:
    parts = r"optimizer\.parts: the checkpoint has a, this run body, head"
    with pytest.raises(CheckpointError, match=parts):
        joint()[1].load_state_dict({"a": {}})
    shared = gan_trainer(scaler=Backoff())
    each = gan_trainer(scaler={name: Backoff() for name in OBJECTIVES})
    said = "loss_scaling: the checkpoint has a single one, this run discriminator, generator"
    with pytest.raises(CheckpointError, match=said):
        each.load_state_dict(shared.state_dict())
