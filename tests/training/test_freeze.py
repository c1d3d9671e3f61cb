"""callbacks=freeze: frozen weights stay, then train from the right values; resumed bit for bit."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import Log, refused
from in_process import assert_same_run, cut, train
from test_param_groups import batches, built, copied, moved
from torch import Tensor

from mpframe.core.errors import ConfigError
from mpframe.training.callbacks.ema import ema_of
from mpframe.training.callbacks.freeze import Freeze, set_requires_grad
from mpframe.training.trainer import Trainer

SGD = ["optimizer._target_=torch.optim.SGD", "+optimizer.momentum=0.9"]
ADAMW = ["optimizer._target_=torch.optim.AdamW", "optimizer.weight_decay=0.1"]

cnn = partial(built, "model=cnn", "model.width=4", "scheduler=none", "optimizer.lr=0.01")


def started(trainer: Trainer, **options: Any) -> Freeze:
    freeze = Freeze(**options)
    freeze.setup(trainer, None)  # type: ignore[arg-type]  # It does not look at the run.
    trainer.model.train()
    return freeze


def stepped(trainer: Trainer, freeze: Freeze, *batches: tuple[Tensor, Tensor]) -> None:
    for batch in batches:
        freeze.on_step_begin(trainer, [batch])
        trainer.train_step(batch)


@pytest.mark.parametrize(("words", "settings"), [
    ([*SGD, "+optimizer.foreach=true"], {"momentum": 0.9, "foreach": True}),
    ([*SGD, "+optimizer.fused=true"], {"momentum": 0.9, "fused": True}),
    ([*ADAMW, "+optimizer.fused=true"], {"weight_decay": 0.1, "fused": True}),
])  # fmt: skip
def test_in_fp32_it_is_a_plain_loop_that_sets_requires_grad(words: Any, settings: Any) -> None:
    trainer, model = cnn("dtype=fp32", *words), cnn("dtype=fp32", *words).model
    # Two groups: torch's fused SGD cannot train more parameters of a group than it began with.
    stem = list(model.get_submodule("stage1").parameters())
    rest = [p for p in model.parameters() if all(p is not own for own in stem)]
    name = words[0].rpartition(".")[2]
    plain = getattr(torch.optim, name)([{"params": stem}, {"params": rest}], lr=0.01, **settings)
    freeze = started(trainer, steps={"stage1.*": 2})
    model.train()
    for step, batch in enumerate(batches(4)):
        stepped(trainer, freeze, batch)
        model.get_submodule("stage1").requires_grad_(step >= 2)
        torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        plain.step()
        plain.zero_grad()
    assert all(map(torch.equal, trainer.model.parameters(), model.parameters()))


@pytest.mark.parametrize(
    ("dtype", "kind"), [("mixed", "foreach"), ("mixed", "fused"), ("amp", "fused")]
)
def test_what_is_frozen_stays_and_then_trains_from_its_master(dtype: str, kind: str) -> None:
    words = [f"dtype={dtype}", "trainer.ema_decay=0.5", *SGD, f"+optimizer.{kind}=true"]
    trainer, fresh = cnn(*words), cnn(*words)
    before, data = copied(trainer), batches(4)
    freeze = started(trainer, steps={"stage*": 3})
    stepped(trainer, freeze, *data[:3])
    assert moved(trainer, before) == {"head.weight", "head.bias"}
    assert len(trainer.optimizer.state_dict()["state"]) == 2
    averages = ema_of(trainer).by_name(trainer.model)  # type: ignore[union-attr]
    assert torch.equal(averages["stage1.conv1.weight"], before["stage1.conv1.weight"])
    # The other begins where this one stops, and has no momentum of the frozen ones yet either.
    fresh.load_weights(copied(trainer))
    for one in (trainer, fresh):
        stepped(one, freeze, data[3])
    assert all(name.startswith("head") for name in moved(trainer, fresh.weights()))
    assert moved(trainer, before) == {name for name, _ in trainer.model.named_parameters()}


OWN_GROUP = "optimizer.groups.body={parameters:[stage*],nesterov:false}"


@pytest.mark.usefixtures("waited_for")
@pytest.mark.parametrize(("kind", "more"), [("foreach", []), ("fused", []), ("fused", [OWN_GROUP])])
def test_an_overflow_in_the_first_step_that_trains_it_changes_nothing(kind: str, more: Any) -> None:
    trainer = cnn("dtype=mixed", *SGD, f"+optimizer.{kind}=true", *more)
    freeze, (first, second, third) = started(trainer, steps={"stage*": 1}), batches(3)
    stepped(trainer, freeze, first)
    before = copied(trainer)
    stepped(trainer, freeze, (second[0] * torch.nan, second[1]))
    trainer.read_verdicts()
    assert (trainer.progress.skipped, moved(trainer, before)) == (1, set())
    buffers = [own["momentum_buffer"] for own in trainer.optimizer.state.values()]
    assert sum(bool(buffer.any()) for buffer in buffers) == 2  # Those of the head.
    assert len(buffers) == 2 or (kind == "fused" and not more)
    stepped(trainer, freeze, third)
    assert len(moved(trainer, before)) == len(dict(trainer.model.named_parameters()))
    assert all(torch.isfinite(weight).all() for weight in trainer.weights().values())


def test_a_run_resumes_bit_for_bit_before_and_after(tmp_path: Path) -> None:
    options = ["model.width=4", "dtype=mixed", "callbacks=freeze", "dataset.batch_size=512"]
    options += ["callbacks.freeze.steps={stage1.*:4}", "callbacks.freeze.epochs={stage2.norm*:1}"]
    options += ["callbacks.freeze.eval_mode=true", "+optimizer.fused=true", "trainer.log_every=1"]
    options += ["trainer.max_steps=6", "trainer.checkpoint_every=1", "trainer.keep_last=9"]
    options += ["trainer.eval_every=3", "trainer.ema_decay=0.9"]
    train(tmp_path / "whole", *options)
    for at in (2, 5):
        resumed = cut(tmp_path / "whole", tmp_path / f"from {at}", at)
        train(resumed, *options, "resume=auto")
        assert_same_run(tmp_path / "whole", resumed)


@pytest.mark.parametrize("eval_mode", [False, True])
def test_statistics_of_frozen_norms_stay_in_eval_mode_and_move_without(eval_mode: bool) -> None:
    trainer = cnn("dtype=mixed", "optimizer.groups.stem={parameters:[stage2.*],frozen:true}")
    freeze = started(trainer, steps={"stage1.*": 2}, eval_mode=eval_mode)
    norms = [getattr(trainer.model, f"stage{number}").norm1 for number in (1, 2)]
    first, second, third = batches(3)
    before = norms[0].running_mean.clone()
    stepped(trainer, freeze, first)
    trainer.model.train()  # As after a validation, and at the start of an epoch.
    stepped(trainer, freeze, second)
    assert torch.equal(norms[0].running_mean, before) == eval_mode
    stepped(trainer, freeze, third)
    assert not torch.equal(norms[0].running_mean, before)
    assert norms[0].training
    # A group that is frozen for good is in eval mode, too.
    assert bool(norms[1].running_mean.any()) != eval_mode


def test_the_log_names_what_is_frozen_and_when_it_is_trained(caplog: Log) -> None:
    caplog.set_level("INFO")
    trainer = cnn()
    freeze = started(trainer, steps={"stage1.*": 1}, epochs={"stage2.*": 3})
    stepped(trainer, freeze, *batches(2))
    assert [line for line in caplog.messages if "tensors of" in line] == [
        "frozen for 1 steps: stage1.* (6 tensors of 196 values)",
        "frozen for 3 epochs: stage2.* (6 tensors of 896 values)",
        "trained from step 2 on: stage1.* (6 tensors of 196 values)",
    ]


@pytest.mark.parametrize(("options", "line"), [
    ({"epochs": {"stage1.*": 1.5}}, "callbacks.freeze.epochs.stage1.*=1.5: must be a whole number >= 1"),
    ({"steps": {"hed.*": 1}}, "callbacks.freeze.steps={hed.*: 1}: matches no parameter that is trained and that no earlier pattern takes; nearest: head.bias"),
    ({"steps": {"head.*": 1}, "epochs": {"head.*": 1}}, "callbacks.freeze.epochs={head.*: 1}: matches no parameter that is trained"),
    ({"steps": {"*": 1}}, "callbacks.freeze: leaves an optimizer nothing to train; freeze fewer parameters"),
])  # fmt: skip
def test_what_cannot_be_frozen_is_refused(options: dict[str, Any], line: str) -> None:
    assert refused(ConfigError, started, cnn(), **options).startswith(line)


def test_of_several_optimizers_each_keeps_something_to_train() -> None:
    gan = built("experiment=digits_gan")
    with pytest.raises(ConfigError, match="leaves an optimizer nothing to train"):
        started(gan, steps={"generator.*": 1})
    set_requires_grad(gan.optimizer, gan.model.parameters(), True)
    before, freeze = copied(gan), started(gan, steps={"generator.0.*": 1})
    stepped(gan, freeze, batches(1)[0])
    assert 0 < len(moved(gan, before)) == len(list(gan.model.parameters())) - 1
