"""Several losses, each with its optimizer: exact against loops by hand, and who moves when."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_multi_optimizer import BAD, INF, same
from torch import Tensor, nn

from mpframe import Backoff, LogMax, Precision, Static, Trainer
from mpframe.core.callback import Batch
from mpframe.core.errors import CheckpointError, ConfigError, DivergedError
from mpframe.core.objective import Objective, StepOutput
from mpframe.training.callbacks.guards import SkipGuard
from mpframe.training.callbacks.schedules import Schedules
from mpframe.training.optimizers.multi_objective import MultiObjectiveTrainer
from mpframe.training.optimizers.multi_optimizer import MultiOptimizer
from mpframe.training.plan import Plan
from mpframe.workloads.gan import Gan, discriminator_objective, generator_objective

OBJECTIVES = {"discriminator": discriminator_objective, "generator": generator_objective}


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
    """Fused optimizers skip on the device: schedules need their verdict before the next step."""
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


@pytest.mark.parametrize(("mode", "half", "number"), BAD[:2])
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
    ("options", "line"),
    [
        ({"scaler": {"generator": Backoff()}},
         r"loss_scaling: scalers for generator; the losses are discriminator, generator"),
        ({"objectives": {"judge": discriminator_objective}},
         r"optimizer\.parts=discriminator, generator: the losses are judge; give each an optimizer "
         "by its name"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_losses_is_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        gan_trainer(**options)


def test_another_runs_scalers_are_refused() -> None:
    shared = gan_trainer(scaler=Backoff())
    each = gan_trainer(scaler={name: Backoff() for name in OBJECTIVES})
    said = "loss_scaling: the checkpoint has a single one, this run discriminator, generator"
    with pytest.raises(CheckpointError, match=said):
        each.load_state_dict(shared.state_dict())
