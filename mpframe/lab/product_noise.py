"""The loss of every operand of one training step to quantisation, and the record of such steps.

    numerics/products.csv    a row for each operand of each layer's products, at each report
    numerics/products.png    the last report: signal to noise in decibels

Operands are named by their product, as `dw.x`: the input of a layer, as quantised for dw.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from mpframe.core.comm import SINGLE_PROCESS, Comm
from mpframe.precision.lowbit.handler import watch_products
from mpframe.precision.lowbit.recipe import OPERANDS
from mpframe.precision.precision import Precision

FILE_NAME = "products.csv"
NAMES = tuple(f"{product}.{operand}" for product, pair in OPERANDS.items() for operand in pair)
WITHOUT_WEIGHT = "without a weight"
COLUMNS = ("step", "layer", "operand", "values", "snr_db", "saturated", "lost", "scale_spread")
_SUMS = 5  # count, signal, noise, saturated, lost. The largest and the smallest scale follow.


@dataclass(frozen=True)
class Noise:
    """The loss of one operand of one product to quantisation, from values v to their quantised q.

    `snr_db` is 10 log10(sum v^2 / sum (q - v)^2), inf without noise, nan beside inf and nan.
    """

    values: int  # their number
    snr_db: float  # signal to noise, in decibels
    saturated: float  # share of values beyond the format's largest number at their scale
    lost: float  # share of values that are not zero but became zero
    scale_spread: float  # octaves from the smallest to the largest scale, 0 if there is at most one

    @classmethod
    def of(cls, row: list[float]) -> Self:
        """Read a row of `count_noise` or `merge`."""
        count, signal, noise, saturated, lost, highest, lowest = row
        decibels = 10 * math.log10(signal / noise) if signal > 0 < noise else math.nan
        decibels = math.inf if noise == 0 else decibels
        # If all values are zero, the highest is -inf and the lowest inf.
        spread = max(highest - lowest, 0.0)
        return cls(int(count), decibels, saturated / count, lost / count, spread)


Noises = Mapping[tuple[str, str], Noise]  # by layer and operand
Rows = dict[tuple[str, str], Tensor]  # the same as counted by `count_noise`


class ProductProbe:
    """A counter of one step with products below 16 bits, made before it. `noises` ends it."""

    def __init__(self, precision: Precision) -> None:
        self._precision = precision
        self._rows: Rows = {}
        watch_products(precision.op_handlers, self._add_row)

    def noises(self, comm: Comm = SINGLE_PROCESS) -> Noises:
        """Stop, and return all ranks' counts on rank 0, in one transfer. All ranks call this."""
        watch_products(self._precision.op_handlers, None)
        rows = torch.stack(list(self._rows.values())).cpu() if self._rows else ()
        counted: Rows = {}
        for counted_on_rank in comm.gather_object(dict(zip(self._rows, rows, strict=True))):
            for key, row in counted_on_rank.items():
                counted[key] = merge(counted.get(key), row)
        return {key: Noise.of(row.tolist()) for key, row in counted.items()}

    def _add_row(self, weight: str, product: str, operand: str, row: Tensor) -> None:
        layer = weight.rpartition(".")[0] or ("model" if weight else WITHOUT_WEIGHT)
        key = layer, f"{product}.{operand}"
        self._rows[key] = merge(self._rows.get(key), row)


def rows_of(step: int, noises: Noises) -> Iterator[dict[str, Any]]:
    for (layer, operand), noise in noises.items():
        yield {"step": step, "layer": layer, "operand": operand, **vars(noise)}


def merge(one: Tensor | None, other: Tensor) -> Tensor:
    if one is None:
        return other
    ends = torch.maximum(one[_SUMS], other[_SUMS]), torch.minimum(one[-1], other[-1])
    return torch.cat([one[:_SUMS] + other[:_SUMS], torch.stack(ends)])
