"""The runs' curves in one picture: losses, every metric, loss scale, skipped steps.

Each group has one colour and one dash pattern, because the lines of two modes often coincide. There
is a line for each run. Text and axes take the reader's colour scheme, light or dark.
"""

import io
import math
import re
from collections.abc import Sequence
from typing import Any

from mpframe.report.groups import RunGroup
from mpframe.report.records import Curve, Record
from mpframe.tracking.tags import Tag, metric_tag

_METRIC = re.compile(metric_tag("(.+)"))
# Only one line is solid, and it stays visible below the others.
_DASHES = ("-", (0, (6, 3)), (3, (2, 3)), (0, (7, 2, 1, 2)), (0, (3, 5)), (2, (1, 2)), (0, (9, 5)))
_MOST_METRICS = 12  # the first by name
_MOST_POINTS = 300  # a panel is about 400 pixels wide
_LONG = 55  # letters; if a label has more, the legend has one column
_FEW = 40  # points; if a curve has no more, each is marked
_INK = "#010203"  # stands for the reader's text colour until the picture is written
_COLOURED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
_SCHEME = (
    b"svg { color: #1c2430 } @media (prefers-color-scheme: dark) { svg { color: #dfe5ec } } *{"
)


def draw(groups: Sequence[RunGroup]) -> bytes:
    """Draw the curves as SVG; a panel without a curve says so."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    panels = _panels(groups)
    height = 2.9 * math.ceil(len(panels) / 2) + 0.24 * len(groups)
    settings: Any = {"svg.hashsalt": "mpframe", "font.size": 10, **dict.fromkeys(_COLOURED, _INK)}
    # Without a date, and with fixed element names, the same runs give the same bytes.
    with rc_context(settings):
        layout = ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.1)
        figure = Figure(figsize=(9, height), layout=layout, facecolor="none")
        grid = figure.subplots(math.ceil(len(panels) / 2), 2).flat
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        for axes, (tag, title) in zip(grid, panels, strict=False):
            axes.set_facecolor("none")
            _panel(axes, tag, title, groups)
        handles = [_line(number) for number, _ in enumerate(groups)]
        labels = [_plain(f"{group.label}, n {len(group.runs)}") for group in groups]
        columns = 2 if max(map(len, labels)) < _LONG else 1
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
        text = io.BytesIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue().replace(_INK.encode(), b"currentColor").replace(b"*{", _SCHEME, 1)


def _panels(groups: Sequence[RunGroup]) -> list[tuple[str, str]]:
    """Tag and title of each panel; each metric of any run has one, up to `_MOST_METRICS`."""
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
            for curve in _curves(run, tag):
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
        axes.yaxis.get_major_locator().set_params(integer=True)
    elif not _METRIC.fullmatch(tag) and 0 < min(drawn) < max(drawn) / 30:
        axes.set_yscale("log")


def _plot(axes: Any, curve: Curve, run: Record, number: int) -> None:
    thinned = _thinned(curve)
    steps, values = [step for step, _ in thinned], [value for _, value in thinned]
    style = _style(number) | {"marker": "." if len(curve) <= _FEW else ""}
    axes.plot(steps, values, linewidth=1.3, alpha=0.85, markersize=4, **style)
    if not run.finished and steps:
        axes.plot(steps[-1], values[-1], "x", color=style["color"], markersize=8)


def _curves(run: Record, tag: str) -> list[Curve]:
    """The run's curves of a tag: one, or one for each of several optimizers or losses."""
    found = [curve for name, curve in run.curves.items() if name.startswith(f"{tag}/")]
    return found or ([run.curves[tag]] if tag in run.curves else [])


def _thinned(curve: Curve) -> Curve:
    """At most about `_MOST_POINTS` points of a curve, at equal distances, and its last one."""
    stride = -(-len(curve) // _MOST_POINTS)
    return [*curve[:-1:stride], *curve[-1:]] if stride > 1 else curve


def _style(number: int) -> dict[str, Any]:
    return {"color": f"C{number % 10}", "linestyle": _DASHES[number % len(_DASHES)]}


def _line(number: int) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], linewidth=1.8, **_style(number))


def _plain(label: str) -> str:
    """A label of limited length, which matplotlib does not read as a formula."""
    short = label if len(label) <= 90 else f"{label[:89]}…"
    return short.replace("\\", "\\\\").replace("$", r"\$")
