"""The runs' curves in one picture: losses, loss scale, skipped steps.

Each group has one colour and one dash pattern, because the lines of two modes often coincide. There
is a line for each run.
"""

import io
import math
from collections.abc import Sequence
from typing import Any

from mpframe.report.groups import RunGroup
from mpframe.report.records import Curve, Record
from mpframe.tracking.tags import Tag

_PANELS = (
    (Tag.LOSS_TRAIN, "training loss"),
    (Tag.LOSS_VAL, "validation loss"),
    (Tag.SCALE, "loss scale"),
    (Tag.SKIPPED_TOTAL, "skipped steps, total"),
)
# Only one solid line: the others must let it show through.
_DASHES = ("-", (0, (6, 3)), (3, (2, 3)), (0, (7, 2, 1, 2)), (0, (3, 5)), (2, (1, 2)), (0, (9, 5)))
_MOST_POINTS = 800
_FEW = 40  # points, up to which each is marked


def draw(groups: Sequence[RunGroup]) -> bytes:
    """The picture as SVG; a panel without a curve says so."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows = math.ceil(len(groups) / 2)
    # Without a date, and with fixed element names, the same runs give the same bytes.
    with rc_context({"svg.hashsalt": "mpframe", "font.size": 10}):
        figure = Figure(
            figsize=(11, 7 + 0.24 * rows), layout=ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.1)
        )
        for axes, (tag, title) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
            _panel(axes, tag, title, groups)
        handles = [_line(number) for number, _ in enumerate(groups)]
        labels = [_plain(group.label) for group in groups]
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
        text = io.BytesIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _panel(axes: Any, tag: Tag, title: str, groups: Sequence[RunGroup]) -> None:
    drawn = []
    for number, group in enumerate(groups):
        for run in group.runs:
            for curve in _curves(run, tag):
                drawn += [value for _, value in curve if math.isfinite(value)]
                _plot(axes, curve, run, number)
    axes.set_title(title)
    axes.set_xlabel("step (tried)")
    axes.set_ylabel(title.split(",")[0])
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    if not drawn:
        axes.text(0.5, 0.5, "not recorded", ha="center", transform=axes.transAxes, color="0.5")
    elif tag is Tag.SCALE:
        axes.set_yscale("log", base=2)
    elif tag is Tag.SKIPPED_TOTAL:
        axes.set_ylim(0, max(drawn) * 1.05 + 1)
        axes.yaxis.get_major_locator().set_params(integer=True)
    elif 0 < min(drawn) < max(drawn) / 30:
        axes.set_yscale("log")


def _plot(axes: Any, curve: Curve, run: Record, number: int) -> None:
    thinned = _thinned(curve)
    steps, values = [step for step, _ in thinned], [value for _, value in thinned]
    style = _style(number) | {"marker": "." if len(curve) <= _FEW else ""}
    axes.plot(steps, values, linewidth=1.3, alpha=0.85, markersize=4, **style)
    if not run.finished and steps:
        axes.plot(steps[-1], values[-1], "x", color=style["color"], markersize=8)


def _curves(run: Record, tag: Tag) -> list[Curve]:
    """The run's curves of that tag: one, or one for each of several optimizers or losses."""
    found = [curve for name, curve in run.curves.items() if name.startswith(f"{tag}/")]
    return found or ([run.curves[tag]] if tag in run.curves else [])


def _thinned(curve: Curve) -> Curve:
    """Every so many points, and the last one."""
    stride = -(-len(curve) // _MOST_POINTS)
    return [*curve[:-1:stride], *curve[-1:]] if stride > 1 else curve


def _style(number: int) -> dict[str, Any]:
    return {"color": f"C{number % 10}", "linestyle": _DASHES[number % len(_DASHES)]}


def _line(number: int) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], linewidth=1.8, **_style(number))


def _plain(label: str) -> str:
    """A label of limited length that matplotlib does not read as a formula."""
    short = label if len(label) <= 90 else f"{label[:89]}…"
    return short.replace("\\", "\\\\").replace("$", r"\$")
