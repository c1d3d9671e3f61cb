"""The report as one HTML file that loads nothing, with its curves.

Text from runs goes through `escape`. A content security policy forbids the page to load anything,
in case that ever fails.

The curves are one picture: losses, every metric, loss scale, skipped steps. Each group has one
colour and one dash pattern, because the lines of two modes often coincide. There is a line for each
run.
"""

import base64
import io
import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from mpframe.lab.report.records import Curve, Record
from mpframe.lab.report.tables import RunGroup, Section, sections
from mpframe.tracking.tags import Tag, metric_tag

_METRIC = re.compile(metric_tag("(.+)"))
# Only one line is solid, and it stays visible below the others.
_DASHES = ("-", (0, (6, 3)), (3, (2, 3)), (0, (7, 2, 1, 2)), (0, (3, 5)), (2, (1, 2)), (0, (9, 5)))
_MOST_METRICS = 12  # the first by name
_MOST_POINTS = 300  # a panel is about 400 pixels wide
_LONG_LABEL = 55  # letters from which on the legend has one column
_FEW_POINTS = 40  # points up to which each is marked


def draw(groups: Sequence[RunGroup]) -> bytes:
    """Draw the curves as SVG. A panel without a curve says so."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    panels = _panels(groups)
    height = 2.9 * math.ceil(len(panels) / 2) + 0.24 * len(groups)
    # Without a date, and with fixed element names, the same runs give the same bytes.
    with rc_context({"svg.hashsalt": "mpframe", "font.size": 10}):
        figure = Figure(figsize=(9, height), layout="constrained")
        grid = figure.subplots(math.ceil(len(panels) / 2), 2).flat
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        for axes, (tag, title) in zip(grid, panels, strict=False):
            _panel(axes, tag, title, groups)
        handles = [Line2D([], [], linewidth=1.8, **_style(n)) for n, _ in enumerate(groups)]
        labels = [_plain(f"{group.label}, n {len(group.runs)}") for group in groups]
        columns = 2 if max(map(len, labels)) < _LONG_LABEL else 1
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
        text = io.BytesIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _panels(groups: Sequence[RunGroup]) -> list[tuple[str, str]]:
    """Return tag and title of each panel. Each metric of any run has one, up to a limit."""
    tags = {tag for group in groups for run in group.runs for tag in run.curves}
    metrics = [(found[0], found[1]) for tag in sorted(tags) if (found := _METRIC.fullmatch(tag))]
    return [
        (Tag.LOSS_TRAIN, "training loss"),
        (Tag.LOSS_VAL, "validation loss"),
        *metrics[:_MOST_METRICS],
        (Tag.SCALE, "loss scale"),
        (Tag.SKIPPED_TOTAL, "skipped steps"),
    ]


def _panel(axes: Any, tag: str, title: str, groups: Sequence[RunGroup]) -> None:
    drawn = []
    for number, group in enumerate(groups):
        for run in group.runs:
            # With several optimizers or losses there is a curve for each.
            found = [curve for name, curve in run.curves.items() if name.startswith(f"{tag}/")]
            for curve in found or ([run.curves[tag]] if tag in run.curves else []):
                drawn += [value for _, value in curve if math.isfinite(value)]
                _plot(axes, curve, run, number)
    axes.set_title(_plain(title))
    axes.set_xlabel("step (tried)")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    if not drawn:
        axes.text(0.5, 0.5, "not recorded", ha="center", transform=axes.transAxes, color="0.5")
    elif tag == Tag.SCALE:
        axes.set_yscale("log", base=2)
    elif tag == Tag.SKIPPED_TOTAL:
        axes.set_ylim(0, max(drawn) * 1.05 + 1)
    elif not _METRIC.fullmatch(tag) and 0 < min(drawn) < max(drawn) / 30:
        axes.set_yscale("log")


def _plot(axes: Any, curve: Curve, run: Record, number: int) -> None:
    stride = -(-len(curve) // _MOST_POINTS)
    thinned = [*curve[:-1:stride], *curve[-1:]] if stride > 1 else curve
    steps, values = [step for step, _ in thinned], [value for _, value in thinned]
    style = _style(number) | {"marker": "." if len(curve) <= _FEW_POINTS else ""}
    axes.plot(steps, values, linewidth=1.3, alpha=0.85, markersize=4, **style)
    if not run.finished and steps:
        axes.plot(steps[-1], values[-1], "x", color=style["color"], markersize=8)


def _style(number: int) -> dict[str, Any]:
    return {"color": f"C{number % 10}", "linestyle": _DASHES[number % len(_DASHES)]}


def _plain(label: str) -> str:
    """Shorten a label, and keep matplotlib from reading it as a formula."""
    short = label if len(label) <= 90 else f"{label[:89]}…"
    return short.replace("\\", "\\\\").replace("$", r"\$")


_CAPTION = "One line for each run and each of several losses. A cross: the run did not finish."
_TEXT_COLUMNS = {"run", "precision, scaling", "status", "reason"}
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1c2430; background: #fff;
  margin: 2rem auto; max-width: 1100px; padding: 0 1.25rem; }
p { max-width: 75ch; } .quiet { color: #5b6675; font-size: .88rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .84rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .5rem; text-align: right; border-bottom: 1px solid #e3e7ed;
  vertical-align: top; }
td { white-space: nowrap; }
.text { text-align: left; } td.text { white-space: normal; overflow-wrap: anywhere;
  min-width: 6rem; }
img { width: 100%; height: auto; } figure { margin: 1rem 0 1.6rem; }
figcaption { color: #5b6675; font-size: .88rem; overflow-wrap: anywhere; }
"""


def as_page(title: str, groups: Sequence[RunGroup], records: Sequence[Record]) -> str:
    """Write the page on all `records`. A group is a row of the tables, and a colour."""
    *first, last = map(_section, sections(groups))
    svg = base64.b64encode(draw(groups)).decode()
    picture = f'<img alt="{_CAPTION}" src="data:image/svg+xml;base64,{svg}">'
    caption = f"<figcaption>{_CAPTION}</figcaption>"
    curves = ["<h2>Curves</h2>", f"<figure>{picture}{caption}</figure>"]
    finished = sum(record.finished for record in records)
    about = f"{finished} of {len(records)} runs finished, in {len(groups)} groups"
    parts = [f"<h1>{escape(title)}</h1>", f"<p class=quiet>{about}</p>", *first, *curves, last]
    return _HEAD.format(title=escape(title), style=_STYLE) + "\n".join(parts) + "\n</body></html>\n"


_HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>{title}</title><style>{style}</style></head><body>
"""


def _section(section: Section) -> str:
    head, *rows = section.table
    cells = "".join(f"<th{_kind(name)}>{escape(name)}</th>" for name in head)
    heading = f"<thead><tr>{cells}</tr></thead>"
    body = "\n".join(f"<tr>{_cells(head, row)}</tr>" for row in rows)
    table = f"<div class=wide><table>{heading}\n<tbody>{body}</tbody></table></div>"
    notes = [f"<p class=quiet>{escape(note)}</p>" for note in section.notes]
    return "\n".join([f"<h2>{section.title}</h2>", table, *notes])


def _cells(head: Iterable[str], row: Iterable[str]) -> str:
    cells = zip(head, row, strict=True)
    return "".join(f"<td{_kind(name)}>{_lines(cell)}</td>" for name, cell in cells)


def _lines(cell: str) -> str:
    first, _, second = escape(cell).partition("\n")
    quiet = second.replace("\n", "<br>")
    return f"{first}<br><span class=quiet>{quiet}</span>" if quiet else first


def _kind(name: str) -> str:
    return " class=text" if name in _TEXT_COLUMNS else ""
