"""What quantisation takes from every operand of one training step, and the record of such steps.

    numerics/products.csv    a row for each operand of each layer's products, at each report
    numerics/products.png    the last report: signal to noise in decibels

Operands are named by their product, as `dw.x`: the input of a layer, as quantised for dw.
"""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from mpframe.core.comm import SINGLE_PROCESS, Comm
from mpframe.core.precision import Precision
from mpframe.files.durable import AppendLog, write_atomically
from mpframe.lowbit.handler import watch_products
from mpframe.lowbit.recipe import OPERANDS

FILE_NAME = "products.csv"
NAMES = tuple(f"{product}.{operand}" for product, pair in OPERANDS.items() for operand in pair)
WITHOUT_WEIGHT = "without a weight"
_HEAD = ("step", "layer", "operand", "values", "snr_db", "saturated", "lost", "scale_spread")
_SUMS = 5  # count, signal, noise, saturated, lost; after them the largest and the smallest scale


@dataclass(frozen=True)
class Noise:
    """The loss of one operand of one product to quantisation.

    Attributes:
        count: values.
        snr_db: 10 log10(sum v^2 / sum (q - v)^2) of values v and their quantised q, in decibels;
            inf without noise, nan beside inf and nan.
        saturated: the share of values beyond the format's largest number at their scale.
        lost: the share of values that are not zero but became zero.
        scale_spread: octaves from the smallest to the largest scale; 0 if there is one, or none.
    """

    count: int
    snr_db: float
    saturated: float
    lost: float
    scale_spread: float = 0.0

    @classmethod
    def of(cls, row: list[float]) -> Self:
        """Read a row of `count_noise` or `merged`."""
        count, signal, noise, saturated, lost, highest, lowest = row
        decibels = 10 * math.log10(signal / noise) if signal > 0 < noise else math.nan
        decibels = math.inf if noise == 0 else decibels
        # If all values are zero, the highest is -inf and the lowest inf.
        spread = max(highest - lowest, 0.0)
        return cls(int(count), decibels, saturated / count, lost / count, spread)


Noises = Mapping[tuple[str, str], Noise]
"""By layer and operand."""
Rows = dict[tuple[str, str], Tensor]
"""The same as counted by `count_noise`."""


class ProductProbe:
    """Counts one step of a run with products below 16 bits.

    Make it before the step, and call `noises` after it.
    """

    def __init__(self, precision: Precision) -> None:
        self._precision = precision
        self._rows: Rows = {}
        watch_products(precision, self._seen)

    def noises(self, comm: Comm = SINGLE_PROCESS) -> Noises:
        """Return the counts, in one transfer from the device, and count no more.

        All ranks of `comm` call this; rank 0 gets the counts of all of them, the others nothing.
        """
        watch_products(self._precision, None)
        rows = torch.stack(list(self._rows.values())).cpu() if self._rows else ()
        counted: Rows = {}
        for of_rank in comm.gather_object(dict(zip(self._rows, rows, strict=True))):
            for key, row in of_rank.items():
                _add(counted, key, row)
        return {key: Noise.of(row.tolist()) for key, row in counted.items()}

    def _seen(self, weight: str, product: str, operand: str, row: Tensor) -> None:
        layer = weight.rpartition(".")[0] or ("model" if weight else WITHOUT_WEIGHT)
        _add(self._rows, (layer, f"{product}.{operand}"), row)


class NoiseRecord:
    """Appends to `products.csv`. The reports of steps that a resumed run repeats are dropped.

    Args:
        kept: steps whose reports stay.
        on_error: `stop` if the disk is full, or `warn` and write what waits once there is room.
    """

    def __init__(self, path: Path, kept: int = 0, on_error: str = "stop") -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._log = AppendLog(path, on_error)
        content = path.read_text() if path.exists() else ""
        write_atomically(path, _text([_HEAD]) + "".join(_whole_lines(content, kept)))

    def add(self, step: int, noises: Noises) -> None:
        """Append a report.

        Raises:
            OSError: there is no room, and that stops the run.
        """
        rows = [
            (step, *key, n.count, n.snr_db, n.saturated, n.lost, n.scale_spread)
            for key, n in noises.items()
        ]
        self._log.append(_text(rows).encode())


def _add(rows: Rows, key: tuple[str, str], row: Tensor) -> None:
    rows[key] = merged(rows[key], row) if key in rows else row


def _whole_lines(content: str, kept: int) -> Iterator[str]:
    for line in content.splitlines(keepends=True)[1:]:
        if line.endswith("\n") and int(line.partition(",")[0]) <= kept:
            yield line


def _text(rows: Sequence[Sequence[object]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def merged(one: Tensor, other: Tensor) -> Tensor:
    """Merge two rows."""
    ends = torch.maximum(one[_SUMS], other[_SUMS]), torch.minimum(one[-1], other[-1])
    return torch.cat([one[:_SUMS] + other[:_SUMS], torch.stack(ends)])
