"""The moving average of the weights: its equation, its precision, and its use for evaluation."""

import pytest
import torch
from torch import nn

from mpframe.ema import Ema
from mpframe.errors import CheckpointError, ConfigError


@pytest.mark.parametrize("decay", [0.5, 0.875])
def test_the_average_follows_its_equation(decay: float) -> None:
    """Decays and weights that are sums of few powers of two: exact."""
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    ema = Ema({weight: weight}, decay)
    expected = weight.detach().clone()
    for value in (3.0, 5.0, -1.0):
        weight.data.fill_(value)
        ema.update()
        expected = decay * expected + (1.0 - decay) * value
    assert torch.equal(ema.state_dict()[0], expected)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_it_is_kept_in_fp32_and_rounded_only_for_use(half: torch.dtype) -> None:
    master = torch.tensor([1.0])
    weight = nn.Parameter(master.to(half))
    ema = Ema({weight: master}, 0.5)
    master.add_(2.0**-12)
    ema.update()
    assert torch.equal(ema.state_dict()[0], torch.tensor([1.0 + 2.0**-13]))
    with ema.applied():
        assert weight.dtype == half
        assert torch.equal(weight.detach(), torch.tensor([1.0], dtype=half))
    assert torch.equal(master, torch.tensor([1.0 + 2.0**-12]))


def test_the_weights_come_back_after_an_exception() -> None:
    weight = nn.Parameter(torch.tensor([1.0]))
    ema = Ema({weight: weight}, 0.5)
    weight.data.fill_(2.0)
    try:
        with ema.applied():
            assert weight.item() == 1.0
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert weight.item() == 2.0


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.5, float("nan")])
def test_a_decay_out_of_range_is_refused(decay: float) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.ema_decay=.*: must be a number > 0 and < 1"):
        Ema({}, decay)


def test_averages_of_other_weights_are_refused() -> None:
    ema = Ema({nn.Parameter(torch.zeros(2)): torch.zeros(2)}, 0.5)
    with pytest.raises(CheckpointError, match="the saved averages are of other weights"):
        ema.load_state_dict([torch.zeros(3)])
