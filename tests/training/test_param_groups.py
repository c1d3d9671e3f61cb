"""Parameters by patterns: groups of one optimizer, parts with one each, and what is frozen."""

import copy
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import Log, refused
from in_process import assert_same_run, composed, cut, scalars, train
from torch import Tensor

from mpframe import Trainer
from mpframe.config.command_line import check_config
from mpframe.config.schema import Config
from mpframe.core.errors import CheckpointError, ConfigError
from mpframe.run.parts import build_task, seed_everything
from mpframe.run.trainer import build_trainer
from mpframe.training.callbacks.ema import ema_of
from mpframe.training.callbacks.freeze import Freeze, set_requires_grad
from mpframe.training.optimizers.selection import Selection, divide_parameters
from mpframe.training.trainers.compiled_step import CompiledTrainer
from mpframe.workloads.images import mlp

SMALL = ["model=mlp", "model.hidden=8", "trainer.log_every=1", "loss_scaling=none"]
NO_DECAY = "optimizer.groups.no_decay={parameters:['*.bias'],weight_decay:0}"
HEAD = "optimizer.groups.head={parameters:[head.*],lr:0.1x}"
STEM = "optimizer.groups.stem={parameters:[hidden1.*],frozen:true}"
GROUPS = [NO_DECAY, HEAD, "optimizer.weight_decay=0.1", "optimizer.lr=0.01"]


@cache
def config_of(*words: str) -> Config:
    return check_config(composed("device=cpu", *words))


def trainer_of(*words: str, small: bool = True) -> Trainer:
    config = config_of(*(SMALL if small else []), *words)
    seed_everything(0)
    return build_trainer(config, build_task(config), batches=4)


built = partial(trainer_of, small=False)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    images = torch.rand(count, 16, 1, 8, 8, generator=draw)
    return list(zip(images, torch.randint(0, 10, (count, 16), generator=draw), strict=True))


def copied(trainer: Trainer) -> dict[str, Tensor]:
    return copy.deepcopy(trainer.weights())


def moved(trainer: Trainer, before: dict[str, Tensor]) -> set[str]:
    now, names = trainer.weights(), dict(trainer.model.named_parameters())
    return {name for name in names if not torch.equal(now[name], before[name])}


def test_they_are_torchs_groups_made_by_hand() -> None:
    words = [*GROUPS, "dtype=fp32", "scheduler=none"]
    trainer, model = trainer_of(*words), trainer_of(*words).model
    named = dict(model.named_parameters())
    layers = ["hidden1.linear", "hidden2.linear", "head"]
    groups = [
        {"params": [named[f"{layer}.weight"] for layer in layers[:2]]},
        {"params": [named[f"{layer}.bias"] for layer in layers], "weight_decay": 0},
        {"params": [named["head.weight"]], "lr": 0.01 * 0.1},
    ]
    plain = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    for inputs, targets in batches(5):
        trainer.train_step((inputs, targets))
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        plain.step()
        plain.zero_grad()
    assert all(map(torch.equal, trainer.model.parameters(), model.parameters()))


def test_they_resume_bit_for_bit_and_the_log_names_them(tmp_path: Path, caplog: Log) -> None:
    """As does what is frozen for a while."""
    caplog.set_level("INFO")
    options = [*SMALL, *GROUPS, STEM, "dtype=mixed", "dataset.batch_size=512"]
    options += ["callbacks=freeze", "callbacks.freeze.steps={hidden2.*.weight:4}"]
    options += ["callbacks.freeze.epochs={hidden2.*.bias:1}", "trainer.ema_decay=0.9"]
    options += ["trainer.max_steps=6", "trainer.checkpoint_every=1", "trainer.keep_last=9"]
    train(tmp_path / "whole", *options)
    assert [line for line in caplog.messages if " tensors" in line] == [
        "optimizer group default: 1 tensors of 64 values",
        "optimizer group no_decay: 3 tensors of 26 values, weight_decay 0",
        "optimizer group head: 1 tensors of 80 values, lr 0.001",
        "optimizer group stem: 1 tensors of 512 values, frozen",
        "frozen for 4 steps: hidden2.*.weight (1 tensors)",
        "frozen for 1 epochs: hidden2.*.bias (1 tensors)",
        "trained from step 3 on: hidden2.*.bias (1 tensors)",
        "trained from step 5 on: hidden2.*.weight (1 tensors)",
    ]
    for at in (2, 5):
        resumed = cut(tmp_path / "whole", tmp_path / f"from {at}", at)
        train(resumed, *options, "resume=auto")
        assert_same_run(tmp_path / "whole", resumed)
    curves = scalars(tmp_path / "whole")
    head, default = curves["optim/lr/head"], curves["optim/lr/default"]
    assert default == curves["optim/lr"] == curves["optim/lr/no_decay"]
    # One rounding to float32 in the event file on each side of the ratio, and those of the schedule.
    assert [own for _, own in head] == pytest.approx([0.1 * own for _, own in default], rel=1e-6)


@pytest.mark.parametrize("then", [[], [HEAD, NO_DECAY], ["optimizer.groups.x={ndim:1}"]])
def test_other_groups_do_not_resume(then: list[str]) -> None:
    state = copy.deepcopy(trainer_of(NO_DECAY, HEAD).state_dict())
    line = r"optimizer\.groups: the checkpoint has default, no_decay, head, this run "
    with pytest.raises(CheckpointError, match=line):
        trainer_of(*then).load_state_dict(state)


class Shared(torch.optim.SGD):
    def __init__(self, params: object, lr: float = 0.1, mode: int = 1) -> None:
        super().__init__(params, lr=lr)
        self.mode = mode


SHARED = "optimizer._target_=test_param_groups.Shared"
ALL = ", ".join(torch.optim.SGD([torch.zeros(1)]).defaults)


@pytest.mark.parametrize(("words", "line"), [
    ("optimizer.groups.g={parameters:[hed.*],lr:1}", "optimizer.groups.g.parameters=[hed.*]: matches no parameter; nearest: head.bias"),
    ("optimizer.groups.g={ndim:7}", "optimizer.groups.g.parameters=['*']: no parameter is left for it; the names are hidden1.linear.weight"),
    ("optimizer.groups.g={ndim:1,weight_decai:0}", "optimizer.groups.g.weight_decai=0: torch.optim.AdamW takes no such argument; nearest: weight_decay"),
    ("optimizer.groups.g={frozen:true}", "optimizer.groups: every parameter is frozen; leave some to train"),
    ("optimizer.groups.g={parameters:head}", "optimizer.groups.g.parameters=head: must be a list"),
    (f"optimizer.groups.g={{ndim:1,mode:2}} {SHARED}", f"optimizer.groups.g.mode=2: is the same for all parameters; a group may set {ALL}"),
    ("optimizer.groups.g={nesterov:abc} optimizer=sgd", "optimizer.groups.g.nesterov=abc: must be true or false"),
    ("optimizer=muon_adamw optimizer.parts.rest.lr=-1", "optimizer.parts.rest.lr=-1: must be a number > 0, or as in 10x, or null"),
    ("model=mlp trainer.channels_last=true", "trainer.channels_last=true: the model has no 2-d convolution (no weight with four dimensions), so nothing would change; use trainer.channels_last=false"),
    ("experiment=digits_gan optimizer=adamw", "optimizer.parts=none: the losses are discriminator, generator; give each an optimizer"),
    ("experiment=digits_gan callbacks.loss_spikes.policy=skip", "callbacks.loss_spikes.policy=skip: judges one loss, and the dataset has 2"),
    ("numerics=on trainer.compile=true", "callbacks.ranges.every=100: a compiled model has no modules to watch; use trainer.compile=false or numerics=off"),
    ("trainer.recompute=[net.*] trainer.compile=true", "trainer.recompute=['net.*']: a compiler chooses itself what it computes again; use trainer.compile=false or trainer.recompute=[]"),
    ("experiment=digits_gan trainer.compile=step", "trainer.compile=step: MultiObjectiveTrainer does not compile its steps, which takes one loss"),
    ("optimizer=muon_adamw model=mlp trainer.compile=step", "trainer.compile=step: several optimizers share a step; use trainer.compile=true"),
])  # fmt: skip
def test_what_cannot_be_made_and_what_does_not_fit_is_refused(words: str, line: str) -> None:
    said = refused(ConfigError, trainer_of, *words.split(), small="groups" in words)
    assert said.startswith(line)


def test_the_first_part_that_selects_a_parameter_gets_it_and_once_what_trains() -> None:
    model = mlp(4, classes=2, hidden=8)
    matrices = Selection(["*"], without=["head.*"], ndim=2)
    parts = divide_parameters(model, {"matrices": matrices, "rest": Selection(["*"])})
    known = {parameter: name for name, parameter in model.named_parameters()}
    assert {part: [known[parameter] for parameter in own] for part, own in parts.items()} == {
        "matrices": ["hidden1.linear.weight", "hidden2.linear.weight"],
        "rest": ["hidden1.linear.bias", "hidden2.linear.bias", "head.weight", "head.bias"],
    }
    model = mlp(8, classes=8, hidden=8)
    model.hidden1.linear.weight.requires_grad_(False)
    model.head.weight = model.hidden2.linear.weight
    parts = divide_parameters(model, {"all": Selection()})
    assert len(parts["all"]) == len({p for p in model.parameters() if p.requires_grad}) == 4


def test_muon_gets_the_matrices_and_losses_share_a_scaler_or_have_their_own() -> None:
    trainer = built("optimizer=muon_adamw", "model=mlp", "dtype=mixed")
    (matrices, rest) = trainer.optimizer.parts.values()
    assert isinstance(matrices.optimizer, torch.optim.Muon)
    assert [tuple(p.shape) for p in matrices.parameters] == [(256, 64), (256, 256)]
    assert len(rest.parameters) == 4
    assert list(trainer.algorithms["schedule"].by_name) == ["matrices", "rest"]
    for scalers, count in (("shared", 1), ("each", 2)):
        gan = built("experiment=digits_gan", f"optimizer.scalers={scalers}")
        assert len(set(map(id, gan.scalers.values()))) == count


def test_a_model_is_compiled_recomputed_and_reordered_as_its_options_say() -> None:
    assert type(trainer_of("trainer.compile=step")) is CompiledTrainer
    unet = "model=unet model.width=4 model.channels=1 model.classes=2 trainer.channels_last=true"
    trainer = built(*unet.split(), "trainer.recompute=[encoder.*]", "dtype=mixed")
    model = trainer.model
    recomputed = [name for name, own in model.named_modules() if "forward" in vars(own)]
    assert recomputed == [f"encoder.{stage}" for stage in range(4)]
    for weight in (own for own in model.parameters() if own.dim() == 4):
        for one in (weight, trainer.optimizer.master_of(weight)):
            assert one.is_contiguous(memory_format=torch.channels_last)


SGD = ["optimizer._target_=torch.optim.SGD", "+optimizer.momentum=0.9"]
cnn = partial(built, "model=cnn", "model.width=4", "scheduler=none", "optimizer.lr=0.01")


def started(trainer: Trainer, **options: Any) -> Freeze:
    freeze = Freeze(**options)
    freeze.setup(trainer, None)  # It does not look at the run.
    trainer.model.train()
    return freeze


def stepped(trainer: Trainer, freeze: Freeze, *batches: tuple[Tensor, Tensor]) -> None:
    for batch in batches:
        freeze.on_step_begin(trainer, [batch])
        trainer.train_step(batch)


@pytest.mark.parametrize(("words", "settings"), [
    ([*SGD, "+optimizer.foreach=true"], {"momentum": 0.9, "foreach": True}),
    ([*SGD, "+optimizer.fused=true"], {"momentum": 0.9, "fused": True}),
    (["optimizer.weight_decay=0.1", "+optimizer.fused=true"], {"weight_decay": 0.1, "fused": True}),
])  # fmt: skip
def test_in_fp32_it_is_a_plain_loop_that_sets_requires_grad(words: Any, settings: Any) -> None:
    trainer, model = cnn("dtype=fp32", *words), cnn("dtype=fp32", *words).model
    # Two groups: torch's fused SGD cannot train more parameters of a group than it began with.
    stem = list(model.get_submodule("stage1").parameters())
    rest = [p for p in model.parameters() if all(p is not own for own in stem)]
    kind = torch.optim.SGD if "momentum" in settings else torch.optim.AdamW
    plain = kind([{"params": stem}, {"params": rest}], lr=0.01, **settings)
    freeze = started(trainer, steps={"stage1.*": 2})
    model.train()
    for step, batch in enumerate(batches(4)):
        stepped(trainer, freeze, batch)
        model.get_submodule("stage1").requires_grad_(step >= 2)
        torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        plain.step()
        plain.zero_grad()
    assert all(map(torch.equal, trainer.model.parameters(), model.parameters()))


@pytest.mark.parametrize(("dtype", "kind"), [
    ("mixed", "foreach"), ("mixed", "fused"), ("amp", "fused"),
])  # fmt: skip
def test_what_is_frozen_stays_and_then_trains_from_its_master(dtype: str, kind: str) -> None:
    """But the weights of a group that is frozen for good, which have no state either."""
    norm = "optimizer.groups.norm={parameters:[stage1.norm1.*],frozen:true}"
    words = [f"dtype={dtype}", "trainer.ema_decay=0.5", *SGD, f"+optimizer.{kind}=true", norm]
    trainer, fresh = cnn(*words), cnn(*words)
    before, data = copied(trainer), batches(4)
    freeze = started(trainer, steps={"stage*": 3})
    stepped(trainer, freeze, *data[:3])
    assert moved(trainer, before) == {"head.weight", "head.bias"}
    assert len(trainer.optimizer.state_dict()["state"]) == 2
    averages = ema_of(trainer).by_name()
    assert torch.equal(averages["stage1.conv1.weight"], before["stage1.conv1.weight"])
    # The other begins where this one stops, and has no momentum of the frozen ones yet either.
    fresh.load_weights(copied(trainer))
    for one in (trainer, fresh):
        stepped(one, freeze, data[3])
    assert all(name.startswith("head") for name in moved(trainer, fresh.weights()))
    stayed = {"stage1.norm1.weight", "stage1.norm1.bias"}
    assert moved(trainer, before) == dict(trainer.model.named_parameters()).keys() - stayed


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


@pytest.mark.parametrize(("options", "line"), [
    ({"epochs": {"stage1.*": 1.5}}, "callbacks.freeze.epochs.stage1.*=1.5: must be a whole number >= 1"),
    ({"steps": {"hed.*": 1}}, "callbacks.freeze.steps=[hed.*]: matches no parameter that is trained and that no earlier pattern takes; nearest: head.bias"),
    ({"steps": {"head.*": 1}, "epochs": {"head.*": 1}}, "callbacks.freeze.epochs=[head.*]: matches no parameter that is trained"),
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
