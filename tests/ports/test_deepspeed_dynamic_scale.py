"""DeepSpeed's tests of its dynamic loss scale: steps with finite, inf or nan gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from vocabulary import INF, NAN

from mpframe import Backoff, MasterWeights, Precision, Static
from mpframe.core.errors import ConfigError

differs = pytest.mark.differs
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: Adam(p, lr=1.5e-4),
    "adam, fused": lambda p: Adam(p, lr=1.5e-4, fused=True),
    "sgd": lambda p: SGD(p, lr=1.5e-4),
}
Parts = tuple[nn.Linear, MasterWeights]


@pytest.fixture(params=OPTIMIZERS)
def parts(request: pytest.FixtureRequest) -> Parts:
    model = nn.Linear(1, 1)
    optimizer = OPTIMIZERS[request.param](model.parameters())
    return model, Precision("mixed", "float16").prepare(model, optimizer)[1]


def scales(parts: Parts, scaler: Backoff, *values: float) -> list[float]:
    """The scale after a step with each of these gradients, in every element."""
    model, optimizer = parts
    seen = []
    for value in values:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        optimizer.step(scaler)
        seen.append(scaler.scale.item())
    return seen


def test_growth_needs_a_window_and_one_more(parts: Parts) -> None:
    """some_overflow: 3 clean steps with a window of 2 double the scale once."""
    scaler = Backoff(init_scale=2.0**8, growth_interval=2)
    assert scales(parts, scaler, 0.1, -0.1, 0.05)[-1] == 2.0**9


@differs("the scale grows on a window's last step, as torch's; there in the step after")
def test_no_overflow(parts: Parts) -> None:
    """no_overflow: ten clean steps with a window of 2."""
    found = scales(parts, Backoff(init_scale=2.0**8, growth_interval=2), *[0.1, -0.05] * 5)
    assert found == [2.0 ** (8 + (step + 1) // 2) for step in range(10)]
    theirs = [2.0 ** (8 + step // 2) for step in range(10)]
    assert found[:-1] == theirs[1:]


@pytest.mark.parametrize("floor", [1.0, 2.0])
def test_all_overflow(parts: Parts, floor: float) -> None:
    """all_overflow: inf, -inf and nan halve the scale each, down to min_loss_scale."""
    scaler = Backoff(init_scale=2.0**4, growth_interval=2, min_scale=floor)
    found = scales(parts, scaler, INF, -INF, *[NAN] * 6)
    assert found == [max(2.0 ** (3 - step), floor) for step in range(8)]


def test_an_overflow_moves_nothing(parts: Parts) -> None:
    """all_overflow: skipped steps leave weights and optimizer state alone."""
    model, optimizer = parts
    before = [p.detach().clone() for p in model.parameters()]
    scales(parts, Backoff(init_scale=2.0**4), INF, NAN)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert not any(torch.is_tensor(v) and v.any() for v in optimizer.optimizer.state.values())


def test_some_overflow(parts: Parts) -> None:
    """some_overflow: two overflows, a window and one more clean, one overflow."""
    scaler = Backoff(init_scale=2.0**8, growth_interval=2)
    found = scales(parts, scaler, INF, NAN, 0.1, 0.0, -0.1, INF)
    assert [found[step] for step in (1, 4, 5)] == [2.0**6, 2.0**7, 2.0**6]


def test_hysteresis(parts: Parts) -> None:
    """hysteresis: the first two of three are absorbed, then every overflow halves."""
    scaler = Backoff(init_scale=2.0**8, hysteresis=3)
    assert scales(parts, scaler, *[INF] * 4) == [2.0**8, 2.0**8, 2.0**7, 2.0**6]


@differs("there is no consecutive_hysteresis: a clean step does not refill it")
def test_consecutive_hysteresis(parts: Parts) -> None:
    """consecutive_hysteresis: overflows with clean steps between them never lower the scale."""
    assert scales(parts, Backoff(init_scale=2.0**8, hysteresis=2), *[INF, 0.1] * 4)[-1] == 2.0**5


def test_hysteresis_survives_a_checkpoint(parts: Parts) -> None:
    """hysteresis_survives_a_checkpoint: an absorbed overflow is remembered."""
    scaler, restored = (Backoff(init_scale=2.0**k, hysteresis=2) for k in (8, 4))
    assert scales(parts, scaler, INF) == [2.0**8]
    restored.load_state_dict(scaler.state_dict())
    assert scales(parts, restored, INF) == [2.0**7]


@pytest.mark.parametrize("value", [INF, NAN, 0.0, -1.0])
@pytest.mark.parametrize(("kind", "name"), [(Static, "scale"), (Backoff, "init_scale")])
def test_scales_that_are_refused(kind: Any, name: str, value: float) -> None:
    """test_loss_scale_validation: a scale must be finite and above 0; the option is named."""
    with pytest.raises(ConfigError, match=rf"loss_scaling\.{name}"):
        kind(**{name: value})
