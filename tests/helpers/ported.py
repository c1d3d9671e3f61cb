"""What the ported suites share."""

from collections.abc import Iterable
from typing import Any

import torch

INF, NAN = float("inf"), float("nan")


def scales_after(scaler: Any, amaxes: Iterable[float]) -> list[float]:
    """The scale after each of these updates."""
    scales = []
    for amax in amaxes:
        scaler.update(torch.tensor(amax))
        scales.append(scaler.scale.item())
    return scales
