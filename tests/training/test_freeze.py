"""callbacks=freeze: frozen weights stay, then train from the right values; resumed bit for bit."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import StartRun
from sameness import assert_same_run, cut
from test_param_groups import batches
from torch import Tensor

from mpframe.config.command_line import check_config, compose_named, without_hydra
from mpframe.core.errors import ConfigError
from mpframe.run.parts import build_task, seed_everything
from mpframe.run.trainer import build_trainer
from mpframe.training.callbacks.ema import ema_of
from mpframe.training.callbacks.freeze import Freeze
from mpframe.training.trainer import Trainer

CNN = ["model=cnn", "model.width=4", "scheduler=none", "loss_scaling=none", "device=cpu"]
OPTIMIZERS = {
    "SGD": ["optimizer._target_=torch.optim.SGD", "+optimizer.momentum=0.9"],
    "AdamW": ["optimizer._target_=torch.optim.AdamW", "optimizer.weight_decay=0.1"],
}
KINDS = ["foreach", "fused"]


def cnn(*words: str) -> Trainer:
    _, composed = compose_named([*CNN, "optimizer.lr=0.01", *words])
    config = check_config(without_hydra(composed))
    seed_everything(0)
    return build_trainer(config, build_task(config), batches=4)


def with_optimizer(name: str, kind: str) -> list[str]:
    return [*OPTIMIZERS[name], f"+optimizer.{kind}=true"]


def started(trainer: Trainer, **options: Any) -> Freeze:
    freeze = Freeze(**options)
    freeze.setup(trainer, None)  # type: ignore[arg-type]  # It does not look at the run.
    trainer.model.train()
    return freeze


def stepped(trainer: Trainer, freeze: Freeze, batch: tuple[Tensor, Tensor]) -> None:
    freeze.on_step_begin(trainer, [batch])
    trainer.train_step(batch)


def copied(trainer: Trainer) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in trainer.weights().items()}


def moved(trainer: Trainer, before: dict[str, Tensor]) -> set[str]:
    named = dict(trainer.model.named_parameters())
    now = trainer.weights()
    return {name for name in named if not torch.equal(now[name], before[name])}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_in_fp32_it_is_a_plain_loop_that_sets_requires_grad(name: str, kind: str) -> None:
    words = ["dtype=fp32", *with_optimizer(name, kind)]
    trainer, model = cnn(*words), cnn(*words).model
    settings: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {"weight_decay": 0.1}
    # Two groups: torch's fused SGD cannot train more parameters of a group than it began with.
    stem = list(model.get_submodule("stage1").parameters())
    rest = [p for p in model.parameters() if all(p is not own for own in stem)]
    groups = [{"params": stem}, {"params": rest}]
    plain = getattr(torch.optim, name)(groups, lr=0.01, **settings, **{kind: True})
    freeze = started(trainer, steps={"stage1.*": 2})
    model.train()
    for step, batch in enumerate(batches(4)):
        stepped(trainer, freeze, batch)
        model.get_submodule("stage1").requires_grad_(step >= 2)
        torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        plain.step()
        plain.zero_grad()
    for own, other in zip(trainer.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["mixed", "amp"])
def test_what_is_frozen_stays_and_then_trains_from_its_master(dtype: str, kind: str) -> None:
    words = [f"dtype={dtype}", "trainer.ema_decay=0.5", *with_optimizer("SGD", kind)]
    trainer = cnn(*words)
    before, data = copied(trainer), batches(4)
    freeze = started(trainer, steps={"stage*": 3})
    for batch in data[:3]:
        stepped(trainer, freeze, batch)
    assert moved(trainer, before) == {"head.weight", "head.bias"}
    assert len(trainer.optimizer.state_dict()["state"]) == 2
    averages = ema_of(trainer).by_name(trainer.model)  # type: ignore[union-attr]
    assert torch.equal(averages["stage1.conv1.weight"], before["stage1.conv1.weight"])
    fresh = cnn(*words)  # It begins where the others stop, and has no momentum yet either.
    fresh.load_weights(copied(trainer))
    for one in (trainer, fresh):
        stepped(one, freeze, data[3])
    for name, weight in fresh.weights().items():
        if name.startswith("stage"):
            assert torch.equal(weight, trainer.weights()[name]), name
    assert all(name in moved(trainer, before) for name, _ in trainer.model.named_parameters())


OWN_GROUP = "optimizer.groups.body={parameters:[stage*],nesterov:false}"


@pytest.mark.usefixtures("waited_for")
@pytest.mark.parametrize("more", [[], [OWN_GROUP]])
@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_in_the_first_step_that_trains_it_changes_nothing(
    kind: str, more: list[str]
) -> None:
    trainer = cnn("dtype=mixed", *with_optimizer("SGD", kind), *more)
    freeze, (first, second, third) = started(trainer, steps={"stage*": 1}), batches(3)
    stepped(trainer, freeze, first)
    before = copied(trainer)
    stepped(trainer, freeze, (second[0] * torch.nan, second[1]))
    trainer.read_verdicts()
    assert trainer.progress.skipped == 1
    assert moved(trainer, before) == set()
    buffers = [own["momentum_buffer"] for own in trainer.optimizer.state.values()]
    assert sum(bool(buffer.any()) for buffer in buffers) == 2  # Those of the head.
    assert len(buffers) == 2 or (kind == "fused" and not more)
    stepped(trainer, freeze, third)
    assert len(moved(trainer, before)) == len(dict(trainer.model.named_parameters()))
    assert all(torch.isfinite(weight).all() for weight in trainer.weights().values())


@pytest.mark.parametrize(
    ("dtype", "more"),
    [
        ("fp32", []),
        ("amp", []),
        ("mixed", ["callbacks.freeze.eval_mode=true"]),
        ("mixed", ["+optimizer.fused=true"]),
    ],
)
def test_runs_resume_bit_for_bit_before_and_after(
    start_run: StartRun, tmp_path: Path, dtype: str, more: list[str]
) -> None:
    options = [
        *("model.width=4", f"dtype={dtype}", "callbacks=freeze", "dataset.batch_size=256"),
        *("callbacks.freeze.steps={stage1.*:5}", "callbacks.freeze.epochs={stage2.norm*:1}"),
        *("trainer.max_steps=9", "trainer.checkpoint_every=3", "trainer.keep_last=9"),
        *("trainer.ema_decay=0.9", "trainer.log_every=1", "trainer.eval_every=2", *more),
    ]
    start_run(tmp_path / "whole", *options)
    for at in (3, 6):
        resumed = cut(tmp_path / "whole", tmp_path / f"from {at}", at)
        start_run(resumed, *options, "resume=auto")
        assert_same_run(tmp_path / "whole", resumed)


def test_a_compiled_model_is_compiled_again_when_more_of_it_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a compiler that leaves the ops as they are, the numbers are those without one."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    data, ends = batches(3), []
    for compiled in ("false", "true"):
        trainer = cnn("dtype=mixed", f"trainer.compile={compiled}", "model.stages=1")
        before = copied(trainer)
        freeze = started(trainer, steps={"stage1.*": 2})
        for batch in data[:2]:
            stepped(trainer, freeze, batch)
        assert moved(trainer, before) == {"head.weight", "head.bias"}
        stepped(trainer, freeze, data[2])
        assert len(moved(trainer, before)) == len(dict(trainer.model.named_parameters()))
        ends.append(trainer.weights())
    for name, weight in ends[0].items():
        assert torch.equal(weight, ends[1][name]), name


def statistics(trainer: Trainer, name: str) -> Tensor:
    return trainer.model.get_buffer(f"{name}.running_mean").clone()


def test_statistics_of_frozen_norms_stay_in_eval_mode_and_move_without() -> None:
    for eval_mode in (False, True):
        trainer = cnn("dtype=mixed")
        freeze = started(trainer, steps={"stage1.*": 2}, eval_mode=eval_mode)
        first, second, third = batches(3)
        before = statistics(trainer, "stage1.norm1")
        stepped(trainer, freeze, first)
        trainer.model.train()  # As after a validation, and at the start of an epoch.
        stepped(trainer, freeze, second)
        assert torch.equal(statistics(trainer, "stage1.norm1"), before) == eval_mode
        assert statistics(trainer, "stage2.norm1").any()
        before = statistics(trainer, "stage1.norm1")
        stepped(trainer, freeze, third)
        assert not torch.equal(statistics(trainer, "stage1.norm1"), before)
        assert all(module.training for module in trainer.model.modules())


def test_groups_that_are_frozen_for_good_are_in_eval_mode_too() -> None:
    trainer = cnn("optimizer.groups.stem={parameters:[stage1.*],frozen:true}")
    freeze = started(trainer, eval_mode=True)
    stepped(trainer, freeze, batches(1)[0])
    assert not statistics(trainer, "stage1.norm1").any()
    assert statistics(trainer, "stage2.norm1").any()


def test_the_log_names_what_is_frozen_and_when_it_is_trained(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    trainer = cnn()
    freeze = started(trainer, steps={"stage1.*": 1}, epochs={"stage2.*": 3})
    for batch in batches(2):
        stepped(trainer, freeze, batch)
    assert [line for line in caplog.messages if "tensors of" in line] == [
        "frozen for 1 steps: stage1.* (6 tensors of 196 values)",
        "frozen for 3 epochs: stage2.* (6 tensors of 896 values)",
        "trained from step 2 on: stage1.* (6 tensors of 196 values)",
    ]


@pytest.mark.parametrize(
    ("words", "options", "line"),
    [
        ([], {"steps": {"stage1.*": 0}}, "callbacks.freeze.steps.stage1.*=0: must be a whole number >= 1"),
        ([], {"epochs": {"stage1.*": 1.5}}, "callbacks.freeze.epochs.stage1.*=1.5: must be a whole number >= 1"),
        ([], {"steps": {"hed.*": 1}}, "callbacks.freeze.steps={hed.*: 1}: matches no parameter that is trained and that no earlier pattern takes; nearest: head.bias"),
        ([], {"steps": {"head.*": 1}, "epochs": {"head.*": 1}}, "callbacks.freeze.epochs={head.*: 1}: matches no parameter that is trained"),
        ([], {"steps": {"*": 1}}, "callbacks.freeze: leaves an optimizer nothing to train; freeze fewer parameters"),
        (["optimizer.groups.g={parameters:[head.*],frozen:true}"], {"steps": {"head.*": 1}}, "callbacks.freeze.steps={head.*: 1}: matches no parameter that is trained"),
    ],
)  # fmt: skip
def test_what_cannot_be_frozen_is_refused(
    words: list[str], options: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        started(cnn(*words), **options)
    assert str(refused.value).startswith(line)


def test_of_several_optimizers_each_keeps_something_to_train(
    start_run: StartRun, tmp_path: Path
) -> None:
    gan = ["experiment=digits_gan", "trainer.max_steps=3", "callbacks=freeze"]
    with pytest.raises(ConfigError, match="leaves an optimizer nothing to train"):
        start_run(tmp_path / "all", *gan, "callbacks.freeze.steps={generator.*:1}")
    summary = start_run(tmp_path / "some", *gan, "callbacks.freeze.steps={generator.0.*:1}")
    assert summary.steps == 3
