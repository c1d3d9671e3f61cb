"""Writes a table some rows at a time as CSV or Parquet. The file appears whole or not at all."""

import csv
import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import numpy as np

from mpframe.core.errors import ConfigError
from mpframe.files.durable import atomic_file

SUFFIXES = (".csv", ".parquet")

Column = list[str] | np.ndarray[Any, np.dtype[Any]]
Rows = Mapping[str, Column]
"""Columns of one length by name, with the same names and kinds each time."""


def refuse_unwritable_kind(option: str, path: Path) -> None:
    """Refuse a file that is no table, or needs a package, before any work is done."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{option}={path}: must end in {' or '.join(SUFFIXES)}")
    if path.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise ConfigError(
            f"{option}={path}: Parquet needs pyarrow; pip install pyarrow, or use "
            f"{option}={path.with_suffix('.csv')}"
        )


@contextmanager
def writing(path: Path) -> Iterator[Callable[[Rows], None]]:
    """Context manager with a function that appends rows; the file appears at its end.

    Numbers read back as the same ones. After an OSError an older file is unchanged.
    """
    with atomic_file(path) as file:
        kind = _parquet if path.suffix == ".parquet" else _csv
        with kind(file) as write:
            yield write


@contextmanager
def _csv(file: IO[bytes]) -> Iterator[Callable[[Rows], None]]:
    text = io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
    writer = csv.writer(text, lineterminator="\n")
    names: list[str] = []

    def write(rows: Rows) -> None:
        if not names:
            names.extend(rows)
            writer.writerow(names)
        # The shortest text that reads back as the same float32.
        texts = ([str(value) for value in column] for column in rows.values())
        writer.writerows(zip(*texts, strict=True))

    yield write
    text.detach()


@contextmanager
def _parquet(file: IO[bytes]) -> Iterator[Callable[[Rows], None]]:
    import pyarrow
    from pyarrow import parquet

    opened: list[Any] = []

    def write(rows: Rows) -> None:
        table = pyarrow.table(dict(rows))
        if not opened:
            opened.append(parquet.ParquetWriter(file, table.schema))
        opened[0].write_table(table)

    try:
        yield write
    finally:
        for writer in opened:
            writer.close()
