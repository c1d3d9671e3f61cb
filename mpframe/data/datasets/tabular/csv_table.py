"""Any CSV file with a positive number to predict: hourly bike rentals, daily sales, prices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from mpframe.data.datasets.tabular.cells import (
    DATE_PARTS,
    categories,
    date_parts,
    dates,
    numbers,
    standardized,
)
from mpframe.data.datasets.tabular.csv_file import Table, read_csv
from mpframe.data.datasets.tabular.joining import joined
from mpframe.data.datasets.tabular.splits import split_rows
from mpframe.data.facts import require_facts
from mpframe.data.metrics.rmse import RMSE
from mpframe.data.metrics.rmspe import RMSPE
from mpframe.data.task import Task
from mpframe.errors import ConfigError, DataError
from mpframe.objectives.log_regression import LogRegression


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
    """The rows of a table; what is learned is the target's logarithm, by `LogRegression`.

    A sample is a dict: `categorical` [columns] int64, where 0 is a category that no training row
    has; `continuous` [columns] float32, with mean 0 and standard deviation 1 over the training
    rows; `target`, float32, in its own unit. The metrics are `RMSPE` and `RMSE`.

    Args:
        root: the folder of the file, or the file itself.
        file: its name in that folder.
        categorical: columns and how many categories the training rows have in each.
        continuous: columns of numbers.
        target: the column to predict, > 0.
        split: `hold_out`: one row in ten validates and one in ten tests, always the same ones;
            `time`: the last tenth of the rows tests and the tenth before it validates.
        date: a column as 2015-07-31, which gives the time and the columns DATE.year, .month,
            .day, .week and .weekday; None: the rows are in the order of time.
        join: `file`, a second table in that folder, and `by`, the column that both have; each row
            gets the columns of the second table's row with the same word there.
        fill_missing: an empty cell of a continuous column gets the training rows' median.
        drop_zeros: leave out rows whose target is 0, which has no logarithm.

    Raises:
        ConfigError: an option is out of its range or does not fit the file.
        DataError: a file is missing or damaged, or a cell is not what its column should have.
    """
    table = _read(_located(root, file), [*categorical, *continuous, target], date, join)
    targets = numbers(table, target, missing=False).astype(np.float32)
    rows = _with_target(table, target, targets, drop_zeros)
    when = np.arange(len(table)) if date is None else dates(table, date)
    parts = [rows[part] for part in split_rows(split, when[rows.numpy()])]
    numbered, words = _numbered(table, categorical, parts[0])
    scaled, statistics = _scaled(table, continuous, parts[0], fill_missing)
    data = {
        "categorical": numbered,
        "continuous": scaled,
        "target": torch.from_numpy(targets),
    }
    logs = np.log(targets[parts[0].numpy()], dtype=np.float64)
    objective = LogRegression(float(logs.mean()), float(logs.std()) or 1.0)
    train, val, test = (_Rows(_select(data, part)) for part in parts)
    return Task(
        train,
        val,
        objective,
        {"rmspe": RMSPE, "rmse": RMSE},
        test=test,
        preprocessing={
            "categorical": words,
            "continuous": statistics,
            "target": {"log_mean": objective.mean, "log_std": objective.std},
        },
    )


@dataclass(frozen=True)
class _Rows(Dataset[dict[str, Tensor]]):
    """Rows in memory; each tensor has one for each sample."""

    columns: dict[str, Tensor]

    def fetch_batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        return _select(self.columns, torch.as_tensor(indices, dtype=torch.int64))

    def __len__(self) -> int:
        return len(self.columns["target"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


def _select(columns: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    return {name: column.index_select(0, rows) for name, column in columns.items()}


def _located(root: str, file: str) -> Path:
    for path in (Path(root), Path(root) / file):
        if path.is_file():
            return path
    raise DataError(
        f"dataset.root={root}: no {file} there; set dataset.root to its folder or to the file"
    )


def _read(
    path: Path, columns: list[str], date: str | None, join: Mapping[str, str] | None
) -> Table:
    """The table with the columns that are wanted, those of its date and of the second table too."""
    if join is not None and set(join) != {"file", "by"}:
        raise ConfigError(f"dataset.join={dict(join)}: needs file and by, and nothing else")
    second = None if join is None else read_csv(path.parent / join["file"])
    elsewhere = {f"{date}.{part}" for part in DATE_PARTS} if date else set()
    elsewhere |= set(second.columns) if second else set()
    own = [name for name in columns if name not in elsewhere]
    own += [date] if date else []
    own += [join["by"]] if join else []
    table = read_csv(path, own)
    if date is not None:
        dates(table, date)  # Refuses what is no date, by its row.
        table = Table(path, table.columns | date_parts(table, date))
    return joined(table, second, join["by"]) if second and join else table


def _with_target(table: Table, name: str, targets: NDArray[np.float32], drop_zeros: bool) -> Tensor:
    """The rows whose target has a logarithm, [n] int64."""
    bad = np.flatnonzero(targets < 0 if drop_zeros else targets <= 0)
    if len(bad):
        raise DataError(
            f"{table.place(name, int(bad[0]))}: {targets[bad[0]]:g} has no logarithm; the target "
            "must be above 0 (dataset.drop_zeros=true leaves out rows of 0)"
        )
    return torch.from_numpy(np.flatnonzero(targets > 0))


def _numbered(
    table: Table, categorical: Mapping[str, int], training: Tensor
) -> tuple[Tensor, dict[str, list[str]]]:
    """The categories of all rows, [rows, columns] int64, and their words by column."""
    found = {name: categories(table.columns[name], training) for name in categorical}
    for name, (_, words) in found.items():
        facts = {f"categorical.{name}": (categorical[name], len(words))}
        require_facts(f"the training part of {table.path}", **facts)
    return (
        _stacked([numbers for numbers, _ in found.values()], len(table), torch.int64),
        {name: words for name, (_, words) in found.items()},
    )


def _scaled(
    table: Table, continuous: Sequence[str], training: Tensor, fill_missing: bool
) -> tuple[Tensor, dict[str, dict[str, float]]]:
    """The continuous values of all rows, [rows, columns] float32, and what scaled each column."""
    columns = {name: numbers(table, name, missing=fill_missing) for name in continuous}
    for name, values in columns.items():
        if np.isnan(values[training.numpy()]).all():
            raise DataError(
                f"{table.path}: column {name} is empty in all training rows; leave it out"
            )
    scaled = {name: standardized(values, training) for name, values in columns.items()}
    return (
        _stacked([values for values, _ in scaled.values()], len(table), torch.float32),
        {name: statistics for name, (_, statistics) in scaled.items()},
    )


def _stacked(columns: list[Tensor], rows: int, dtype: torch.dtype) -> Tensor:
    return torch.stack(columns, dim=1) if columns else torch.empty(rows, 0, dtype=dtype)
