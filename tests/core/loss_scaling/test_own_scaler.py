"""A user's loss scaler is one class and its `_target_`: in all modes, saved, resumed, refused."""

from pathlib import Path
from typing import Any

import own_scalers
import pytest
import torch
from in_process import StartRun, scalars
from sameness import assert_same_run, cut
from torch import nn

from mpframe import Backoff, Precision, Trainer
from mpframe.core.errors import CheckpointError, ConfigError
from mpframe.core.objective import supervised

SHORT = [
    *("model=mlp", "model.hidden=8", "trainer.max_steps=8", "trainer.checkpoint_every=4"),
    *("trainer.keep_last=10", "trainer.log_every=1"),
]
DRIFTING = ["loss_scaling._target_=own_scalers.Drifting", "loss_scaling.every=2"]
MODULE = ["loss_scaling._target_=own_scalers.Module"]


@pytest.mark.parametrize(("dtype", "own"), [("mixed", DRIFTING), ("fp32", MODULE)])
def test_it_scales_and_resumes_bit_for_bit(
    start_run: StartRun, tmp_path: Path, dtype: str, own: list[str]
) -> None:
    options = [*SHORT, f"dtype={dtype}", *own]
    done = start_run(tmp_path / "whole", *options)
    assert (done.status, done.loss_scaling) == ("finished", own[0].rpartition(".")[2])
    scales = [value for _, value in scalars(tmp_path / "whole")["loss_scale/scale"]]
    wanted = {"Drifting": [1024, 1024, 2048, 2048], "Module": [256, 384, 576, 864]}
    assert scales[:4] == wanted[done.loss_scaling]
    resumed = cut(tmp_path / "whole", tmp_path / "resumed")
    start_run(resumed, *options, "resume=auto")
    assert_same_run(tmp_path / "whole", resumed)


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("own_scalers.Mute", "own_scalers.Mute: has no update; see docs/loss_scaling.md"),
        (
            "torch.nn.Identity",
            "torch.nn.Identity: has no update and no scale; see docs/loss_scaling.md",
        ),
        (
            "own_scalers.Number",
            "own_scalers.Number: its scale is a float; must be a 0-d float32 tensor; see "
            "docs/loss_scaling.md",
        ),
    ],
)
def test_what_it_lacks_is_said_before_the_folder_is_taken(
    start_run: StartRun, tmp_path: Path, target: str, line: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        start_run(tmp_path, *SHORT, f"loss_scaling._target_={target}")
    assert str(refused.value) == f"loss_scaling._target_={line}"
    assert not list(tmp_path.iterdir())


def test_an_argument_it_does_not_take_is_refused(start_run: StartRun, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        start_run(tmp_path, *SHORT, DRIFTING[0], "loss_scaling.evry=2")
    assert str(refused.value) == (
        "loss_scaling.evry=2: own_scalers.Drifting takes no such argument; nearest: every"
    )


def test_a_state_that_it_cannot_load_is_refused_in_one_line() -> None:
    def trainer(scaler: Any) -> Trainer:
        model = nn.Linear(2, 2)
        model, optimizer = Precision().prepare(model, torch.optim.SGD(model.parameters()))
        return Trainer(model, optimizer, supervised(nn.MSELoss()), scaler=scaler)

    with pytest.raises(CheckpointError) as refused:
        trainer(own_scalers.Module()).load_state_dict(trainer(Backoff()).state_dict())
    assert str(refused.value).startswith(
        "loss_scaling: Module cannot continue the saved state: RuntimeError (Error(s) in loading "
        "state_dict for Module: Unexpected key(s) in state_dict: "
    )
    assert "\n" not in str(refused.value)
