"""Writes a table some rows at a time as CSV. The file appears whole or not at all."""

import csv
import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mpframe.core.errors import ConfigError
from mpframe.files.durable import atomic_file

Column = list[str] | np.ndarray[Any, np.dtype[Any]]
Rows = Mapping[str, Column]
"""Columns of one length by name, with the same names each time."""


def refuse_unwritable_kind(option: str, path: Path) -> None:
    """Refuse a file that is no CSV, before any work is done."""
    if path.suffix != ".csv":
        raise ConfigError(
            f"{option}={path}: must end in .csv; for Parquet convert that file, for example with "
            "pandas"
        )


@contextmanager
def writing(path: Path) -> Iterator[Callable[[Rows], None]]:
    """Context manager with a function that appends rows; the file appears at its end.

    Numbers read back as the same ones. After an OSError an older file is unchanged.
    """
    with atomic_file(path) as file:
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
