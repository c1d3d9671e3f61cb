"""Measure what training costs, beside plain torch and other trainers.

Usage: python scripts/bench.py [GROUP ...] [repeats=N] [out=FOLDER]

    python scripts/bench.py
    python scripts/bench.py tiny repeats=20

Options:
    GROUP ...     tiny, resnet18, large, small, options, products, growth, ranges, input, runs,
                  startup, distributed, cuda (default: all)
    repeats=N     rounds, at least 1 (default: each group's number)
    out=FOLDER    default: runs/bench

The tables are printed and written as GROUP.md and GROUP.json.
"""

import os
import sys
from pathlib import Path

from mpframe.cli.program import refuse_words
from mpframe.core.errors import ConfigError
from mpframe.files.text import one_line_exit, take_options

_OPTIONS = ("repeats", "out")


def main(arguments: list[str] | None = None) -> None:
    """Measure the groups that are named.

    Args:
        arguments: names of groups, `repeats=N`, `out=FOLDER`. None: the command line.
    """
    # Before torch is loaded. Threads that wait by spinning fight whatever else the machine runs.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    given = sys.argv[1:] if arguments is None else arguments
    if not {"--help", "-h"}.isdisjoint(given):
        print(__doc__)
        return
    with one_line_exit():
        _main(given)


def _main(arguments: list[str]) -> None:
    from bench import groups

    options, names = take_options(arguments, _OPTIONS)
    others = [name for name in names if name not in groups.GROUPS]
    refuse_words(others, [*groups.GROUPS, *_OPTIONS])
    repeats = _count(options["repeats"]) if "repeats" in options else None
    groups.measure(names or list(groups.GROUPS), repeats, Path(options.get("out") or "runs/bench"))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"repeats={text}: must be a whole number >= 1")
    return int(text)
