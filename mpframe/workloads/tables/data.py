"""Any CSV file with a positive number to predict: hourly bike rentals, daily sales, prices.

The file is untrusted: every size is checked before it is used. An error names file, row and column,
where the header is row 1, as in a spreadsheet.
"""

import csv
import datetime
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from mpframe.core.errors import ConfigError, DataError, nearest
from mpframe.data.metrics import RMSE, RMSPE
from mpframe.data.samples import hold_out
from mpframe.data.task import Task, require_facts
from mpframe.files.plain_file import open_regular
from mpframe.workloads.tables.model import LogRegression

_MOST_ROWS = 2**25
_LONGEST_LINE = 2**20  # characters

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

    DataError: the file cannot be read, a column is missing or there twice, a row has more or fewer
    cells than the header, or there are more than 2^25 rows or 2^20 characters in a line.
    """
    rows = 0
    try:
        with open_regular(path, "r", encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(_read_lines(path, file), strict=True)
            header = [name.strip() for name in next(reader, [])]
            places = _find_columns(path, header, header if wanted is None else wanted)
            columns: Columns = {name: [] for name in places}
            same: dict[str, str] = {}  # One string for all cells that are equal.
            for rows, cells in enumerate(islice(reader, _MOST_ROWS + 1), start=1):
                _require_row(path, rows, len(cells), len(header))
                for name, place in places.items():
                    cell = cells[place].strip()
                    columns[name].append(same.setdefault(cell, cell))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(
            f"{path}: cannot be read as CSV after row {rows + 1} ({reason}); get the file again"
        ) from error
    if not rows:
        raise DataError(f"{path}: has no rows below its header; get the file again")
    return Table(path, columns)


def _read_lines(path: Path, file: IO[str]) -> Iterator[str]:
    while line := file.readline(_LONGEST_LINE + 1):
        if len(line) > _LONGEST_LINE:
            raise DataError(f"{path}: has a line above {_LONGEST_LINE} characters; is it a CSV?")
        yield line


def _find_columns(path: Path, header: list[str], wanted: Iterable[str]) -> dict[str, int]:
    places: dict[str, int] = {}
    for name in wanted:
        count = header.count(name)
        if count != 1:
            missing = f"no column {name} ({_hint(name, header)})"
            what = f"{count} columns {name}" if count else missing
            raise DataError(f"{path}: has {what}; name the columns of the file's first line")
        places[name] = header.index(name)
    return places


def _hint(name: str, names: Iterable[str]) -> str:
    return nearest(name, names) or f"it has {', '.join(names)[:200]}"


def _require_row(path: Path, number: int, cells: int, wanted: int) -> None:
    if number > _MOST_ROWS:
        raise DataError(f"{path}: has more than {_MOST_ROWS} rows; use a part of them")
    if cells != wanted:
        raise DataError(
            f"{path}: row {number + 1} has {cells} cells and the header {wanted}; correct the row"
        )


UNKNOWN = 0
DATE_PARTS = ("year", "month", "day", "week", "weekday")
_LARGEST = 1e30

Floats = NDArray[np.float64]


def numbers(table: Table, name: str, missing: bool) -> Floats:
    """Return a column as float64 [rows], with nan for empty cells if they may be `missing`."""

    def number(word: str) -> float:
        if not word and missing:
            return math.nan
        value = float(word.replace("_", "?"))  # float() takes 1_000, unlike a spreadsheet.
        if not abs(value) <= _LARGEST:
            raise ValueError
        return value

    way_out = "correct the cell, or give dataset.fill_missing=true if it is empty"
    return np.array(_convert(table, name, number, "a finite number up to 1e30", way_out))


def dates(table: Table, name: str) -> NDArray[np.int64]:
    """Return a column of dates like 2015-07-31 as days since the year 1, [rows] int64."""

    def day(word: str) -> float:
        return datetime.date.fromisoformat(word).toordinal()

    days = _convert(table, name, day, "a date as in 2015-07-31", "correct the cell")
    return np.array(days, dtype=np.int64)


def date_parts(table: Table, name: str) -> Columns:
    """Return the columns NAME.year, .month, .day, .week (of ISO) and .weekday (Monday is 1)."""
    words, parts = table.columns[name], dict[str, tuple[int, ...]]()
    for word in set(words):
        date = datetime.date.fromisoformat(word)
        parts[word] = date.year, date.month, date.day, *date.isocalendar()[1:]
    return {
        f"{name}.{part}": [str(parts[word][place]) for word in words]
        for place, part in enumerate(DATE_PARTS)
    }


def categories(words: list[str], training: Tensor) -> tuple[Tensor, list[str]]:
    """Number the words [rows] of a column: [rows] int64, and the words in the order of the numbers.

    The words of the training rows, including the empty one, are numbered from 1 on in their order.
    Any other word is 0, `UNKNOWN`.
    """
    known = sorted({words[row] for row in training.tolist()})
    places = {word: place for place, word in enumerate(known, start=1)}
    return torch.tensor([places.get(word, UNKNOWN) for word in words]), known


def standardize(values: Floats, training: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Return (value - mean) / std, float32 [rows], and the median, mean and std.

    These come from the training rows. nan becomes the median, and a constant column has std 1.
    """
    median = float(np.nanmedian(values[training.numpy()]))
    filled = np.where(np.isnan(values), median, values)
    chosen = filled[training.numpy()]
    mean, std = float(chosen.mean()), float(chosen.std()) or 1.0
    scaled = torch.from_numpy((filled - mean) / std).float()
    return scaled, {"median": median, "mean": mean, "std": std}


def _convert(
    table: Table, name: str, convert: Callable[[str], float], what: str, way_out: str
) -> list[float]:
    """Convert the words of a column, equal ones once."""
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


def join_rows(table: Table, second: Table, by: str) -> Table:
    """Give each row the columns of the second table's row with the same word in column `by`."""
    places = _find_rows(second, by)
    for row, word in enumerate(table.columns[by]):
        if word not in places:
            raise DataError(
                f"{table.place(by, row)}: {word[:80]!r} is in no row of {second.path}; add it there"
            )
    rows = [places[word] for word in table.columns[by]]
    others = {name: [column[row] for row in rows] for name, column in second.columns.items()}
    return Table(table.path, others | table.columns)


def _find_rows(second: Table, by: str) -> dict[str, int]:
    if by not in second.columns:
        hint = _hint(by, second.columns)
        raise DataError(f"{second.path}: has no column {by} ({hint}); correct dataset.join.by")
    places: dict[str, int] = {}
    for row, word in enumerate(second.columns[by]):
        if places.setdefault(word, row) != row:
            raise DataError(
                f"{second.place(by, row)}: {word[:80]!r} is there twice; remove one of the rows"
            )
    return places


_FEWEST_ROWS = 20


def split_rows(name: str, when: NDArray[np.int64]) -> list[Tensor]:
    """Return the rows of each part, training, validation and test, [n] int64, without a seed.

    `name` is `hold_out`, for rows at random places, or `time`, for the last ones by `when` [rows]
    int64, with all rows of one time in one part.
    """
    splits = {"hold_out": _split_at_random, "time": _split_by_time}
    if name not in splits:
        hint = nearest(str(name), splits, before="; ")
        raise ConfigError(f"dataset.split={name}: allowed are hold_out, time{hint}")
    parts = splits[name](torch.from_numpy(when)) if len(when) >= _FEWEST_ROWS else []
    if not parts or not all(map(len, parts)):
        raise DataError(
            f"dataset: {len(when)} rows of {len(np.unique(when))} times make no training, "
            f"validation and test part; give at least {_FEWEST_ROWS} rows"
        )
    return parts


def _split_at_random(when: Tensor) -> list[Tensor]:
    return hold_out(torch.zeros_like(when), one_in=5, parts=2)


def _split_by_time(when: Tensor) -> list[Tensor]:
    ordered, rows = when.sort(stable=True)
    tenths = ordered[[len(ordered) * 8 // 10, len(ordered) * 9 // 10]]
    first, second = torch.searchsorted(ordered, tenths).tolist()
    return [rows[:first], rows[first:second], rows[second:]]


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
    missing or damaged, or a cell does not fit its column.
    """
    table = _read(_locate(root, file), [*categorical, *continuous, target], date, join)
    targets = numbers(table, target, missing=False).astype(np.float32)
    rows = _rows_with_target(table, target, targets, drop_zeros)
    when = np.arange(table.rows) if date is None else dates(table, date)
    parts = [rows[part] for part in split_rows(split, when[rows.numpy()])]
    numbered, words = _number(table, categorical, parts[0])
    scaled, statistics = _scale(table, continuous, parts[0], fill_missing)
    data = {"categorical": numbered, "continuous": scaled, "target": torch.from_numpy(targets)}
    logs = np.log(targets[parts[0].numpy()], dtype=np.float64)
    objective = LogRegression(float(logs.mean()), float(logs.std()) or 1.0)
    train, val, test = (_Rows(_select(data, part)) for part in parts)
    preprocessing = {
        "categorical": words,
        "continuous": statistics,
        "target": {"log_mean": objective.mean, "log_std": objective.std},
    }
    metrics = {"rmspe": RMSPE, "rmse": RMSE}
    return Task(train, val, objective, metrics, test=test, preprocessing=preprocessing)


@dataclass(frozen=True)
class _Rows(Dataset[dict[str, Tensor]]):
    """Rows in memory, one of each tensor for a sample."""

    columns: dict[str, Tensor]

    def fetch_batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        return _select(self.columns, torch.as_tensor(indices, dtype=torch.int64))

    def __len__(self) -> int:
        return len(self.columns["target"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


def _select(columns: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    return {name: column.index_select(0, rows) for name, column in columns.items()}


def _locate(root: str, file: str) -> Path:
    for path in (Path(root), Path(root) / file):
        if path.is_file():
            return path
    raise DataError(
        f"dataset.root={root}: no {file} there; set dataset.root to its folder or to the file"
    )


def _read(
    path: Path, columns: list[str], date: str | None, join: Mapping[str, str] | None
) -> Table:
    """Read the wanted columns, also from the parts of the date and from a second table."""
    if join is not None and set(join) != {"file", "by"}:
        raise ConfigError(f"dataset.join={dict(join)}: needs file and by, and nothing else")
    second = None if join is None else read_csv(path.parent / join["file"])
    elsewhere = {f"{date}.{part}" for part in DATE_PARTS} if date else set()
    elsewhere |= set(second.columns) if second else set()
    here = [name for name in columns if name not in elsewhere]
    here += [date] if date else []
    here += [join["by"]] if join else []
    table = read_csv(path, here)
    if date is not None:
        dates(table, date)  # Refuses what is no date, by its row.
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
    """Return the categories of all rows, [rows, columns] int64, and their words by column."""
    found = {name: categories(table.columns[name], training) for name in categorical}
    for name, (_, words) in found.items():
        facts = {f"categorical.{name}": (categorical[name], len(words))}
        require_facts(f"the training part of {table.path}", **facts)
    numbered = _stack([numbers for numbers, _ in found.values()], table.rows, torch.int64)
    return numbered, {name: words for name, (_, words) in found.items()}


def _scale(
    table: Table, continuous: Sequence[str], training: Tensor, fill_missing: bool
) -> tuple[Tensor, dict[str, dict[str, float]]]:
    """Return the continuous values, [rows, columns] float32, and what scaled each column."""
    found = {}
    for name in continuous:
        values = numbers(table, name, missing=fill_missing)
        if np.isnan(values[training.numpy()]).all():
            raise DataError(
                f"{table.path}: column {name} is empty in all training rows; leave it out"
            )
        found[name] = standardize(values, training)
    scaled = _stack([values for values, _ in found.values()], table.rows, torch.float32)
    return scaled, {name: statistics for name, (_, statistics) in found.items()}


def _stack(columns: list[Tensor], rows: int, dtype: torch.dtype) -> Tensor:
    return torch.stack(columns, dim=1) if columns else torch.empty(rows, 0, dtype=dtype)
