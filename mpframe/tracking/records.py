"""Files of a run's folder that grow line by line: its numbers, and each step's largest gradient.

`log2_amax.txt` holds one line per step tried: log2 of the largest |unscaled gradient|, `inf` if
the step overflowed, `nan` if a gradient was nan, `-inf` if all were zero. It costs about ten
bytes a step. With it, any loss scaler can be tried on the run afterwards (simulate.py).

`metrics.csv` has one row for a step, one for the test:

    step,epoch,train_loss,...,val_loss,val_accuracy
    10,0,2.1840832,...,,
    22,1,1.7345678,...,1.7234567,0.61388888

The columns are the first start's, followed by any that a later start added.
"""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mpframe.core.errors import DataError
from mpframe.files.durable import append_whole, write_atomically
from mpframe.files.plain_file import open_regular

AMAX_FILE = "log2_amax.txt"


def read_lines(path: Path) -> list[bytes]:
    """Return the whole lines of an older record, whatever they hold, if there is one."""
    try:
        with open_regular(path, "rb") as file:
            # A kill may have cut the last line.
            return [line for line in file.readlines() if line.endswith(b"\n")]
    except FileNotFoundError:
        return []


def read_amax(path: Path) -> npt.NDArray[np.float64]:
    """Read the amax of every step, [steps] float64, >= 0, inf or nan if the step overflowed.

    `path` is a run's folder, or any file with one log2 value per line.
    """
    file = path / AMAX_FILE if path.is_dir() else path
    try:
        with open_regular(file, "rb", follow=True) as opened:
            lines = opened.read().split()
        values = np.asarray([float(line) for line in lines])
    except OSError as error:
        hint = "name a run's folder, or a file with log2(amax) per line"
        raise DataError(f"{file}: {error.strerror}; {hint}") from None
    except ValueError as error:
        raise DataError(f"{file}: {error}; allowed is one number log2(amax) per line") from None
    if values.size == 0:
        raise DataError(f"{file}: no steps recorded; train the run first")
    amax: npt.NDArray[np.float64] = np.exp2(values)
    return amax


CSV_FILE = "metrics.csv"
_STEP = re.compile(r"\d{1,18}")  # A stranger's file may have more than `int` reads.


class MetricsCsv:
    """A table in a run's folder that grows, its first column `step`.

    Rows of an older table stay if their step is below `before`.
    """

    def __init__(
        self, folder: Path, columns: Sequence[str], before: int = 0, name: str = CSV_FILE
    ) -> None:
        self._path = folder / name
        older, rows = _read(self._path) if before else ([], [])
        self._columns = list(dict.fromkeys([*older, *columns]))
        kept = [row for row in rows if int(row["step"]) < before]
        head = {name: name for name in self._columns}
        write_atomically(self._path, self._lines([head, *kept]))

    def add(self, *rows: Mapping[str, float | int | str]) -> None:
        append_whole(self._path, self._lines(rows).encode())

    def _lines(self, rows: Iterable[Mapping[str, object]]) -> str:
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        for row in rows:
            values = [row.get(name, "") for name in self._columns]  # 9 digits tell a float32.
            table.writerow([f"{v:.9g}" if isinstance(v, float) else v for v in values])
        return text.getvalue()


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    text = b"".join(read_lines(path)).decode("utf-8", "replace")
    reader = csv.DictReader(io.StringIO(text), restkey="", restval="")
    try:
        rows = [row for row in reader if _STEP.fullmatch(str(row.get("step", "")))]
    except csv.Error:  # Anything may lie there.
        return [], []
    return list(reader.fieldnames or []) if rows else [], rows
