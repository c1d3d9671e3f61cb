"""A picture of quantisation: signal to noise of every operand of every layer, in decibels.

A row is a layer, a column an operand of a product. Six decibels are one bit. What stays in half is
empty.
"""

import math
from pathlib import Path

import numpy as np

from mpframe.numerics.picture import new_figure, save, short
from mpframe.numerics.product_noise import NAMES, Noises

_LIMITS = 0.0, 60.0  # dB: noise as large as the signal, and 10 bits


def draw_noises(noises: Noises, step: int, path: Path) -> None:
    """Draw one report.

    Args:
        noises: of the step; not empty.
        step: for the title.
        path: where the PNG goes.
    """
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
