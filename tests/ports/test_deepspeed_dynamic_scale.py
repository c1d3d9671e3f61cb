"""DeepSpeed's tests of its dynamic loss scale: steps with finite, inf or nan gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ported import INF, NAN
from torch import nn
from torch.optim import SGD, Adam

from mpframe import Backoff, MasterWeights, Precision

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


def exponents(parts: Parts, scaler: Backoff, values: list[float]) -> list[float]:
    """Those of the scale after a step with each of these gradients, in every element."""
    model, optimizer = parts
    seen = []
    for value in values:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        optimizer.step(scaler)
        seen.append(scaler.scale.log2().item())
    return seen


WINDOW, LATER = {"growth_interval": 2}, "the scale grows on a window's last step, as torch's"
KEPT = "there is no consecutive_hysteresis: a clean step does not refill it"
MARKS = {
    "no_overflow": pytest.mark.differs(f"{LATER}; there in the step after"),
    "consecutive_hysteresis": pytest.mark.differs(KEPT),
}
# The test there, the rule, a gradient for each step, and log2 of the scale after it: from 8.
CASES: list[tuple[str, dict[str, Any], list[float], list[int]]] = [
    ("a window and one more", WINDOW, [0.1, -0.1, 0.05], [8, 9, 9]),
    ("no_overflow", WINDOW, [0.1, -0.05] * 5, [8, 9, 9, 10, 10, 11, 11, 12, 12, 13]),
    ("all_overflow", WINDOW, [INF, -INF, *[NAN] * 8], [7, 6, 5, 4, 3, 2, 1, 0, 0, 0]),
    ("min_loss_scale", {"min_scale": 2.0**5}, [INF, -INF, *[NAN] * 3], [7, 6, 5, 5, 5]),
    ("some_overflow", WINDOW, [INF, NAN, 0.1, 0.0, -0.1, INF], [7, 6, 6, 7, 7, 6]),
    ("hysteresis", {"hysteresis": 3}, [INF] * 4, [8, 8, 7, 6]),
    ("consecutive_hysteresis", {"hysteresis": 2}, [INF, 0.1] * 4, [8, 8, 7, 7, 6, 6, 5, 5]),
]


@pytest.mark.parametrize(
    ("rule", "gradients", "scales"),
    [pytest.param(*case, id=name, marks=MARKS.get(name, ())) for name, *case in CASES],
)
def test_scales(parts: Parts, rule: Any, gradients: list[float], scales: list[int]) -> None:
    assert exponents(parts, Backoff(init_scale=2.0**8, **rule), gradients) == scales


def test_hysteresis_survives_a_checkpoint(parts: Parts) -> None:
    """hysteresis_survives_a_checkpoint: an absorbed overflow is remembered."""
    scaler, restored = (Backoff(init_scale=2.0**k, hysteresis=2) for k in (8, 4))
    assert exponents(parts, scaler, [INF]) == [8]
    restored.load_state_dict(scaler.state_dict())
    assert exponents(parts, restored, [INF]) == [7]
