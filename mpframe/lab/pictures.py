"""Pictures of ranges and of quantisation noise.

Ranges: layers over exponents. The colour of a cell is the share of a
layer's values with that exponent, on a logarithmic scale from one in a million to all. The lines
are the limits of the half format at the loss scale: below the first a value is lost, below the
second it keeps fewer bits, above the third it is inf. Values in fp32 do not meet these limits, so
their layers have no lines.

Noise: signal to noise of every operand of every layer, in decibels, six for each bit. Operands that
stay in half are empty.

TensorBoard first shows a picture a few hundred pixels wide, so they are small, with few words and
large letters.
"""

import io
import math
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpframe.core.tree import dtype_name
from mpframe.files.durable import write_atomically
from mpframe.lab.exponents import HIGHEST, LOWEST, Limits
from mpframe.lab.product_noise import NAMES, Noises
from mpframe.lab.ranges import KINDS, SCALED, Counts, Ranges


def new_figure(width: float, height: float) -> Any:
    """Make an empty figure, in inches."""
    from matplotlib.figure import Figure  # Imported late: it takes half a second.

    return Figure(figsize=(width, height), layout="constrained")


def short(name: str) -> str:
    """Return the end of a layer's name, at most 20 letters."""
    return name if len(name) <= 20 else "…" + name[-19:]


def save(figure: Any, path: Path, dpi: int = 100) -> None:
    """Write a PNG, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    png = io.BytesIO()
    figure.savefig(png, dpi=dpi)
    write_atomically(path, png.getvalue())


LEAST = 1e-6
_EXPONENT = "exponent, floor(log2 |x|)"


def draw_layers(ranges: Ranges, kind: str, half: torch.dtype, path: Path) -> bool:
    """Draw one of KINDS as a PNG, a row for each layer. False, and no picture, without values."""
    has = ranges.field(kind, "count") > 0
    if not has.any():
        return False
    names = list(compress(ranges.layers, has))
    in_half = ranges.in_half[KINDS.index(kind)][has]
    shares = ranges.bins(kind)[has] / ranges.field(kind, "count")[has, None]
    zeros = ranges.fraction(kind, "zeros")[has]
    letters, row = (11.0, 0.26) if len(names) <= 20 else (8.0, 0.17)
    figure = new_figure(width=6.6, height=max(3.4, 1.3 + row * len(names)))
    axes = figure.subplots()
    scale = ranges.scale if kind in SCALED else 1.0
    low, high = _window(shares, half, scale, bool(in_half.any()))
    shown = shares[:, low - LOWEST : high + 1 - LOWEST]
    image = _show(axes, shown, (low - 0.5, high + 0.5, len(names) - 0.5, -0.5))
    labels = [
        f"{short(name)}{'' if there else ' fp32'} {share:4.0%}"
        for name, there, share in zip(names, in_half, zeros, strict=True)
    ]
    axes.set_yticks(range(len(names)), labels, fontsize=letters, fontfamily="monospace")
    if in_half.any():
        _draw_limits(axes, half, scale, np.flatnonzero(in_half), (low - 0.5, high + 0.5))
    axes.set_xlabel(f"{_EXPONENT}; % = zeros")
    title = f"{kind.replace('_', ' ')}, step {ranges.step}"
    axes.set_title(_title(title, half, kind, ranges, in_half), pad=36)
    _finish(figure, axes, image, path)
    return True


def _draw_limits(
    axes: Any, half: torch.dtype, scale: float, rows: Any, window: tuple[float, float]
) -> None:
    """Draw the limits through the rows in half, named above them."""
    lost, normal, largest = (at - np.log2(scale) - 0.5 for at, _ in _limits(half))
    for at, (_, style) in zip((lost, normal, largest), _limits(half), strict=True):
        if window[0] <= at <= window[1]:
            axes.vlines(np.full(len(rows), at), rows - 0.5, rows + 0.5, "white", style, lw=1.6)
    words = (("lost", lost, "right"), ("fewer\nbits", (lost + normal) / 2, "center"))
    for says, at, side in (*words, ("inf", largest, "left")):
        if window[0] <= at <= window[1]:
            top = axes.get_xaxis_transform()
            _write(axes, says, (at, 1), 3, xycoords=top, ha=side, va="bottom")


def _write(axes: Any, says: str, at: tuple[float, float], away: int, **how: Any) -> None:
    """Write words beside a line, so many points above it."""
    axes.annotate(says, at, (0, away), textcoords="offset points", fontsize=11, **how)


def _title(what: str, half: torch.dtype, kind: str, ranges: Ranges, in_half: Any) -> str:
    """Name the picture and its limits, which the scale moves for gradients."""
    if not in_half.any():
        return f"{what}; fp32"
    at = f" at 2^{np.log2(ranges.scale):g}" if kind in SCALED else ""
    return f"{what}; {dtype_name(half)}{at}"


def _show(axes: Any, shares: Counts, extent: tuple[float, float, float, float]) -> Any:
    from matplotlib.colors import LogNorm

    axes.set_facecolor("black")
    shown = np.where(shares > 0, np.maximum(shares, LEAST), np.nan)
    how = {"norm": LogNorm(LEAST, 1.0), "cmap": "turbo", "interpolation": "nearest"}
    return axes.imshow(shown, aspect="auto", extent=extent, **how)


def _finish(figure: Any, axes: Any, image: Any, path: Path) -> None:
    bar = figure.colorbar(image, ax=axes, pad=0.01)
    bar.set_label("share of values")
    for part in (axes.xaxis.label, axes.yaxis.label, axes.title, bar.ax.yaxis.label):
        part.set_fontsize(12)
    save(figure, path)


def _limits(half: torch.dtype) -> list[tuple[float, Any]]:
    """Return the exponents of the format's limits, and how they are drawn."""
    limits = Limits.of(half)
    exponents = map(np.log2, (limits.lost, limits.normal, limits.largest))
    return list(zip(exponents, ("dotted", "dashed", "solid"), strict=True))


def _window(shares: Counts, half: torch.dtype, scale: float, limited: bool) -> tuple[int, int]:
    """Return the exponents to show: all that occur, and if values are in float16 its limits."""
    present = np.flatnonzero(shares.any(axis=0)) + LOWEST
    shown = limited and half != torch.bfloat16
    ends = [limit - np.log2(scale) for limit, _ in _limits(half)] if shown else []
    low, high = min([*present, *ends, 0.0]) - 1, max([*present, *ends, 0.0]) + 1
    return max(LOWEST, int(np.floor(low))), min(HIGHEST, int(np.ceil(high)))


_LIMITS = 0.0, 60.0  # dB: noise as large as the signal, and 10 bits


def draw_noises(noises: Noises, step: int, path: Path) -> None:
    """Draw the noises of a step, at least one, as a PNG."""
    layers = list(dict.fromkeys(layer for layer, _ in noises))
    shown = np.full((len(layers), len(NAMES)), np.nan)
    for (layer, operand), noise in noises.items():
        shown[layers.index(layer), NAMES.index(operand)] = noise.snr_db
    figure = new_figure(width=6.6, height=max(3.4, 1.4 + 0.26 * len(layers)))
    axes = figure.subplots()
    image = axes.imshow(shown, aspect="auto", cmap="RdYlGn", vmin=_LIMITS[0], vmax=_LIMITS[1])
    axes.set_xticks(range(len(NAMES)), [n.replace(".", "\n") for n in NAMES], fontsize=11)
    axes.set_yticks(range(len(layers)), [short(name) for name in layers], fontsize=11)
    for (row, column), decibels in np.ndenumerate(shown):
        if not math.isnan(decibels):
            axes.text(column, row, f"{decibels:.0f}", ha="center", va="center", fontsize=11)
    axes.set_title(f"signal to noise of quantised operands, step {step}", fontsize=12)
    figure.colorbar(image, ax=axes, pad=0.01).set_label("dB", fontsize=12)
    save(figure, path)
