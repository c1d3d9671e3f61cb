"""Print the page of all options: types, defaults, ranges, meanings.

Usage: mpframe options [out=FILE.md]

    mpframe options
    mpframe options out=options.md

Options:
    out=FILE.md     default: the page is printed
"""

import dataclasses
from pathlib import Path
from typing import Any

from mpframe.cli.program import command, refuse_words, take_own
from mpframe.config.check import as_typed
from mpframe.config.schema import SECTIONS, GroupOptions, JointOptions, RunOptions
from mpframe.core.ranges import Range
from mpframe.files.durable import refuse_unwritable, write_atomically
from mpframe.files.text import markdown, say

_HEAD = """# Options

Written from `mpframe/config/schema.py` by `python scripts/options.py`; a test keeps it current.
`GROUP=CHOICE` picks a file of `conf/GROUP/`, `option=value` sets one value. Open sections (`model`,
`dataset`, `loss_scaling`, `optimizer`, `scheduler`) also take every argument of their `_target_`;
[loss scaling](loss_scaling.md) has the arguments of the scalers.
"""
_COLUMNS = ("option", "type", "default", "allowed", "meaning")


def options_page() -> str:
    sections: list[tuple[str, type]] = [("", RunOptions), *SECTIONS.items()]
    sections += [("optimizer", JointOptions), ("optimizer.groups.NAME", GroupOptions)]
    return "\n".join([_HEAD, *(_table(path, section) for path, section in sections)])


def _table(path: str, section: Any) -> str:
    title = " ".join(str(section.__doc__).split())
    rows = [_row(path, f, getattr(section(), f.name)) for f in dataclasses.fields(section)]
    return "\n".join([f"## {title}", "", markdown([_COLUMNS, *rows]), ""])


def _row(path: str, field: Any, default: Any) -> list[str]:
    limits: Range = field.metadata["range"]
    kind = getattr(field.type, "__name__", str(field.type))
    unit = f" ({field.metadata['unit']})" if field.metadata["unit"] else ""
    name = f"{path}.{field.name}" if path else field.name
    cells = [f"`{name}`", f"{kind}{unit}", f"`{as_typed(default)}`", str(limits)]
    return [cell.replace("|", "or") for cell in [*cells, field.metadata["sentence"]]]


@command
def main(arguments: list[str]) -> None:
    options, rest = take_own(arguments, ["out"])
    refuse_words(rest, ["out"])
    if not options.get("out"):
        say(options_page(), end="")
        return
    out = Path(options["out"])
    refuse_unwritable("out", out.parent)
    write_atomically(out, options_page())
