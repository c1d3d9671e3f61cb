"""What options of the trainer cost and save: `trainer.recompute` and `trainer.channels_last`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.step.turns import race_turns
from bench.table import Table

THREADS = 2


@dataclass(frozen=True)
class Choice:
    """An option that is tried.

    Attributes:
        workload: one of `WORKLOADS`.
        sizes: its arguments.
        modes: the dtype modes it is tried in.
        chosen: the option, as an argument of `one_turn.measure`.
    """

    workload: str
    sizes: Mapping[str, int]
    modes: tuple[str, ...]
    chosen: Mapping[str, Any]


_LAST = {"channels_last": True}
_MODES = ("fp32", "amp bfloat16", "mixed float16")
CHOICES = {
    "channels last, ResNet-18": Choice("resnet18", {}, _MODES, _LAST),
    "channels last, U-Net": Choice("unet", {"width": 16, "side": 64, "batch": 8}, _MODES, _LAST),
    "recompute=[blocks.*]": Choice(
        "transformer", {"batch": 16}, _MODES[1:], {"recompute": ["blocks.*"]}
    ),
}


def tables(
    rounds: int,
    folder: Path,
    choices: Mapping[str, Choice] = CHOICES,
    threads: int = THREADS,
    steps: int = 3,
) -> list[Table]:
    """A table for each choice: every mode without and with the option.

    Args:
        rounds: measured rounds, >= 1.
        folder: not used: nothing is written.
        choices: by the words for the option that stand in the table.
        threads: that torch computes with.
        steps: per turn.
    """
    return [_table(name, choice, rounds, threads, steps) for name, choice in choices.items()]


def _table(name: str, choice: Choice, rounds: int, threads: int, steps: int) -> Table:
    words, rows = name.partition(",")[0], {}
    for mode in choice.modes:
        plain = {"name": f"mpframe {mode}", "keep_memory": True}
        rows[mode], rows[f"{mode}, {words}"] = plain, {**plain, **choice.chosen}
    table = race_turns(choice.workload, choice.sizes, rows, rounds, threads, steps)
    return replace(table, title=f"{name}: {table.title}")
