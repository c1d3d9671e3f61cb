"""From the words in a table's cells to numbers: categories, continuous values and dates."""

import datetime
import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpframe.data.datasets.tabular.csv_file import Columns, Table
from mpframe.errors import DataError

UNKNOWN = 0
"""The number of a category that no training row has."""
DATE_PARTS = ("year", "month", "day", "week", "weekday")
_LARGEST = 1e30

Floats = NDArray[np.float64]


def numbers(table: Table, name: str, missing: bool) -> Floats:
    """A column as numbers, [rows] float64.

    Args:
        table: has the column.
        name: the column's.
        missing: whether a cell may be empty; such a cell becomes nan.

    Raises:
        DataError: a cell is no finite number up to 1e30, or empty.
    """

    def number(word: str) -> float:
        if not word and missing:
            return math.nan
        value = float(word.replace("_", "?"))  # float() takes 1_000, a spreadsheet does not.
        if not abs(value) <= _LARGEST:
            raise ValueError
        return value

    way_out = "correct the cell, or give dataset.fill_missing=true if it is empty"
    return np.array(_converted(table, name, number, "a finite number up to 1e30", way_out))


def dates(table: Table, name: str) -> NDArray[np.int64]:
    """A column of dates, as in 2015-07-31, as days since the year 1: [rows] int64.

    Raises:
        DataError: a cell is no such date.
    """
    days = _converted(table, name, _day, "a date as in 2015-07-31", "correct the cell")
    return np.array(days, dtype=np.int64)


def date_parts(table: Table, name: str) -> Columns:
    """The columns NAME.year, .month, .day, .week (of ISO) and .weekday (Monday is 1) of a date."""
    parts = {
        word: (
            *map(str, (date.year, date.month, date.day)),
            *map(str, date.isocalendar()[1:]),
        )
        for word in set(table.columns[name])
        for date in (datetime.date.fromisoformat(word),)
    }
    return {
        f"{name}.{part}": [parts[word][place] for word in table.columns[name]]
        for place, part in enumerate(DATE_PARTS)
    }


def categories(words: list[str], training: Tensor) -> tuple[Tensor, list[str]]:
    """A column as categories.

    The categories of the training rows are numbered from 1 on, in the order of their words; an
    empty cell is one of them. Any other word is 0, `UNKNOWN`.

    Args:
        words: [rows].
        training: [n] int64, the rows to train on.

    Returns:
        [rows] int64, and the training rows' words in the order of their numbers.
    """
    known = sorted({words[row] for row in training.tolist()})
    places = {word: place for place, word in enumerate(known, start=1)}
    return torch.tensor([places.get(word, UNKNOWN) for word in words]), known


def standardized(values: Floats, training: Tensor) -> tuple[Tensor, dict[str, float]]:
    """(value - mean) / std with the numbers of the training rows; nan becomes their median.

    A column that is constant has std 1.

    Args:
        values: [rows], nan where a cell is empty.
        training: [n] int64, the rows to train on; one of them is not nan.

    Returns:
        [rows] float32, and median, mean and std.
    """
    median = float(np.nanmedian(values[training.numpy()]))
    filled = np.where(np.isnan(values), median, values)
    chosen = filled[training.numpy()]
    mean, std = float(chosen.mean()), float(chosen.std()) or 1.0
    scaled = torch.from_numpy((filled - mean) / std).float()
    return scaled, {"median": median, "mean": mean, "std": std}


def _day(word: str) -> float:
    return float(datetime.date.fromisoformat(word).toordinal())


def _converted(
    table: Table, name: str, convert: Callable[[str], float], what: str, way_out: str
) -> list[float]:
    """The column with each of its words converted, each different one once."""
    column, values = table.columns[name], {}
    for row, word in enumerate(column):
        if word not in values:
            try:
                values[word] = convert(word)
            except ValueError:
                raise DataError(
                    f"{table.place(name, row)}: {word[:80]!r} is not {what}; {way_out}"
                ) from None
    return [values[word] for word in column]
