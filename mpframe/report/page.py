"""The report as one HTML file: no scripts, no addresses, all pictures inside.

Text from runs goes through `escape`; a content security policy forbids the page to load anything,
in case that ever fails.
"""

import base64
from collections.abc import Iterable, Sequence
from html import escape
from itertools import accumulate

from mpframe.report.curves import draw
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

_CAPTION = "One line for each run and each of several losses. A cross: the run did not finish."
_TEXT_COLUMNS = {"run", "precision, scaling", "status", "reason"}
_MOST_PICTURES = 900_000  # bytes of range pictures in one page; as base64 they are a third larger
_STYLE = """
:root { color-scheme: light dark; --text: #1c2430; --quiet: #5b6675; --back: #fff; --line: #e3e7ed;
  --head: #c5ccd6; --hover: #f5f7fa; }
@media (prefers-color-scheme: dark) { :root { --text: #dfe5ec; --quiet: #9aa6b4; --back: #14181e;
  --line: #2b323b; --head: #48525e; --hover: #1c222a; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--text); background: var(--back);
  margin: 2rem auto; max-width: 1100px; padding: 0 1.25rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p { max-width: 75ch; } .quiet { color: var(--quiet); font-size: .88rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .84rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .5rem; text-align: right; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { color: var(--quiet); font-weight: 600; border-bottom: 2px solid var(--head);
  vertical-align: bottom; }
td { white-space: nowrap; } td .quiet { font-size: .77rem; }
.text { text-align: left; } td.text { white-space: normal; overflow-wrap: anywhere;
  min-width: 6rem; }
tbody tr:hover { background: var(--hover); }
img { max-width: 100%; height: auto; } img.full { width: 100%; } figure { margin: 1rem 0 1.6rem; }
details figure { display: inline-block; width: 49%; margin: 0 0 1rem; vertical-align: top; }
summary { cursor: pointer; margin: .5rem 0; }
figcaption { color: var(--quiet); font-size: .88rem; overflow-wrap: anywhere; }
"""


def as_page(title: str, groups: Sequence[RunGroup], records: Sequence[Record]) -> str:
    """The page.

    Args:
        title: of the report.
        groups: the rows of the result table, and the curves.
        records: every run.
    """
    stopped, narrow = unfinished(groups), recipes(groups)
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p class=quiet>{escape(_counted(groups, records))}</p>",
        "<h2>Results</h2>",
        _table(results(groups)),
        *_quiet(NOTES),
        *(_narrow(narrow) if narrow else []),
        *(["<h2>Not finished</h2>", _table(stopped)] if stopped else []),
        "<h2>Speed and memory</h2>",
        _table(costs(groups)),
        *_quiet(COST_NOTES),
        "<h2>Curves</h2>",
        _figure("svg+xml", draw(groups), _CAPTION),
        *_range_pictures(records),
        "<h2>Every run</h2>",
        _table(every_run(groups)),
    ]
    return _HEAD.format(title=escape(title), style=_STYLE) + "\n".join(parts) + "\n</body></html>\n"


_HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>{title}</title><style>{style}</style></head><body>
"""


def _narrow(table: Table) -> list[str]:
    return ["<h2>Products below 16 bits</h2>", _table(table), *_quiet(RECIPE_NOTES)]


def _counted(groups: Sequence[RunGroup], records: Sequence[Record]) -> str:
    finished = sum(record.finished for record in records)
    versions = sorted({record.summary.torch for record in records if record.summary})
    devices = sorted({record.summary.device for record in records if record.summary})
    said = [f"{finished} of {len(records)} runs finished, in {len(groups)} groups"]
    said += [f"torch {', '.join(versions)}"] if versions else []
    return "; ".join([*said, *([f"on {', '.join(devices)}"] if devices else [])])


def _quiet(notes: Iterable[str]) -> list[str]:
    return [f"<p class=quiet>{escape(note)}</p>" for note in notes]


def _table(table: Table) -> str:
    head, *rows = table
    cells = "".join(f"<th{_kind(name)}>{escape(name)}</th>" for name in head)
    body = "\n".join(f"<tr>{_cells(head, row)}</tr>" for row in rows)
    heading = f"<thead><tr>{cells}</tr></thead>"
    return f"<div class=wide><table>{heading}\n<tbody>{body}</tbody></table></div>"


def _cells(head: Iterable[str], row: Iterable[str]) -> str:
    return "".join(
        f"<td{_kind(name)}>{_lines(cell)}</td>" for name, cell in zip(head, row, strict=True)
    )


def _lines(cell: str) -> str:
    first, _, second = escape(cell).partition("\n")
    quiet = second.replace("\n", "<br>")
    return f"{first}<br><span class=quiet>{quiet}</span>" if quiet else first


def _kind(name: str) -> str:
    return " class=text" if name in _TEXT_COLUMNS else ""


def _range_pictures(records: Sequence[Record]) -> list[str]:
    """The pictures of each run while the page has room; those of the first run are unfolded."""
    shown: list[str] = []
    room = _MOST_PICTURES
    for run in records:
        sizes = list(accumulate(len(png) for _, png in run.pictures))
        fitting = sum(size <= room for size in sizes)
        room -= sum(len(png) for _, png in run.pictures[:fitting])
        if run.pictures:
            title = f"{escape(run.name)}, {escape(run.mode)}: {len(run.pictures)} pictures"
            unfolded = "" if shown else " open"
            pictures = _of_run(run, fitting)
            shown.append(f"<details{unfolded}><summary>{title}</summary>{pictures}</details>")
    return ["<h2>Ranges</h2>", *shown] if shown else []


def _of_run(run: Record, fitting: int) -> str:
    figures = [_figure("png", png, f"{run.name}: {name}") for name, png in run.pictures[:fitting]]
    names = ", ".join(escape(name) for name, _ in run.pictures[fitting:])
    folder = f"{escape(run.name)}/numerics"
    left = f"<p class=quiet>Too large for this page, in {folder}: {names}</p>" if names else ""
    return "".join(figures) + left


def _figure(kind: str, content: bytes, caption: str) -> str:
    encoded = base64.b64encode(content).decode()
    text = escape(caption)
    size = " class=full" if kind == "svg+xml" else ""  # such a picture may be enlarged
    return (
        f'<figure><img{size} alt="{text}" src="data:image/{kind};base64,{encoded}">'
        f"<figcaption>{text}</figcaption></figure>"
    )
