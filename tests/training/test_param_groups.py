"""Groups of parameters by patterns: torch's own groups, bit for bit; frozen, resumed, refused."""

import logging
from pathlib import Path

import pytest
import torch
from in_process import StartRun, scalars
from sameness import assert_same_run, cut

from mpframe import checkpoint
from mpframe.config.command_line import check_config, compose_named, without_hydra
from mpframe.core.errors import CheckpointError, ConfigError
from mpframe.run.parts import build_task, seed_everything
from mpframe.run.trainer import build_trainer
from mpframe.training.trainer import Trainer

SMALL = ["model=mlp", "model.hidden=8", "trainer.log_every=1", "loss_scaling=none"]
NO_DECAY = "optimizer.groups.no_decay={parameters:['*.bias'],weight_decay:0}"
HEAD = "optimizer.groups.head={parameters:[head.*],lr:0.1x}"
STEM = "optimizer.groups.stem={parameters:[hidden1.*],frozen:true}"
GROUPS = [NO_DECAY, HEAD, "optimizer.weight_decay=0.1", "optimizer.lr=0.01"]


def trainer_of(*overrides: str) -> Trainer:
    _, composed = compose_named([*SMALL, "device=cpu", *overrides])
    config = check_config(without_hydra(composed))
    seed_everything(0)
    return build_trainer(config, build_task(config), batches=4)


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.rand(16, 1, 8, 8, generator=draw), torch.randint(0, 10, (16,), generator=draw))
        for _ in range(count)
    ]


@pytest.mark.parametrize("words", [[f"optimizer.groups.a={{nesterov:{w}}}" for w in ("off", "no")]])
def test_a_word_for_false_in_a_group_is_false(words: list[str]) -> None:
    for word in words:
        own = trainer_of("optimizer=sgd", "optimizer.momentum=0.9", word, "dtype=fp32")
        assert own.optimizer.optimizer.param_groups[0]["nesterov"] is False
    with pytest.raises(ConfigError) as refused:
        trainer_of("optimizer=sgd", "optimizer.groups.a={nesterov:abc}")
    assert str(refused.value) == "optimizer.groups.a.nesterov=abc: must be true or false"


@pytest.mark.parametrize("target", ["torch.optim.AdamW", "torch.optim.SGD"])
def test_they_are_torchs_groups_made_by_hand(target: str) -> None:
    words = [f"optimizer._target_={target}", *GROUPS, "dtype=fp32", "scheduler=none"]
    trainer = trainer_of(*words)
    model = trainer_of(*words).model
    named = dict(model.named_parameters())
    layers = ["hidden1.linear", "hidden2.linear", "head"]
    plain = getattr(torch.optim, target.rpartition(".")[2])(
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


@pytest.mark.parametrize("dtype", ["fp32", "mixed", "amp", "mixed_bf16", "amp_bf16"])
def test_a_frozen_group_stays_and_has_no_state(dtype: str) -> None:
    trainer = trainer_of(STEM, NO_DECAY, f"dtype={dtype}", "trainer.ema_decay=0.9")
    before = {name: weight.clone() for name, weight in trainer.weights().items()}
    for batch in batches(3):
        trainer.train_step(batch)
    moved = {
        name for name, weight in trainer.weights().items() if not torch.equal(weight, before[name])
    }
    frozen = {name for name in before if name.startswith("hidden1")}
    assert len(frozen) == 2
    assert moved == set(before) - frozen
    assert len(trainer.optimizer.state_dict()["state"]) == len(moved)


@pytest.mark.parametrize("dtype", ["fp32", "mixed", "amp", "mixed_bf16", "amp_bf16"])
def test_they_train_and_resume_bit_for_bit(start_run: StartRun, tmp_path: Path, dtype: str) -> None:
    options = [*SMALL, *GROUPS, STEM, f"dtype={dtype}", "trainer.max_steps=8",
               "trainer.checkpoint_every=4", "trainer.keep_last=10"]  # fmt: skip
    start_run(tmp_path / "whole", *options)
    resumed = cut(tmp_path / "whole", tmp_path / "resumed")
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
def test_other_groups_do_not_resume(start_run: StartRun, tmp_path: Path, then: list[str]) -> None:
    short = [*SMALL, "trainer.max_steps=2"]
    start_run(tmp_path / "first", *short, NO_DECAY, HEAD)
    with pytest.raises(CheckpointError) as refused:
        start_run(tmp_path / "then", *short, *then, f"resume={tmp_path / 'first'}")
    assert "optimizer.groups: the checkpoint has default, no_decay, head, this run " in str(
        refused.value
    )
    assert checkpoint.read(tmp_path / "first").global_step == 2


@pytest.mark.parametrize(
    ("group", "line"),
    [
        ("{parameters:[hed.*],lr:1}", "optimizer.groups.g.parameters: 'hed.*' matches no parameter; nearest: head.bias"),
        ("{parameters:[head.*,'*nrom*']}", "optimizer.groups.g.parameters: '*nrom*' matches no parameter; the names are hidden1.linear.weight"),
        ("{ndim:7}", "optimizer.groups.g.parameters=['*']: no parameter is left for it; the names are"),
        ("{ndim:1,weight_decai:0}", "optimizer.groups.g.weight_decai=0: torch.optim.AdamW takes no such argument; nearest: weight_decay"),
        ("{ndim:1,weight_decay:-1}", "optimizer.groups.g: torch.optim.AdamW refused its options: Invalid weight_decay value: -1"),
        ("{ndim:1,lr:0}", "optimizer.groups.g.lr=0: must be a number or null > 0"),
        ("{ndim:1,lr:0x}", "optimizer.groups.g.lr=0x: must be a number or null > 0, or as in 10x"),
        ("{ndim:1,frozen:true,lr:1}", "optimizer.groups.g.lr=1: does nothing with frozen=true; leave out one of them"),
        ("{frozen:true}", "optimizer.groups: every parameter is frozen; leave some to train"),
        ("{parameters:head}", "optimizer.groups.g.parameters=head: must be a list"),
        ("3", "optimizer.groups.g=3: must be a mapping; give it parameters"),
    ],
)  # fmt: skip
def test_a_group_that_cannot_be_made_is_refused(group: str, line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        trainer_of(f"optimizer.groups.g={group}")
    assert str(refused.value).startswith(line)


def test_the_name_of_the_rest_is_taken() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.groups\.default: is the group of all other"):
        trainer_of("optimizer.groups.default={ndim:1}")


def test_a_setting_that_all_parameters_share_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        trainer_of(
            "optimizer._target_=test_param_groups.Shared", "optimizer.groups.g={ndim:1,mode:2}"
        )
    assert str(refused.value) == (
        "optimizer.groups.g.mode=2: is the same for all parameters; a group may set "
        + ", ".join(torch.optim.SGD([torch.zeros(1)]).defaults)
    )


class Shared(torch.optim.SGD):
    """Takes an argument that is no setting of a group."""

    def __init__(self, params: object, lr: float = 0.1, mode: int = 1) -> None:
        super().__init__(params, lr=lr)  # type: ignore[arg-type]
        self.mode = mode
