"""The groups of rows, and how they are measured and written."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.groups import devices, overhead, programs, steps
from bench.machine import machine
from bench.table import Table, as_json, as_markdown


@dataclass(frozen=True)
class Benchmark:
    """A group of rows."""

    tables: Callable[[int, Path], list[Table]]  # takes the rounds and a folder for its files
    rounds: int  # the default


def _steps(group: str, rounds: int) -> Benchmark:
    def tables(rounds: int, folder: Path) -> list[Table]:
        return [steps.compare(comparison, rounds) for comparison in steps.COMPARISONS[group]]

    return Benchmark(tables, rounds)


GROUPS = {
    "tiny": Benchmark(overhead.tiny_tables, 60),
    "resnet18": _steps("resnet18", 10),
    "large": _steps("large", 10),
    "small": _steps("small", 30),
    "options": _steps("options", 5),
    "products": _steps("products", 7),
    "growth": _steps("growth", 10),
    "ranges": Benchmark(overhead.range_tables, 10),
    "input": Benchmark(programs.input_tables, 10),
    "runs": Benchmark(programs.run_tables, 5),
    "startup": Benchmark(programs.startup_tables, 7),
    "distributed": Benchmark(devices.distributed_tables, 8),
    "cuda": Benchmark(devices.cuda_tables, 20),
}


def measure(names: Sequence[str], repeats: int | None, out: Path) -> None:
    """Measure groups, one after the other, print each and write `OUT/GROUP.md` and `.json`.

    Args:
        names: of groups.
        repeats: rounds, >= 1. None: each group's number.
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
    """Silence runs, except warnings."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)
