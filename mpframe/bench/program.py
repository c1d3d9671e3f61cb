"""The command line of the benchmark: which groups of rows, how often, and where results go."""

import argparse
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpframe.bench import cuda, ranges, resnet18, startup, tiny_model
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
    "ranges": Benchmark(ranges.tables, 10),
    "startup": Benchmark(startup.tables, 7),
    "cuda": Benchmark(cuda.tables, 20),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the groups named on the command line; print them and write `<group>.md`, `.json`."""
    options = _parser().parse_args(arguments)
    logging.disable(logging.INFO)
    for name in options.groups or GROUPS:
        group, before = GROUPS[name], machine()
        folder = options.out / name
        folder.mkdir(parents=True, exist_ok=True)
        measured = group.tables(options.repeats or group.rounds, folder)
        text = as_markdown(before, measured)
        (options.out / f"{name}.md").write_text(text)
        (options.out / f"{name}.json").write_text(as_json(before, measured))
        print(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.py", description="Measure mpframe.")
    parser.add_argument(
        "groups", nargs="*", choices=[*GROUPS, []], metavar="GROUP", help=", ".join(GROUPS)
    )
    parser.add_argument("--repeats", type=_count, metavar="N", help="rounds; default: the group's")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), metavar="FOLDER")
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number
