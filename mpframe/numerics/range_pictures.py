"""Pictures of ranges: layers over exponents, and exponents over time.

The colour of a cell is the share of a layer's values with that exponent, on a logarithmic scale
from one in a million to all. The lines are the limits of the half format at the loss scale: left of
the first a value is lost, left of the second it keeps fewer bits, right of the third it is inf.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpframe.files.durable import write_atomically
from mpframe.numerics.exponents import HIGHEST, LOWEST, Limits
from mpframe.numerics.ranges import SCALED, Counts, Ranges
from mpframe.tree import dtype_name

LEAST = 1e-6
_DPI = 110


def draw_layers(ranges: Ranges, kind: str, half: torch.dtype, path: Path) -> bool:
    """One kind of a report: a row for each layer.

    Args:
        ranges: the report.
        kind: one of KINDS.
        half: the format whose limits are drawn.
        path: where the PNG goes.

    Returns:
        False, and no picture, if the report has no value of this kind.
    """
    has = ranges.field(kind, "count") > 0
    if not has.any():
        return False
    names = [name for name, there in zip(ranges.layers, has, strict=True) if there]
    shares = ranges.bins(kind)[has] / ranges.field(kind, "count")[has, None]
    zeros = ranges.fraction(kind, "zeros")[has]
    figure = _figure(width=11, height=max(4.0, 1.8 + 0.2 * len(names)))
    axes = figure.subplots()
    scale = ranges.scale if kind in SCALED else 1.0
    low, high = _window(shares, half, scale)
    image = _show(axes, shares[:, low - LOWEST : high + 1 - LOWEST], low, high, len(names))
    axes.set_yticks(
        range(len(names)), [f"{_short(n)}  {z:6.1%}" for n, z in zip(names, zeros, strict=True)]
    )
    axes.tick_params(axis="y", labelsize=7, labelfontfamily="monospace")
    _draw_limits(axes, half, scale)
    axes.set_xlabel("exponent of the value, floor(log2 |x|)")
    axes.set_ylabel("layer, share of zeros")
    at = f" at loss scale 2^{np.log2(scale):g}" if kind in SCALED else ""
    axes.set_title(
        f"{kind.replace('_', ' ')} of step {ranges.step}; limits of {dtype_name(half)}{at}"
    )
    _finish(figure, axes, image, path)
    return True


def draw_time(
    reports: Sequence[Ranges], kind: str, layer: str, half: torch.dtype, path: Path
) -> None:
    """One layer of a kind over all reports: a column for each.

    Args:
        reports: in the order of their steps, at least one, all with this layer.
        kind: one of KINDS.
        layer: its name.
        half: the format whose limits are drawn.
        path: where the PNG goes.
    """
    rows = [report.layers.index(layer) for report in reports]
    shares = np.stack(
        [
            report.bins(kind)[row] / max(report.field(kind, "count")[row], 1.0)
            for report, row in zip(reports, rows, strict=True)
        ]
    )
    figure = _figure(width=10, height=5.5)
    axes = figure.subplots()
    scales = np.array([r.scale if kind in SCALED else 1.0 for r in reports])
    low, high = _window(shares, half, float(scales[-1]))
    image = _show(
        axes, shares[:, low - LOWEST : high + 1 - LOWEST].T, 0, len(reports) - 1, high - low + 1
    )
    axes.set_yticks(*_every(range(low, high + 1), 4))
    axes.set_xticks(*_every([report.step for report in reports], max(1, len(reports) // 10)))
    for limit, style, label in _limits(half):
        axes.step(
            range(len(reports)),
            limit - np.log2(scales) - low - 0.5,
            where="mid",
            color="white",
            linestyle=style,
            linewidth=1.2,
            label=label,
        )
    axes.set_ylim(-0.5, high - low + 0.5)
    axes.set_xlabel("step (tried)")
    axes.set_ylabel("exponent of the value, floor(log2 |x|)")
    axes.set_title(f"{kind.replace('_', ' ')} of {layer} over time; limits of {dtype_name(half)}")
    _finish(figure, axes, image, path)


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure  # Imported late: it takes half a second.

    return Figure(figsize=(width, height), layout="constrained")


def _show(axes: Any, shares: Counts, low: float, high: float, rows: int) -> Any:
    from matplotlib.colors import LogNorm

    shown = np.where(shares > 0, np.maximum(shares, LEAST), np.nan)
    axes.set_facecolor("black")
    extent = (low - 0.5, high + 0.5, rows - 0.5, -0.5)
    return axes.imshow(
        shown,
        aspect="auto",
        norm=LogNorm(LEAST, 1.0),
        cmap="turbo",
        extent=extent,
        interpolation="nearest",
    )


def _finish(figure: Any, axes: Any, image: Any, path: Path) -> None:
    bar = figure.colorbar(image, ax=axes, pad=0.01)
    bar.set_label("share of the layer's values (1 = all)")
    figure.legend(
        loc="outside lower center", ncols=3, fontsize=8, facecolor="0.3", labelcolor="white"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    png = io.BytesIO()
    figure.savefig(png, dpi=_DPI)
    write_atomically(path, png.getvalue())


def _draw_limits(axes: Any, half: torch.dtype, scale: float) -> None:
    for limit, style, label in _limits(half):
        axes.axvline(
            limit - np.log2(scale) - 0.5, color="white", linestyle=style, linewidth=1.2, label=label
        )


def _limits(half: torch.dtype) -> list[tuple[float, Any, str]]:
    """Exponents of the format's limits, how they are drawn, and what they say."""
    limits = Limits.of(half)
    return [
        (np.log2(limits.lost), ":", f"lost (rounds to 0) up to 2^{np.log2(limits.lost):g}"),
        (np.log2(limits.normal), "--", f"fewer bits below 2^{np.log2(limits.normal):g}"),
        (np.log2(limits.largest), "-", f"inf above {limits.largest:g}"),
    ]


def _window(shares: Counts, half: torch.dtype, scale: float) -> tuple[int, int]:
    """The exponents to show: all that occur, and float16's limits at this scale."""
    present = np.flatnonzero(shares.any(axis=0)) + LOWEST
    ends = (
        [] if half == torch.bfloat16 else [limit - np.log2(scale) for limit, _, _ in _limits(half)]
    )
    low = min([*present, *ends, 0.0]) - 1
    high = max([*present, *ends, 0.0]) + 1
    return max(LOWEST, int(np.floor(low))), min(HIGHEST, int(np.ceil(high)))


def _every(values: Sequence[int], step: int) -> tuple[list[int], list[str]]:
    at = list(range(0, len(values), step))
    return at, [str(values[index]) for index in at]


def _short(name: str) -> str:
    return name if len(name) <= 34 else "..." + name[-31:]
