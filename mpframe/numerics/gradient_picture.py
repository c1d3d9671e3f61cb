"""What a half format loses of a run's gradients: unscaled, at the present scale, at the best.

The gradients of all activations and weights on one batch are computed in fp32, where nothing is
lost, and counted by exponent. A loss scale s = 2^k moves them k octaves to the right. A gradient
that is then at or below half the format's smallest number is lost, one below its smallest normal
number keeps fewer bits, one above its largest number is inf. The best scale is the largest power
of two at which no gradient is inf.

Where products are quantised below 16 bits, a strip above the present scale's bars has the limits
of their gradient operands at the scales of the step, from the lowest to the highest of all blocks
and layers. Scales follow the gradients, so these limits say nothing about another loss scale.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpframe.files.durable import write_atomically
from mpframe.loss_scaling.powers import safe_scale
from mpframe.numerics.exponents import FIELDS, HIGHEST, LOWEST, Limits
from mpframe.numerics.product_limits import OperandLimits
from mpframe.numerics.ranges import KINDS, SCALED, Counts, Ranges
from mpframe.tree import dtype_name

_ROW = 20.0  # the height of an operand in the strip of products, on the axis of the shares


@dataclass(frozen=True)
class ScaledGradients:
    """The gradients at one scale, and what the format loses of them.

    Attributes:
        title: which scale it is.
        scale: a power of two.
        bins: [BINS] gradients that are not zero, by unscaled exponent.
        lost, subnormal, over: fractions of the gradients that are not zero.
        products: the limits of quantised gradient operands at this scale (`gradient_limits`).
    """

    title: str
    scale: float
    bins: Counts
    lost: float
    subnormal: float
    over: float
    products: Mapping[str, OperandLimits] = field(default_factory=dict)

    def line(self) -> str:
        """As plain text."""
        return (
            f"{self.title:24} 2^{np.log2(self.scale):<4g} lost {self.lost:8.3%}   "
            f"fewer bits {self.subnormal:8.3%}   inf {self.over:8.3%}"
        )

    def product_lines(self) -> list[str]:
        """The limits of each quantised operand as plain text."""
        return [
            f"{self.title:24} {operand}   lost up to {_span(own.lost)}   "
            f"largest {_span(own.largest)}"
            for operand, own in self.products.items()
        ]


def scaled_gradients(
    title: str, ranges: Ranges, products: Mapping[str, OperandLimits] | None = None
) -> ScaledGradients:
    """The numbers of a report that was measured in fp32, at its scale.

    Args:
        title: which scale it is.
        ranges: the report.
        products: the limits of quantised gradient operands at the same scale.
    """
    rows = ranges.rows[[KINDS.index(kind) for kind in SCALED]].sum(axis=(0, 1))
    counts = dict(zip(FIELDS, rows, strict=False))
    present = max(counts["count"] - counts["zeros"] - counts["bad"], 1.0)
    return ScaledGradients(
        title,
        ranges.scale,
        rows[len(FIELDS) :],
        counts["lost"] / present,
        counts["subnormal"] / present,
        counts["over"] / present,
        products or {},
    )


def best_scale(ranges: Ranges, half: torch.dtype) -> float:
    """The largest power of two at which no gradient of the report is above the format's largest.

    It is at most 2^127, the largest that fp32 holds: in bfloat16 small gradients could take more.
    """
    amax = max(ranges.field(kind, "amax").max() for kind in SCALED) / ranges.scale
    return min(safe_scale(float(amax), half, octaves=0) or 1.0, 2.0**127)


def draw(
    losses: Sequence[ScaledGradients], half: torch.dtype, step: int, path: Path, recipe: str = ""
) -> None:
    """A panel for each scale, one above the other, over the exponent of the scaled gradient.

    Args:
        losses: of the same gradients at several scales.
        half: the format.
        step: global step of the run.
        path: where the PNG goes.
        recipe: of products, for the title; empty: none.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 2.1 * len(losses) + 0.9), layout="constrained")
    panels = figure.subplots(len(losses), 1, sharex=True, squeeze=False)[:, 0]
    for axes, own in zip(panels, losses, strict=True):
        _panel(axes, own, half)
    lowest = [own.lost[0] for panel in losses for own in panel.products.values()]
    if lowest:
        panels[0].set_xlim(left=min(panels[0].get_xlim()[0], min(lowest) - 2))
    panels[-1].set_xlabel("exponent of the scaled gradient, floor(log2 |s g|)", fontsize=12)
    name = dtype_name(half) + (f", products in {recipe}" if recipe else "")
    figure.suptitle(f"gradients after {step} steps, in {name}")
    named: dict[str, Any] = {}
    for axes in panels:
        named |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    columns = 3 if len(named) > 4 else 4
    figure.legend(list(named.values()), list(named), loc="outside lower center", ncols=columns)
    path.parent.mkdir(parents=True, exist_ok=True)
    png = io.BytesIO()
    figure.savefig(png, dpi=110)
    write_atomically(path, png.getvalue())


def _panel(axes: Any, losses: ScaledGradients, half: torch.dtype) -> None:
    limits = Limits.of(half)
    shift = np.log2(losses.scale)
    shown = np.flatnonzero(losses.bins)
    x = shown + LOWEST + shift
    axes.bar(x, losses.bins[shown] / losses.bins.sum(), width=0.9, color="0.25")
    lost, normal, largest = (np.log2(v) - 0.5 for v in (limits.lost, limits.normal, limits.largest))
    axes.axvspan(2 * LOWEST, lost, color="tab:red", alpha=0.3, label="lost")
    axes.axvspan(lost, normal, color="tab:orange", alpha=0.3, label="fewer bits")
    axes.axvspan(normal, largest, color="tab:green", alpha=0.15, label="kept")
    axes.axvspan(largest, HIGHEST + shift, color="tab:purple", alpha=0.3, label="inf")
    axes.set_yscale("log")
    axes.set_ylim(1e-6, 1)
    axes.set_xlim(min(lost - 20, -45), largest + 6)
    axes.set_ylabel("share", fontsize=12)
    axes.set_title(
        f"{losses.title}, 2^{shift:g}: {losses.lost:.2%} lost, {losses.subnormal:.2%} fewer bits, "
        f"{losses.over:.2%} inf",
        fontsize=11,
        loc="left",
    )
    if losses.products:
        _draw_products(axes, losses.products)


def _draw_products(axes: Any, products: Mapping[str, OperandLimits]) -> None:
    """A row for each operand above the shares: where its format begins, and where it ends."""
    rows = [_ROW ** (number + 0.7) for number in range(len(products))]
    for at, own in zip(rows, products.values(), strict=True):
        _span_line(axes, own.lost, at / 1.8, "dotted", "lost in products")
        _span_line(axes, own.largest, at * 1.8, "solid", "largest in products")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylim(top=_ROW ** (len(products) + 0.3))
    axes.set_yticks([1e-6, 1e-4, 1e-2, 1.0])
    axes.set_yticks(rows, products, minor=True)


def _span_line(axes: Any, span: tuple[float, float], at: float, style: Any, label: str) -> None:
    """From the lowest to the highest limit, at a height; a bar of exponent e begins at e - 0.5."""
    x = [limit - 0.5 for limit in span]
    axes.plot(x, [at, at], linestyle=style, marker="|", color="magenta", lw=1.8, label=label)


def _span(span: tuple[float, float]) -> str:
    return f"2^{span[0]:.1f} to 2^{span[1]:.1f}"
