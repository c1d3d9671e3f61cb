"""Groups of parameters by patterns: torch's own groups, bit for bit; frozen, resumed, refused."""

import copy
import logging
from functools import cache
from pathlib import Path

import pytest
import torch
from in_process import StartRun, scalars
from sameness import assert_same_run, cut
from torch import Tensor

from mpframe.config.command_line import check_config, compose_named, without_hydra
from mpframe.config.schema import Config
from mpframe.core.errors import CheckpointError, ConfigError
from mpframe.run.parts import build_task, seed_everything
from mpframe.run.trainer import build_trainer
from mpframe.training.trainer import Trainer

SMALL = ["model=mlp", "model.hidden=8", "trainer.log_every=1", "loss_scaling=none"]
NO_DECAY = "optimizer.groups.no_decay={parameters:['*.bias'],weight_decay:0}"
HEAD = "optimizer.groups.head={parameters:[head.*],lr:0.1x}"
STEM = "optimizer.groups.stem={parameters:[hidden1.*],frozen:true}"
GROUPS = [NO_DECAY, HEAD, "optimizer.weight_decay=0.1", "optimizer.lr=0.01"]


@cache
def config_of(*words: str) -> Config:
    _, composed = compose_named(["device=cpu", *words])
    return check_config(without_hydra(composed))


def trainer_of(*words: str, small: bool = True) -> Trainer:
    config = config_of(*(SMALL if small else []), *words)
    seed_everything(0)
    return build_trainer(config, build_task(config), batches=4)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.rand(16, 1, 8, 8, generator=draw), torch.randint(0, 10, (16,), generator=draw))
        for _ in range(count)
    ]


def copied(trainer: Trainer) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in trainer.weights().items()}


def moved(trainer: Trainer, before: dict[str, Tensor]) -> set[str]:
    now = trainer.weights()
    names = [name for name, _ in trainer.model.named_parameters()]
    return {name for name in names if not torch.equal(now[name], before[name])}


def test_a_word_for_false_in_a_group_is_false() -> None:
    own = trainer_of("optimizer=sgd", "optimizer.momentum=0.9", "optimizer.groups.a={nesterov:no}")
    assert own.optimizer.optimizer.param_groups[0]["nesterov"] is False
    with pytest.raises(ConfigError) as refused:
        trainer_of("optimizer=sgd", "optimizer.groups.a={nesterov:abc}")
    assert str(refused.value) == "optimizer.groups.a.nesterov=abc: must be true or false"


def test_they_are_torchs_groups_made_by_hand() -> None:
    words = [*GROUPS, "dtype=fp32", "scheduler=none"]
    trainer, model = trainer_of(*words), trainer_of(*words).model
    named = dict(model.named_parameters())
    layers = ["hidden1.linear", "hidden2.linear", "head"]
    plain = torch.optim.AdamW(
        [
            {"params": [named[f"{layer}.weight"] for layer in layers[:2]]},
            {"params": [named[f"{layer}.bias"] for layer in layers], "weight_decay": 0},
            {"params": [named["head.weight"]], "lr": 0.01 * 0.1},
        ],
        lr=0.01,
        weight_decay=0.1,
    )
    for inputs, targets in batches(5):
        trainer.train_step((inputs, targets))
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        plain.step()
        plain.zero_grad()
    for own, other in zip(trainer.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("dtype", ["mixed", "amp_bf16"])
def test_a_frozen_group_stays_and_has_no_state(dtype: str) -> None:
    trainer = trainer_of(STEM, NO_DECAY, f"dtype={dtype}", "trainer.ema_decay=0.9")
    before = copied(trainer)
    for batch in batches(3):
        trainer.train_step(batch)
    frozen = {name for name in before if name.startswith("hidden1")}
    assert len(frozen) == 2
    assert moved(trainer, before) == set(before) - frozen
    assert len(trainer.optimizer.state_dict()["state"]) == len(before) - 2


def test_they_train_and_resume_bit_for_bit(start_run: StartRun, tmp_path: Path) -> None:
    options = [*SMALL, *GROUPS, STEM, "dtype=mixed", "trainer.max_steps=4",
               "trainer.checkpoint_every=2", "trainer.keep_last=10"]  # fmt: skip
    start_run(tmp_path / "whole", *options)
    resumed = cut(tmp_path / "whole", tmp_path / "resumed", 2)
    start_run(resumed, *options, "resume=auto")
    assert_same_run(tmp_path / "whole", resumed)
    curves = scalars(tmp_path / "whole")
    head, default = curves["optim/lr/head"], curves["optim/lr/default"]
    assert default == curves["optim/lr"] == curves["optim/lr/no_decay"]
    # One rounding to float32 in the event file on each side of the ratio, and those of the schedule.
    assert [own for _, own in head] == pytest.approx([0.1 * own for _, own in default], rel=1e-6)


def test_each_group_is_a_line_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    trainer_of(*GROUPS, STEM)
    assert [line for line in caplog.messages if line.startswith("optimizer group")] == [
        "optimizer group default: 1 tensors of 64 values",
        "optimizer group no_decay: 3 tensors of 26 values, weight_decay 0",
        "optimizer group head: 1 tensors of 80 values, lr 0.001",
        "optimizer group stem: 1 tensors of 512 values, frozen",
    ]


@pytest.mark.parametrize("then", [[], [HEAD, NO_DECAY], ["optimizer.groups.x={ndim:1}"]])
def test_other_groups_do_not_resume(then: list[str]) -> None:
    state = copy.deepcopy(trainer_of(NO_DECAY, HEAD).state_dict())
    with pytest.raises(CheckpointError) as refused:
        trainer_of(*then).load_state_dict(state)
    assert "optimizer.groups: the checkpoint has default, no_decay, head, this run " in str(
        refused.value
    )


class Shared(torch.optim.SGD):
    """Takes an argument that is no setting of a group."""

    def __init__(self, params: object, lr: float = 0.1, mode: int = 1) -> None:
        super().__init__(params, lr=lr)  # type: ignore[arg-type]
        self.mode = mode


SHARED = "optimizer._target_=test_param_groups.Shared"
ALL = ", ".join(torch.optim.SGD([torch.zeros(1)]).defaults)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["g={parameters:[hed.*],lr:1}"], "optimizer.groups.g.parameters: 'hed.*' matches no parameter; nearest: head.bias"),
        (["g={parameters:[head.*,'*nrom*']}"], "optimizer.groups.g.parameters: '*nrom*' matches no parameter; the names are hidden1.linear.weight"),
        (["g={ndim:7}"], "optimizer.groups.g.parameters=['*']: no parameter is left for it; the names are"),
        (["g={ndim:1,weight_decai:0}"], "optimizer.groups.g.weight_decai=0: torch.optim.AdamW takes no such argument; nearest: weight_decay"),
        (["g={ndim:1,weight_decay:-1}"], "optimizer.groups.g: torch.optim.AdamW refused its options: Invalid weight_decay value: -1"),
        (["g={ndim:1,lr:0x}"], "optimizer.groups.g.lr=0x: must be a number or null > 0, or as in 10x"),
        (["g={ndim:1,frozen:true,lr:1}"], "optimizer.groups.g.lr=1: does nothing with frozen=true; leave out one of them"),
        (["g={frozen:true}"], "optimizer.groups: every parameter is frozen; leave some to train"),
        (["g={parameters:head}"], "optimizer.groups.g.parameters=head: must be a list"),
        (["g=3"], "optimizer.groups.g=3: must be a mapping; give it parameters"),
        (["default={ndim:1}"], "optimizer.groups.default: is the group of all other"),
        (["g={ndim:1,mode:2}", SHARED], f"optimizer.groups.g.mode=2: is the same for all parameters; a group may set {ALL}"),
    ],
)  # fmt: skip
def test_a_group_that_cannot_be_made_is_refused(words: list[str], line: str) -> None:
    group, *more = words
    with pytest.raises(ConfigError) as refused:
        trainer_of(*more, f"optimizer.groups.{group}")
    assert str(refused.value).startswith(line)
