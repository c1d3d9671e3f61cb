"""Reads columns of a CSV file, which is untrusted: every size is checked before it is used."""

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO

from mpframe.errors import DataError, nearest
from mpframe.files.plain_file import open_regular

_MOST_ROWS = 2**25
_LONGEST_LINE = 2**20  # characters

Columns = dict[str, list[str]]


@dataclass(frozen=True)
class Table:
    """Columns of words, all of one length.

    Attributes:
        path: the file, for messages.
        columns: by name, the cells without the spaces around them.
    """

    path: Path
    columns: Columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def place(self, name: str, row: int) -> str:
        """Words for the cell of data row `row`, counted from 0, in column `name`."""
        return f"{self.path}: row {row + 2}, column {name}"


def read_csv(path: Path, wanted: Iterable[str] | None = None) -> Table:
    """Read the columns that are wanted.

    Args:
        path: UTF-8 text, comma-separated, the names of the columns in the first line. At most 2^25
            rows, and 2^20 characters in a line.
        wanted: names; the others are skipped. None: all.

    Raises:
        DataError: the file cannot be read, a column is missing or there twice, or a row has more or
            fewer cells than the header.
    """
    rows = 0
    try:
        with open_regular(path, "r", encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(_lines(path, file), strict=True)
            header = [name.strip() for name in next(reader, [])]
            names = list(dict.fromkeys(header if wanted is None else wanted))
            places = _places(path, header, names)
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


def _lines(path: Path, file: IO[str]) -> Iterator[str]:
    while line := file.readline(_LONGEST_LINE + 1):
        if len(line) > _LONGEST_LINE:
            raise DataError(f"{path}: has a line above {_LONGEST_LINE} characters; is it a CSV?")
        yield line


def _places(path: Path, header: list[str], wanted: Sequence[str]) -> dict[str, int]:
    for name in wanted:
        count = header.count(name)
        if count != 1:
            hint = nearest(name, header) or f"it has {', '.join(header)[:200]}"
            what = f"no column {name} ({hint})" if count == 0 else f"{count} columns {name}"
            raise DataError(f"{path}: has {what}; name the columns of the file's first line")
    return {name: header.index(name) for name in wanted}


def _require_row(path: Path, number: int, cells: int, wanted: int) -> None:
    if number > _MOST_ROWS:
        raise DataError(f"{path}: has more than {_MOST_ROWS} rows; use a part of them")
    if cells != wanted:
        raise DataError(
            f"{path}: row {number + 1} has {cells} cells and the header {wanted}; correct the row"
        )
