"""The groups of rows, a file each, and how they are measured and written."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.groups import (
    cuda,
    distributed,
    growth,
    input,
    large,
    options,
    products,
    ranges,
    resnet18,
    runs,
    small,
    startup,
    tiny_model,
)
from bench.machine import machine
from bench.table import Table, as_json, as_markdown


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
    "products": Benchmark(products.tables, 7),
    "growth": Benchmark(growth.tables, 10),
    "ranges": Benchmark(ranges.tables, 10),
    "input": Benchmark(input.tables, 10),
    "runs": Benchmark(runs.tables, 5),
    "startup": Benchmark(startup.tables, 7),
    "distributed": Benchmark(distributed.tables, 8),
    "cuda": Benchmark(cuda.tables, 20),
}


def measure(names: Sequence[str], repeats: int | None, out: Path) -> None:
    """Measure groups, one after the other; print each and write `OUT/GROUP.md` and `.json`.

    Args:
        names: of groups.
        repeats: rounds, >= 1; None: each group's own number.
        out: a folder, which is made.
    """
    with _quiet():
        for name in names:
            group, before = GROUPS[name], machine()
            folder = out / name
            folder.mkdir(parents=True, exist_ok=True)
            measured = group.tables(repeats or group.rounds, folder)
            text = as_markdown(before, measured)
            (out / f"{name}.md").write_text(text)
            (out / f"{name}.json").write_text(as_json(before, measured))
            print(text)


@contextmanager
def _quiet() -> Iterator[None]:
    """Within the block runs tell nothing but warnings."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)
