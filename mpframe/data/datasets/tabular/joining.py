"""Joins a second table to the first: what SQL calls a left join, with no row left over."""

from mpframe.data.datasets.tabular.csv_file import Table
from mpframe.errors import DataError, nearest


def joined(table: Table, second: Table, by: str) -> Table:
    """Give each row the columns of the second table's row with the same word in column `by`.

    Args:
        table: has the column `by`.
        second: its words in that column are all different.
        by: a column of both.

    Raises:
        DataError: the second table has no such column, has a word twice, or lacks one.
    """
    places = _places(second, by)
    for row, word in enumerate(table.columns[by]):
        if word not in places:
            raise DataError(
                f"{table.place(by, row)}: {word[:80]!r} is in no row of {second.path}; add it there"
            )
    rows = [places[word] for word in table.columns[by]]
    others = {
        name: [column[row] for row in rows] for name, column in second.columns.items() if name != by
    }
    return Table(table.path, others | table.columns)


def _places(second: Table, by: str) -> dict[str, int]:
    if by not in second.columns:
        hint = nearest(by, second.columns) or f"it has {', '.join(second.columns)[:200]}"
        raise DataError(f"{second.path}: has no column {by} ({hint}); correct dataset.join.by")
    places: dict[str, int] = {}
    for row, word in enumerate(second.columns[by]):
        if places.setdefault(word, row) != row:
            raise DataError(
                f"{second.place(by, row)}: {word[:80]!r} is there twice; remove one of the rows"
            )
    return places
