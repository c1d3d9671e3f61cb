"""The report's tables as Markdown; text from runs can neither end a cell nor start markup."""

import re
from collections.abc import Sequence

from mpframe.report.groups import RunGroup
from mpframe.report.records import Record
from mpframe.report.tables import (
    COST_NOTES,
    NOTES,
    RECIPE_NOTES,
    Table,
    costs,
    every_run,
    recipes,
    results,
    unfinished,
)
from mpframe.table import markdown

_MARKUP = re.compile(r"([\\`*_{}\[\]<>#~!&])")


def as_markdown(title: str, groups: Sequence[RunGroup], records: Sequence[Record]) -> str:
    """The tables, and the names of the range pictures.

    Args:
        title: of the report.
        groups: the rows of the result table.
        records: every run.
    """
    stopped, narrow = unfinished(groups), recipes(groups)
    pictures = [f"{record.name}: {name}" for record in records for name, _ in record.pictures]
    parts = [
        f"# {_escaped(title)}",
        _table(results(groups)),
        *NOTES,
        *(["## Products below 16 bits", _table(narrow), *RECIPE_NOTES] if narrow else []),
        "## Speed and memory",
        _table(costs(groups)),
        *COST_NOTES,
        *(["## Not finished", _table(stopped)] if stopped else []),
        "## Every run",
        _table(every_run(groups)),
        "The curves" + (" and range pictures" if pictures else "") + " are in report.html.",
        *(["\n".join(f"- {_escaped(text)}" for text in pictures)] if pictures else []),
    ]
    return "\n\n".join(parts) + "\n"


def _table(table: Table) -> str:
    return markdown([[_in_one_line(cell) for cell in row] for row in table])


def _in_one_line(cell: str) -> str:
    first, *others = cell.split("\n")
    return _escaped(f"{first} ({'; '.join(others)})" if others else first)


def _escaped(text: str) -> str:
    return _MARKUP.sub(r"\\\1", " ".join(text.split()))
