"""The moving average of the weights: its equation, its precision, and its use for evaluation."""

from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from mpframe.checkpoint.state import weights_of
from mpframe.core.errors import CheckpointError, ConfigError
from mpframe.training.callbacks.ema import Ema


def averages(ema: Ema, weight: nn.Parameter) -> torch.Tensor:
    return ema.by_name(nn.ParameterDict({"weight": weight}))["weight"]


@pytest.mark.parametrize("decay", [0.0625, 0.15, 0.99])
def test_the_average_follows_its_equation_and_the_decay_is_warmed_up(decay: float) -> None:
    """min(d, (1 + t) / (10 + t)), from t = 0 again after a restart."""
    weight = nn.Parameter(torch.tensor([1.0]))
    ema = Ema({weight: weight}, decay)
    for step in [*range(40), *range(3)]:
        if step == 0:
            ema.restart()
            expected = weight.detach().clone()
        weight.data.fill_(float(step))
        ema.update()
        expected = torch.lerp(expected, weight.detach(), 1.0 - min(decay, (1 + step) / (10 + step)))
        assert torch.equal(averages(ema, weight), expected)
        assert ema.updates == step + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_with_the_verdict_on_the_device_the_numbers_are_the_same(dtype: torch.dtype) -> None:
    """Where the first step is known on the host, as a fused optimizer's is, and where it is not."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(1000, dtype=dtype))
    known, told, mixed = (Ema({weight: weight}, 0.5) for _ in range(3))  # reached after 8
    for step in range(30):
        weight.data = torch.randn(1000, dtype=dtype)
        skipped = step % 3 == 1
        if skipped:
            weight.data[0] = torch.inf
        else:
            known.update()
        told.update(torch.tensor(skipped))
        mixed.update(None if step == 0 else torch.tensor(skipped))
    for ema in (told, mixed):
        assert torch.equal(averages(ema, weight), averages(known, weight))
        assert ema.updates == known.updates == 20


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_it_is_kept_in_fp32_and_rounded_and_held_in_range_for_use(half: torch.dtype) -> None:
    """As the weights are in training: 70000 is 65504 in float16, not inf."""
    beyond = 70000.0 if half == torch.float16 else torch.finfo(torch.float32).max
    master, limit = torch.tensor([1.0, beyond, -beyond]), torch.finfo(half).max
    weight = nn.Parameter(torch.zeros(3, dtype=half))
    ema = Ema({weight: master}, 0.0625)
    master[0].add_(2.0**-12)
    ema.update()
    expected = torch.tensor([1.0 + 2.0**-12 - 2.0**-16, beyond, -beyond])
    assert torch.equal(averages(ema, weight), expected)
    weight.data.fill_(2.0)
    with suppress(KeyboardInterrupt), ema.apply():
        assert (weight.tolist(), weight.dtype) == ([1.0, limit, -limit], half)
        raise KeyboardInterrupt
    assert (weight.tolist(), weight.dtype) == ([2.0] * 3, half)
    assert torch.equal(master, torch.tensor([1.0 + 2.0**-12, beyond, -beyond]))


def test_averages_are_saved_and_loaded_by_name() -> None:
    """In whatever order the parameters were given; a frozen one has none. Others are refused."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    weights = [model[1].weight, model[0].weight]
    saved = Ema({weight: weight for weight in weights}, 0.5).by_name(model)
    assert sorted(saved) == ["0.weight", "1.weight"]
    assert torch.equal(saved["0.weight"], model[0].weight)
    other = Ema({weight: torch.zeros_like(weight) for weight in reversed(weights)}, 0.5)
    other.load_by_name(model, saved)
    for theirs in ({**saved, "0.weight": torch.ones(2, 3)}, {"weight": saved["0.weight"]}):
        with pytest.raises(CheckpointError, match="the saved averages are of other weights"):
            other.load_by_name(model, theirs)
    assert all(torch.equal(average, saved[n]) for n, average in other.by_name(model).items())
    for decay in (0.0, float("nan")):
        with pytest.raises(ConfigError, match=r"trainer\.ema_decay=.*: must be a number > 0 and <"):
            Ema({}, decay)


def test_each_name_of_a_tied_weight_has_its_average_in_an_export() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    model["head"].weight = weight = model["embed"].weight
    saved = Ema({weight: torch.zeros_like(weight)}, 0.5).by_name(model)
    state = {"trainer": {"weights": model.state_dict(), "ema": saved}}
    for average in weights_of(state, "ema", Path("checkpoint")).values():
        assert torch.equal(average, torch.zeros(4, 2))
