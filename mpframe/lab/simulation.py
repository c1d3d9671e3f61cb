"""Replays a recorded run with any loss scaler: how many steps does it skip, and at which scales?

The gradients of step t stay as they were. A step overflows if scale * amax_t exceeds the half
format's largest number. The amax of a step that overflowed in the run itself is unknown.

    headroom_t = log2(limit) - log2(scale_t amax_t)      octaves left unused, on steps not skipped
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from mpframe.core.loss_scaling.scaler import LossScaler
from mpframe.files.text import align
from mpframe.lab.pictures import new_figure, save

Series = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Simulation:
    """A scaler's scales over a record, [steps] each."""

    scales: Series
    skipped: npt.NDArray[np.bool_]
    headroom: Series  # octaves left unused, nan if skipped or amax was 0

    @property
    def mean_headroom(self) -> float:
        """Mean octaves left unused, nan if every step was skipped."""
        seen = self.headroom[np.isfinite(self.headroom)]
        return float(seen.mean()) if seen.size else float("nan")


def replay(amax: Series, scaler: LossScaler, half: torch.dtype = torch.float16) -> Simulation:
    """Run a fresh scaler, whose state changes, over a record.

    `amax`: [steps], the largest |unscaled gradient| of each step, inf or nan if it overflowed.
    """
    limit = torch.finfo(half).max
    scales = np.empty(len(amax))
    skipped = np.empty(len(amax), dtype=bool)
    for step, value in enumerate(amax):
        scales[step] = float(scaler.scale)
        skipped[step] = not value * scales[step] <= limit  # nan compares false
        scaler.update(torch.tensor(np.inf if skipped[step] else value, dtype=torch.float32))
    with np.errstate(divide="ignore", invalid="ignore"):
        headroom = np.log2(limit) - np.log2(scales * amax)
    headroom[skipped | (amax == 0)] = np.nan
    return Simulation(scales, skipped, headroom)


def as_table(replays: Mapping[str, Simulation]) -> str:
    head = ("scaler", "steps", "skipped", "mean headroom (octaves)", "scale changes", "final scale")
    rows = []
    for name, done in replays.items():
        counts = str(len(done.scales)), str(int(done.skipped.sum()))
        changes = str(np.count_nonzero(np.diff(done.scales)))
        scales = f"{done.mean_headroom:.2f}", changes, f"{done.scales[-1]:g}"
        rows.append((name, *counts, *scales))
    return align([head, *rows])


def draw(amax: Series, replays: Mapping[str, Simulation], path: Path, half: torch.dtype) -> None:
    """Draw the scales and the highest scale without overflow in `half` of each step, as PNG."""
    figure = new_figure(10, 5)
    axes = figure.subplots()
    steps = np.arange(1, len(amax) + 1)
    with np.errstate(divide="ignore"):
        highest = np.log2(torch.finfo(half).max) - np.log2(amax)
    highest[~np.isfinite(highest)] = np.nan
    axes.plot(steps, highest, ".", color="0.75", markersize=3, label="highest without overflow")
    for name, done in replays.items():
        (line,) = axes.step(steps, np.log2(done.scales), where="mid", label=name, linewidth=1.2)
        hit = done.skipped
        axes.plot(steps[hit], np.log2(done.scales[hit]), "x", color=line.get_color(), markersize=6)
    axes.set_xlabel("step (tried)")
    axes.set_ylabel("log2(loss scale), octaves")
    axes.set_title("Loss scale by scaler; crosses are skipped steps")
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    save(figure, path, dpi=120)
