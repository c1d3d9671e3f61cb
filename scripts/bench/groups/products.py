"""Products below 16 bits, computed in fp32: a step by recipes beside the same step in float16."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from bench.measure import Times
from bench.step.competitors import RECIPE_STEPS
from bench.step.turns import race_turns
from bench.table import Claim, Table

THREADS = 2
FLOAT16, MXFP8, TORCHAO = "mpframe mixed float16", "mpframe mxfp8", "torchao mxfp8"
MOST = 2.0  # times FLOAT16

SIZES: dict[str, dict[str, int]] = {"linear": {}, "resnet18": {}}
"""The models, each with its own sizes."""


def tables(
    rounds: int,
    folder: Path,
    workloads: Mapping[str, Mapping[str, int]] = SIZES,
    threads: int = THREADS,
    steps: int = 3,
) -> list[Table]:
    """A table for each workload.

    Args:
        rounds: measured rounds, >= 1.
        folder: not used: nothing is written.
        workloads: the sizes of each, by its name.
        threads: that torch computes with.
        steps: per turn.
    """
    made = []
    for name, sizes in workloads.items():
        names, notes = _rows(name)
        rows = {row: {"name": row, "keep_memory": True} for row in names}
        table = race_turns(name, sizes, rows, rounds, threads, steps)
        made.append(replace(table, claims=claims_of(table.times), notes=notes))
    return made


def _rows(workload: str) -> tuple[Sequence[str], Sequence[str]]:
    """Who takes part, and a line on who does not."""
    names, notes = [FLOAT16, *RECIPE_STEPS], []
    if workload != "linear" or find_spec("torchao") is None:
        names.remove(TORCHAO)
        if workload == "linear":
            notes.append(f"{TORCHAO}: skipped, torchao is not installed")
    return names, notes


def claims_of(times: Times) -> list[Claim]:
    """What a ratio is to be, for those that took part."""
    marks = ((FLOAT16, MOST), (TORCHAO, 1.0))
    return [Claim.between(times, MXFP8, other, most) for other, most in marks if other in times]
