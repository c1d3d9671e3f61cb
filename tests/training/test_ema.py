"""The moving average of the weights: its equation, its precision, and its use for evaluation."""

import copy
from contextlib import suppress

import pytest
import torch
from torch import nn

from mpframe import Precision, Trainer
from mpframe.core.errors import CheckpointError, ConfigError
from mpframe.core.objective import supervised
from mpframe.training.callbacks.ema import AverageWeights, Ema, ema_of


def averages(ema: Ema, weight: nn.Parameter) -> torch.Tensor:
    return ema.by_name(nn.ParameterDict({"weight": weight}))["weight"]


def test_the_average_follows_its_equation() -> None:
    """Decays and weights that are sums of few powers of two: exact. Below 0.1 none is warmed up."""
    decay = 0.0625
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    ema = Ema({weight: weight}, decay)
    expected = weight.detach().clone()
    for value in (3.0, 5.0, -1.0):
        weight.data.fill_(value)
        ema.update()
        expected = decay * expected + (1.0 - decay) * value
    assert torch.equal(averages(ema, weight), expected)


@pytest.mark.parametrize("decay", [0.15, 0.99])
def test_the_decay_is_warmed_up(decay: float) -> None:
    """min(d, (1 + t) / (10 + t)), from t = 0 again after a restart."""
    weight = nn.Parameter(torch.tensor([1.0]))
    ema = Ema({weight: weight}, decay)
    for _ in range(2):
        expected = averages(ema, weight)
        for step in range(40):
            weight.data.fill_(float(step))
            ema.update()
            warmed = min(decay, (1 + step) / (10 + step))
            expected = torch.lerp(expected, weight.detach(), 1.0 - warmed)
            assert torch.equal(averages(ema, weight), expected)
        assert ema.updates == 40
        ema.restart()
        assert torch.equal(averages(ema, weight), weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_with_the_verdict_on_the_device_the_numbers_are_the_same(dtype: torch.dtype) -> None:
    """Where the first step is known on the host, as a fused optimizer's is, and where it is not."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(1000, dtype=dtype))
    known, told, mixed = (Ema({weight: weight}, 0.5) for _ in range(3))  # reached after 8
    for step in range(30):
        weight.data = torch.randn(1000, dtype=dtype)
        skipped = step % 3 == 1
        if not skipped:
            known.update()
        told.update(torch.tensor(skipped))
        mixed.update(None if step == 0 else torch.tensor(skipped))
    for ema in (told, mixed):
        assert torch.equal(averages(ema, weight), averages(known, weight))
        assert ema.updates == known.updates == 20


def test_a_step_skipped_on_the_device_leaves_the_average_bit_for_bit() -> None:
    weight = nn.Parameter(torch.tensor([-0.0, 1.0, float("nan")]))
    ema = Ema({weight: weight}, 0.5)
    before = averages(ema, weight).view(torch.int32)
    weight.data = torch.tensor([1.0, float("inf"), 2.0])
    ema.update(torch.tensor(True))
    assert torch.equal(averages(ema, weight).view(torch.int32), before)
    assert ema.updates == 0


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_an_average_beyond_the_range_is_held_at_its_end(half: torch.dtype) -> None:
    """As the weights are in training: 70000 is 65504 in float16, not inf."""
    beyond = {torch.float16: 70000.0, torch.bfloat16: torch.finfo(torch.float32).max}[half]
    master = torch.tensor([beyond, -beyond, 1.0])
    limit = torch.finfo(half).max
    weight = nn.Parameter(torch.tensor([limit, -limit, 1.0], dtype=half))
    ema = Ema({weight: master}, 0.5)
    before = weight.detach().clone()
    with ema.apply():
        assert weight.tolist() == [limit, -limit, 1.0]
    assert torch.equal(weight, before)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_it_is_kept_in_fp32_and_rounded_only_for_use(half: torch.dtype) -> None:
    master = torch.tensor([1.0])
    weight = nn.Parameter(master.to(half))
    ema = Ema({weight: master}, 0.0625)
    master.add_(2.0**-12)
    ema.update()
    assert torch.equal(averages(ema, weight), torch.tensor([1.0 + 2.0**-12 - 2.0**-16]))
    with ema.apply():
        assert weight.dtype == half
        assert torch.equal(weight.detach(), torch.tensor([1.0], dtype=half))
    assert torch.equal(master, torch.tensor([1.0 + 2.0**-12]))


def test_the_weights_come_back_after_an_exception() -> None:
    weight = nn.Parameter(torch.tensor([1.0]))
    ema = Ema({weight: weight}, 0.5)
    weight.data.fill_(2.0)
    seen = []
    with suppress(KeyboardInterrupt), ema.apply():
        seen.append(weight.item())
        raise KeyboardInterrupt
    assert (seen, weight.item()) == ([1.0], 2.0)


@pytest.mark.parametrize("decay", [0.0, float("nan")])
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


def averaging() -> Trainer:
    torch.manual_seed(0)
    model, precision = nn.Linear(4, 2), Precision("mixed")
    _, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    ema = Ema({p: optimizer.master_of(p) for p in model.parameters()}, 0.99)
    algorithms = {"ema": AverageWeights(ema, model)}
    objective = supervised(nn.functional.mse_loss)
    return Trainer(model, optimizer, objective, precision=precision, algorithms=algorithms)


def average_of(trainer: Trainer) -> Ema:
    ema = ema_of(trainer)
    assert ema is not None
    return ema


def train(trainer: Trainer, steps: int) -> None:
    for step in range(steps):
        trainer.train_step((torch.full((2, 4), 1.0 + step), torch.ones(2, 2)))


def test_a_checkpoint_counts_the_updates() -> None:
    """So a resumed average is warmed up as far as one that was never stopped."""
    whole, resumed = averaging(), averaging()
    train(whole, 3)
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    for trainer in (whole, resumed):
        train(trainer, 3)
        assert average_of(trainer).updates == 6
    first, second = (average_of(t).by_name(t.model) for t in (whole, resumed))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_checkpoint_from_before_the_count_goes_on() -> None:
    """Its decay was never warmed up: it counts as one that is as old as its run."""
    trainer, resumed = averaging(), averaging()
    train(trainer, 3)
    state = copy.deepcopy(trainer.state_dict())
    del state["ema_updates"]
    resumed.load_state_dict(state)
    assert average_of(resumed).updates == resumed.progress.steps == 3


def test_loaded_weights_start_it_anew() -> None:
    trainer = averaging()
    train(trainer, 3)
    trainer.load_weights(copy.deepcopy(trainer.weights()))
    assert average_of(trainer).updates == 0
