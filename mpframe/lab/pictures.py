"""Pictures of ranges and of quantisation noise.

Ranges: layers over exponents. The colour of a cell is the share of a layer's values with that
exponent, on a logarithmic scale from one in a million to all. The lines are the limits of the half
format at the loss scale, also for layers in fp32: there they say what half would lose.

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
from mpframe.lab.ranges import SCALED, Ranges


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


_LEAST = 1e-6
_EXPLAINED = """exponent, floor(log2 |x|); % = zeros
lost below dotted, fewer bits below dashed, inf above solid"""


def draw_layers(ranges: Ranges, kind: str, half: torch.dtype, path: Path) -> bool:
    """Draw one of KINDS as a PNG, a row for each layer. False, and no picture, without values."""
    from matplotlib.colors import LogNorm

    has = ranges.field(kind, "count") > 0
    if not has.any():
        return False
    names, zeros = list(compress(ranges.layers, has)), ranges.fraction(kind, "zeros")[has]
    shares = ranges.bins(kind)[has] / ranges.field(kind, "count")[has, None]
    octaves = np.log2(ranges.scale) if kind in SCALED else 0.0
    limits = Limits.of(half)
    lines = np.log2([limits.lost, limits.normal, limits.largest]) - octaves - 0.5
    # The exponents that occur, and the limits unless they are as wide as fp32's.
    marks = () if half == torch.bfloat16 else lines
    shown = np.array([0.0, *np.flatnonzero(shares.any(axis=0)) + LOWEST, *marks])
    low, high = max(LOWEST, int(shown.min()) - 2), min(HIGHEST, int(shown.max()) + 2)
    letters, row = (11.0, 0.26) if len(names) <= 20 else (8.0, 0.17)
    figure = new_figure(width=6.6, height=max(3.4, 1.5 + row * len(names)))
    axes = figure.subplots()
    axes.set_facecolor("black")
    cells = shares[:, low - LOWEST : high + 1 - LOWEST]
    image = axes.imshow(
        np.where(cells > 0, np.maximum(cells, _LEAST), np.nan),
        aspect="auto", extent=(low - 0.5, high + 0.5, len(names) - 0.5, -0.5),
        norm=LogNorm(_LEAST, 1.0), cmap="turbo", interpolation="nearest",
    )  # fmt: skip
    for at, style in zip(lines, ("dotted", "dashed", "solid"), strict=True):
        axes.axvline(at, color="white", linestyle=style, linewidth=1.6)
    axes.set_xlim(low - 0.5, high + 0.5)
    labels = [f"{short(name)} {share:4.0%}" for name, share in zip(names, zeros, strict=True)]
    axes.set_yticks(range(len(names)), labels, fontsize=letters, fontfamily="monospace")
    axes.set_xlabel(_EXPLAINED, fontsize=12)
    at = f" at 2^{octaves:g}" if kind in SCALED else ""
    what = f"{kind.replace('_', ' ')}, step {ranges.step}; {dtype_name(half)}{at}"
    axes.set_title(what, fontsize=12)
    figure.colorbar(image, ax=axes, pad=0.01).set_label("share of values", fontsize=12)
    save(figure, path)
    return True


def draw_noises(noises: Noises, step: int, path: Path) -> None:
    """Draw the noises of a step, at least one, as a PNG."""
    layers = list(dict.fromkeys(layer for layer, _ in noises))
    shown = np.full((len(layers), len(NAMES)), np.nan)
    for (layer, operand), noise in noises.items():
        shown[layers.index(layer), NAMES.index(operand)] = noise.snr_db
    figure = new_figure(width=6.6, height=max(3.4, 1.4 + 0.26 * len(layers)))
    axes = figure.subplots()
    # From noise as large as the signal to 10 bits.
    image = axes.imshow(shown, aspect="auto", cmap="RdYlGn", vmin=0.0, vmax=60.0)
    axes.set_xticks(range(len(NAMES)), [n.replace(".", "\n") for n in NAMES], fontsize=11)
    axes.set_yticks(range(len(layers)), [short(name) for name in layers], fontsize=11)
    for (row, column), decibels in np.ndenumerate(shown):
        if not math.isnan(decibels):
            axes.text(column, row, f"{decibels:.0f}", ha="center", va="center", fontsize=11)
    axes.set_title(f"signal to noise of quantised operands, step {step}", fontsize=12)
    figure.colorbar(image, ax=axes, pad=0.01).set_label("dB", fontsize=12)
    save(figure, path)
