"""A run's numbers as a table: `metrics.csv` in its folder, one row for a step, one for the test.

    step,epoch,train_loss,...,val_loss,val_accuracy
    10,0,2.1840832,...,,
    22,1,1.7345678,...,1.7234567,0.61388888

The columns are the first start's, followed by any that a later start added.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpframe.files.durable import AppendLog, write_atomically
from mpframe.files.plain_file import open_regular

FILE_NAME = "metrics.csv"
Row = Mapping[str, float | int | str]


class MetricsCsv:
    """A table in a run's folder that grows, its first column `step`.

    Rows of an older table stay if their step is below `before`. If the disk is full, `on_error` is
    `stop`, or `warn` to write what waits once there is room.
    """

    def __init__(
        self,
        folder: Path,
        columns: Sequence[str],
        before: int = 0,
        on_error: str = "stop",
        name: str = FILE_NAME,
    ) -> None:
        path = folder / name
        older, rows = _read(path) if before else ([], [])
        self._columns = list(dict.fromkeys([*older, *columns]))
        kept = [row for row in rows if int(row["step"]) < before]
        lines = [_line(self._columns), *(self._cells(row) for row in kept)]
        write_atomically(path, "".join(lines))
        self._log = AppendLog(path, on_error)

    def add(self, *rows: Row) -> None:
        self._log.append("".join(map(self._cells, rows)).encode())

    def _cells(self, row: Row) -> str:
        return _line([_text(row.get(name, "")) for name in self._columns])


def _line(cells: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _text(value: float | int | str) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)  # 9 digits tell a float32.


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Read the columns and rows of an older table, if there is one."""
    try:
        with open_regular(path, "r", encoding="utf-8", errors="replace") as file:
            text = file.read()
    except FileNotFoundError:
        return [], []
    whole = text[: text.rfind("\n") + 1]  # A kill may have cut the last line.
    reader = csv.DictReader(io.StringIO(whole), restkey="", restval="")
    try:
        rows = [row for row in reader if str(row.get("step", "")).isdecimal()]
    except csv.Error:  # Anything may lie there.
        return [], []
    return list(reader.fieldnames or []) if rows else [], rows
