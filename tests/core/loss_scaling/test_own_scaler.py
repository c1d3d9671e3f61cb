"""A user's loss scaler is one class and its `_target_`: in all modes, saved, resumed, refused."""

from pathlib import Path

import pytest
from in_process import StartRun, scalars
from sameness import assert_same_run, cut

from mpframe.core.errors import CheckpointError, ConfigError

SHORT = [
    *("model=mlp", "model.hidden=8", "trainer.max_steps=8", "trainer.checkpoint_every=4"),
    *("trainer.keep_last=10", "trainer.log_every=1"),
]
DRIFTING = ["loss_scaling._target_=own_scalers.Drifting", "loss_scaling.every=2"]
MODULE = ["loss_scaling._target_=own_scalers.Module"]


@pytest.mark.parametrize("own", [DRIFTING, MODULE], ids=["derived", "module"])
@pytest.mark.parametrize("dtype", ["fp32", "mixed", "amp", "mixed_bf16", "amp_bf16"])
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


@pytest.mark.parametrize(
    ("then", "line"),
    [
        (
            DRIFTING,
            "loss_scaling=Drifting cannot continue the saved state of Backoff: use "
            "loss_scaling=Backoff, or start a new run from the saved weights",
        ),
        (
            MODULE,
            "loss_scaling: Module cannot continue the saved state: RuntimeError (Error(s) in "
            "loading state_dict for Module: Unexpected key(s) in state_dict: ",
        ),
    ],
    ids=["derived", "module"],
)
def test_another_scalers_state_is_refused(
    start_run: StartRun, tmp_path: Path, then: list[str], line: str
) -> None:
    start_run(tmp_path / "first", *SHORT, "loss_scaling=Backoff")
    with pytest.raises(CheckpointError) as refused:
        start_run(tmp_path / "then", *SHORT, *then, f"resume={tmp_path / 'first'}")
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)
