"""Rows to train on, to validate on and to test on; one in ten each for the last two."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpframe.data.datasets.hold_out import hold_out
from mpframe.errors import ConfigError, DataError, nearest

_FEWEST_ROWS = 20

Split = Callable[[Tensor], list[Tensor]]


def split_rows(name: str, when: NDArray[np.int64]) -> list[Tensor]:
    """The rows of each part, [n] int64: training, validation, test. It depends on no seed.

    Args:
        name: `hold_out`: rows at random places, always the same ones; `time`: the last tenth
            tests and the tenth before it validates. Rows of one time are in one part.
        when: [rows] int64, the time of each row.

    Raises:
        ConfigError: another name.
        DataError: fewer than 20 rows, or so few different times that a part is empty.
    """
    splits: dict[str, Split] = {"hold_out": _hold_out, "time": _by_time}
    if name not in splits:
        hint = nearest(str(name), splits)
        raise ConfigError(
            f"dataset.split={name}: allowed are hold_out, time" + f"; {hint}" * bool(hint)
        )
    parts = splits[name](torch.from_numpy(when)) if len(when) >= _FEWEST_ROWS else []
    if not parts or not all(map(len, parts)):
        raise DataError(
            f"dataset: {len(when)} rows of {len(np.unique(when))} times make no training, "
            f"validation and test part; give at least {_FEWEST_ROWS} rows"
        )
    return parts


def _hold_out(when: Tensor) -> list[Tensor]:
    return hold_out(torch.zeros_like(when), one_in=5, parts=2)


def _by_time(when: Tensor) -> list[Tensor]:
    ordered, rows = when.sort(stable=True)
    tenths = ordered[[len(ordered) * 8 // 10, len(ordered) * 9 // 10]]
    first, second = torch.searchsorted(ordered, tenths).tolist()
    return [rows[:first], rows[first:second], rows[second:]]
