"""Any CSV file with a positive number to predict: hourly bike rentals, daily sales, prices.

An error names file, row and column, where the header is row 1, as in a spreadsheet.
"""

import csv
import datetime
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpframe.core.errors import DataError, nearest
from mpframe.data.metrics import RMSE, RMSPE
from mpframe.data.samples import BatchDataset, hold_out
from mpframe.data.task import Task, require_choice, require_facts
from mpframe.files.plain_file import open_regular
from mpframe.workloads.tables.model import LogRegression

Columns = dict[str, list[str]]


class Table(NamedTuple):
    """Columns of words by name, all of one length, and their file."""

    path: Path
    columns: Columns

    @property
    def rows(self) -> int:
        return len(next(iter(self.columns.values())))

    def place(self, name: str, row: int) -> str:
        """Name the cell of data row `row`, counted from 0, in column `name`."""
        return f"{self.path}: row {row + 2}, column {name}"


def read_csv(path: Path, wanted: Iterable[str] | None = None) -> Table:
    """Read the columns `wanted` of a UTF-8 file with a header, or all if it is None.

    DataError: it is no CSV, a column is missing or there twice, or a row has more or fewer cells
    than the header. OSError: it cannot be opened.
    """
    try:
        with open_regular(path, "r", encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = [name.strip() for name in next(reader, [])]
            columns: Columns = {name: [] for name in (header if wanted is None else wanted)}
            for name in columns:
                if header.count(name) != 1:
                    hint = nearest(name, header, before="; ")
                    raise DataError(
                        f"{path}: has {header.count(name)} columns {name}; name the columns of the "
                        f"file's first line{hint}"
                    )
            places = {name: header.index(name) for name in columns}
            for number, cells in enumerate(reader, start=2):
                if len(cells) != len(header):
                    raise DataError(
                        f"{path}: row {number} has {len(cells)} cells and the header "
                        f"{len(header)}; correct the row"
                    )
                for name, place in places.items():
                    columns[name].append(sys.intern(cells[place].strip()))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as CSV ({error}); get the file again") from error
    return Table(path, columns)


UNKNOWN = 0
DATE_PARTS = ("year", "month", "day", "week", "weekday")


def numbers(table: Table, name: str, missing: bool) -> NDArray[np.float64]:
    """Return a column as float64 [rows], with nan for empty cells if they may be `missing`."""

    def number(word: str) -> float:
        if not word and missing:
            return math.nan
        if not abs(value := float(word)) <= 1e30:
            raise ValueError
        return value

    what = "a finite number up to 1e30 (dataset.fill_missing=true allows empty cells)"
    return np.array(_convert(table, name, number, what))


def dates(table: Table, name: str) -> list[datetime.date]:
    """Return a column of dates like 2015-07-31."""
    return _convert(table, name, datetime.date.fromisoformat, "a date as in 2015-07-31")


def date_parts(table: Table, name: str) -> Columns:
    """Return the columns NAME.year, .month, .day, .week (of ISO) and .weekday (Monday is 1)."""
    days = dates(table, name)
    parts = [(day.year, day.month, day.day, *day.isocalendar()[1:]) for day in days]
    return {
        f"{name}.{part}": [str(row[place]) for row in parts]
        for place, part in enumerate(DATE_PARTS)
    }


def _convert(table: Table, name: str, convert: Callable[[str], Any], what: str) -> list[Any]:
    values = []
    for row, word in enumerate(table.columns[name]):
        try:
            values.append(convert(word))
        except ValueError:
            place = table.place(name, row)
            raise DataError(f"{place}: {word[:80]!r} is not {what}; correct the cell") from None
    return values


def join_rows(table: Table, second: Table, by: str) -> Table:
    """Give each row the columns of the second table's row with the same word in column `by`."""
    places: dict[str, int] = {}
    for row, word in enumerate(second.columns[by]):
        if places.setdefault(word, row) != row:
            raise DataError(
                f"{second.place(by, row)}: {word[:80]!r} is there twice; remove one of the rows"
            )
    for row, word in enumerate(table.columns[by]):
        if word not in places:
            raise DataError(
                f"{table.place(by, row)}: {word[:80]!r} is in no row of {second.path}; add it there"
            )
    rows = [places[word] for word in table.columns[by]]
    others = {name: [column[row] for row in rows] for name, column in second.columns.items()}
    return Table(table.path, others | table.columns)


def split_rows(name: str, when: NDArray[np.int64]) -> list[Tensor]:
    """Return the rows of each part, training, validation and test, [n] int64, without a seed.

    `name` is `hold_out`, for rows at random places, or `time`, for the last ones by `when` [rows]
    int64, with all rows of one time in one part.
    """
    require_choice("split", name, ("hold_out", "time"))
    if name == "hold_out":
        parts = hold_out(torch.zeros(len(when)), one_in=5, parts=2)
    else:
        ordered, rows = torch.from_numpy(when).sort(stable=True)
        tenths = ordered[[len(ordered) * 8 // 10, len(ordered) * 9 // 10]]
        first, second = torch.searchsorted(ordered, tenths).tolist()
        parts = [rows[:first], rows[first:second], rows[second:]]
    if not all(map(len, parts)):
        raise DataError(
            f"dataset: {len(when)} rows of {len(np.unique(when))} times make no training, "
            "validation and test part; give more rows"
        )
    return parts


def csv_table(
    root: str,
    file: str,
    categorical: Mapping[str, int],
    continuous: Sequence[str],
    target: str,
    split: str = "hold_out",
    date: str | None = None,
    join: Mapping[str, str] | None = None,
    fill_missing: bool = False,
    drop_zeros: bool = False,
) -> Task:
    """Return the rows of a table, from which `LogRegression` learns the target's logarithm.

    A sample is a dict of `categorical` [columns] int64, where 0 is a category that no training row
    has, `continuous` [columns] float32, with mean 0 and standard deviation 1 over the training
    rows, and `target`, float32, in its unit. The metrics are `RMSPE` and `RMSE`.

    With split=hold_out one row in ten validates and one in ten tests. With `time` the last tenth of
    the rows tests and the tenth before it validates. A `date` gives the time and the columns
    DATE.year, .month, .day, .week and .weekday. With `join` each row gets the columns of the row of
    the second `file` with the same word in the column `by`. See conf/dataset/bikes.yaml.

    ConfigError: an option is out of its range or does not fit the file. DataError: a file is
    damaged, or a cell does not fit its column. OSError: a file cannot be opened.
    """
    path = Path(root) if Path(root).is_file() else Path(root) / file
    table = _read(path, [*categorical, *continuous, target], date, join)
    targets = numbers(table, target, missing=False).astype(np.float32)
    rows = _rows_with_target(table, target, targets, drop_zeros)
    when = np.arange(table.rows)
    if date is not None:
        when = np.array([day.toordinal() for day in dates(table, date)], np.int64)
    parts = [rows[part] for part in split_rows(split, when[rows.numpy()])]
    numbered, words = _number(table, categorical, parts[0])
    scaled, statistics = _scale(table, continuous, parts[0], fill_missing)
    columns = {"categorical": numbered, "continuous": scaled, "target": torch.from_numpy(targets)}
    logs = np.log(targets[parts[0].numpy()], dtype=np.float64)
    objective = LogRegression(float(logs.mean()), float(logs.std()) or 1.0)
    train, val, test = (_Rows(_Rows(columns).fetch_batch(part.tolist())) for part in parts)
    preprocessing = {
        "categorical": words,
        "continuous": statistics,
        "target": {"log_mean": objective.mean, "log_std": objective.std},
    }
    metrics = {"rmspe": RMSPE, "rmse": RMSE}
    return Task(train, val, objective, metrics, test=test, preprocessing=preprocessing)


@dataclass(frozen=True)
class _Rows(BatchDataset):
    """Rows in memory, one of each tensor for a sample."""

    columns: dict[str, Tensor]

    def fetch_batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        rows = torch.as_tensor(indices, dtype=torch.int64)
        return {name: column.index_select(0, rows) for name, column in self.columns.items()}

    def __len__(self) -> int:
        return len(self.columns["target"])


def _read(
    path: Path, columns: list[str], date: str | None, join: Mapping[str, str] | None
) -> Table:
    """Read the wanted columns, also from the parts of the date and from a second table."""
    second = None if join is None else read_csv(path.parent / join["file"])
    elsewhere = {f"{date}.{part}" for part in DATE_PARTS} if date else set()
    elsewhere |= set(second.columns) if second else set()
    here = [name for name in columns if name not in elsewhere]
    here += [date] if date else []
    here += [join["by"]] if join else []
    table = read_csv(path, here)
    if date is not None:
        table = Table(path, table.columns | date_parts(table, date))
    return join_rows(table, second, join["by"]) if second and join else table


def _rows_with_target(
    table: Table, name: str, targets: NDArray[np.float32], drop_zeros: bool
) -> Tensor:
    """Return the rows whose target has a logarithm, [n] int64."""
    bad = np.flatnonzero(targets < 0 if drop_zeros else targets <= 0)
    if len(bad):
        raise DataError(
            f"{table.place(name, int(bad[0]))}: {targets[bad[0]]:g} has no logarithm; the target "
            "must be above 0 (dataset.drop_zeros=true leaves out rows of 0)"
        )
    return torch.from_numpy(np.flatnonzero(targets > 0))


def _number(
    table: Table, categorical: Mapping[str, int], training: Tensor
) -> tuple[Tensor, dict[str, list[str]]]:
    """Return the categories of all rows, [rows, columns] int64, and their words by column.

    The words of the training rows, including the empty one, are numbered from 1 on in their order.
    Any other word is 0, `UNKNOWN`.
    """
    numbered = torch.empty(table.rows, len(categorical), dtype=torch.int64)
    known = {}
    for column, (name, stated) in enumerate(categorical.items()):
        words = table.columns[name]
        known[name] = sorted({words[row] for row in training.tolist()})
        facts = {f"categorical.{name}": (stated, len(known[name]))}
        require_facts(f"the training part of {table.path}", **facts)
        places = {word: place for place, word in enumerate(known[name], start=1)}
        numbered[:, column] = torch.tensor([places.get(word, UNKNOWN) for word in words])
    return numbered, known


def _scale(
    table: Table, continuous: Sequence[str], training: Tensor, fill_missing: bool
) -> tuple[Tensor, dict[str, dict[str, float]]]:
    """Return (value - mean) / std, [rows, columns] float32, and each column's median, mean and std.

    These come from the training rows. nan becomes the median, and a constant column has std 1.
    """
    scaled, statistics = torch.empty(table.rows, len(continuous)), {}
    for column, name in enumerate(continuous):
        values = numbers(table, name, missing=fill_missing)
        median = float(np.nanmedian(values[training.numpy()]))
        filled = np.where(np.isnan(values), median, values)
        chosen = filled[training.numpy()]
        mean, std = float(chosen.mean()), float(chosen.std()) or 1.0
        scaled[:, column] = torch.from_numpy((filled - mean) / std)
        statistics[name] = {"median": median, "mean": mean, "std": std}
    return scaled, statistics
