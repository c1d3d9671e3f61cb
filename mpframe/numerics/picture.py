"""What all pictures of numerics share: how they are made, named and saved."""

import io
from pathlib import Path
from typing import Any

from mpframe.files.durable import write_atomically

_DPI = 100


def new_figure(width: float, height: float) -> Any:
    """An empty figure, in inches."""
    from matplotlib.figure import Figure  # Imported late: it takes half a second.

    return Figure(figsize=(width, height), layout="constrained")


def short(name: str) -> str:
    """The end of a layer's name, at most 20 letters."""
    return name if len(name) <= 20 else "…" + name[-19:]


def save(figure: Any, path: Path) -> None:
    """Write a PNG, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    png = io.BytesIO()
    figure.savefig(png, dpi=_DPI)
    write_atomically(path, png.getvalue())
