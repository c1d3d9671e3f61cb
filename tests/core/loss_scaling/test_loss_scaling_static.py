"""Static: nothing moves it."""

import math

import pytest
import torch

from mpframe.core.loss_scaling import Static


def test_the_default_is_one() -> None:
    assert Static().scale == 1.0


@pytest.mark.parametrize("amax", [0.0, 1.0, 1e30, math.inf, math.nan])
def test_nothing_moves_the_scale(amax: float) -> None:
    scaler = Static(1000.0)
    for _ in range(10):
        scaler.update(torch.tensor(amax))
    assert scaler.scale == 1000.0


def test_it_asks_for_no_probe() -> None:
    assert not Static(8.0).wants_probe


def test_the_saved_scale_is_the_one_that_continues() -> None:
    loaded = Static(8.0)
    loaded.load_state_dict(Static(128.0).state_dict())
    assert loaded.scale == 128.0
