"""A user's loss scaler is one class and its `_target_`: in all modes, saved, resumed, refused."""

import own_parts
import pytest
from fixtures import refused
from in_process import assert_same_run, cut, scalars
from prepared import prepared
from torch import nn

from mpframe import Backoff
from mpframe.core.errors import CheckpointError, ConfigError

SHORT = [
    *("model=mlp", "model.hidden=8", "trainer.max_steps=8", "trainer.checkpoint_every=4"),
    *("trainer.keep_last=10", "trainer.log_every=1"),
]
OWN = "loss_scaling._target_"


@pytest.mark.parametrize(
    ("dtype", "name", "more", "expected"),
    [
        ("mixed", "Drifting", ["loss_scaling.every=2"], [1024, 1024, 2048, 2048]),
        ("fp32", "Module", [], [256, 384, 576, 864]),
    ],
)
def test_it_scales_and_resumes_bit_for_bit(
    start_run, tmp_path, dtype, name, more, expected
) -> None:
    options = [*SHORT, f"dtype={dtype}", f"{OWN}=own_parts.{name}", *more]
    done = start_run(whole := tmp_path / "whole", *options)
    assert (done.status, done.loss_scaling) == ("finished", name)
    assert [scale for _, scale in scalars(whole)["loss_scale/scale"][:4]] == expected
    resumed = cut(whole, tmp_path / "resumed")
    start_run(resumed, *options, "resume=auto")
    assert_same_run(whole, resumed)


def test_errors_come_before_the_folder_is_taken(start_run, tmp_path) -> None:
    see = "see docs/loss_scaling.md"
    for options, said in (
        ([f"{OWN}=torch.nn.Identity"], f"has no update and no scale; {see}"),
        ([f"{OWN}=own_parts.Number"], f"its scale is a float; must be a 0-d float32 tensor; {see}"),
        (
            ["loss_scaling.evry=2", f"{OWN}=own_parts.Drifting"],
            "own_parts.Drifting takes no such argument; nearest: every",
        ),
    ):
        assert (
            refused(ConfigError, start_run, tmp_path, *SHORT, *options) == f"{options[0]}: {said}"
        )
    assert not list(tmp_path.iterdir())


def test_a_state_that_it_cannot_load_is_refused_in_one_line() -> None:
    scalers = own_parts.Module(), Backoff()
    own, other = (prepared(nn.Linear(2, 2), nn.MSELoss(), scaler=scaler) for scaler in scalers)
    assert refused(CheckpointError, own.load_state_dict, other.state_dict()).startswith(
        "loss_scaling: Module cannot continue the saved state: RuntimeError (Error(s) in loading "
    )
