"""The moving average of the weights: its equation, its precision, and its use for evaluation."""

import pytest
import torch
from torch import nn

from mpframe.ema import Ema
from mpframe.errors import CheckpointError, ConfigError


def averages(ema: Ema, weight: nn.Parameter) -> torch.Tensor:
    return ema.by_name(nn.ParameterDict({"weight": weight}))["weight"]


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
    assert torch.equal(averages(ema, weight), expected)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_it_is_kept_in_fp32_and_rounded_only_for_use(half: torch.dtype) -> None:
    master = torch.tensor([1.0])
    weight = nn.Parameter(master.to(half))
    ema = Ema({weight: master}, 0.5)
    master.add_(2.0**-12)
    ema.update()
    assert torch.equal(averages(ema, weight), torch.tensor([1.0 + 2.0**-13]))
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


def two_layers(inputs: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 2), nn.Linear(2, 1))


def test_averages_are_saved_and_loaded_by_name() -> None:
    """In whatever order the parameters were given; a frozen one has none."""
    model = two_layers()
    weights = [model[1].weight, model[0].weight]
    ema = Ema({weight: weight for weight in weights}, 0.5)
    saved = ema.by_name(model)
    assert sorted(saved) == ["0.weight", "1.weight"]
    assert torch.equal(saved["0.weight"], model[0].weight)
    other = Ema({weight: torch.zeros_like(weight) for weight in reversed(weights)}, 0.5)
    other.load_by_name(model, saved)
    for name, average in other.by_name(model).items():
        assert torch.equal(average, saved[name])


@pytest.mark.parametrize("other", [two_layers(3), nn.Linear(2, 2)])
def test_averages_of_other_weights_are_refused(other: nn.Module) -> None:
    model = two_layers()
    ema = Ema({p: p for p in model.parameters()}, 0.5)
    saved = Ema({p: p for p in other.parameters()}, 0.5).by_name(other)
    before = ema.by_name(model)
    with pytest.raises(CheckpointError, match="the saved averages are of other weights"):
        ema.load_by_name(model, saved)
    assert all(torch.equal(a, before[n]) for n, a in ema.by_name(model).items())
