"""The groups of rows, a file each, and how they are measured and written."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpframe.bench.groups import (
    cuda,
    growth,
    input,
    large,
    options,
    ranges,
    resnet18,
    small,
    startup,
    tiny_model,
)
from mpframe.bench.machine import machine
from mpframe.bench.table import Table, as_json, as_markdown


@dataclass(frozen=True)
class Benchmark:
    """A file of rows.

    Attributes:
        tables: measures; takes the rounds and a folder for what it writes.
        rounds: the default.
    """

    tables: Callable[[int, Path], list[Table]]
    rounds: int


GROUPS = {
    "tiny": Benchmark(tiny_model.tables, 60),
    "resnet18": Benchmark(resnet18.tables, 10),
    "large": Benchmark(large.tables, 10),
    "small": Benchmark(small.tables, 30),
    "options": Benchmark(options.tables, 5),
    "growth": Benchmark(growth.tables, 10),
    "ranges": Benchmark(ranges.tables, 10),
    "input": Benchmark(input.tables, 10),
    "startup": Benchmark(startup.tables, 7),
    "cuda": Benchmark(cuda.tables, 20),
}


def measure(names: Sequence[str], repeats: int | None, out: Path) -> None:
    """Measure groups, one after the other; print each and write `OUT/GROUP.md` and `.json`.

    Args:
        names: of groups.
        repeats: rounds, >= 1; None: each group's own number.
        out: a folder, which is made.
    """
    logging.disable(logging.INFO)
    for name in names:
        group, before = GROUPS[name], machine()
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        measured = group.tables(repeats or group.rounds, folder)
        text = as_markdown(before, measured)
        (out / f"{name}.md").write_text(text)
        (out / f"{name}.json").write_text(as_json(before, measured))
        print(text)
