"""A train step of a model beside plain torch, from one table of comparisons.

    resnet18    every dtype mode, beside plain torch and torch.autocast; SGD with momentum, as in
                experiment=cifar10_resnet18
    large       many parameters: with few products for each weight, the optimizer's step and its
                memory decide. mpframe keeps freed memory, as `mpframe train` does; three rows show
                what only that comes to
    small       steps of a few milliseconds: the cost of the casts where an op costs little
    options     `trainer.recompute` and `trainer.channels_last`
    products    recipes below 16 bits, computed in fp32, beside float16
    growth      time against one size; the slope of log(time) over log(size) is 0 if the size costs
                nothing, 1 if the time grows as the size does, 2 as its square

Most competitors take turns in this process. If memory counts, each turn has a new process.
"""

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from bench.child import run_python
from bench.measure import Competitor, Spread, Times, race, ratio, threads, timed
from bench.step.competitors import MAX_NORM, PROFILE_STEPS, RECIPE_STEPS, STEPS
from bench.step.laps import LAPS, Laps
from bench.step.one_turn import ALL_STEPS, OneTurn
from bench.step.workloads import WORKLOADS
from bench.table import Claim, Table
from mpframe.precision.policy import has_native_half

BYTES = "peak bytes per parameter"
SLOW_ROUNDS = 2
PLAIN, AUTOCAST = "torch fp32", "torch.autocast bfloat16"
MIXED, FLOAT16 = "mpframe mixed bfloat16", "mpframe mixed float16"
MXFP8, TORCHAO = "mpframe mxfp8", "torchao mxfp8"

Row = Mapping[str, Any]
Mark = tuple[str, str, float]
"""A row, another, and the most that their ratio may be."""


@dataclass(frozen=True)
class Comparison:
    """Rows of one model, of which the first is the baseline."""

    workload: str  # one of `WORKLOADS`
    rows: Mapping[str, Row]  # by name the arguments of `one_turn.measure` that differ
    sizes: Mapping[str, int] = field(default_factory=dict)
    marks: Sequence[Mark] = ()
    memory: Sequence[Mark] = ()  # of the bytes for each parameter
    title: str = ""  # before the workload's, or if it ends in none, instead of it
    optimizer: str = f"fused AdamW, gradients clipped to {MAX_NORM}"
    apart: bool = False  # a process for each turn
    threads: int = 2
    steps: int = 1  # per turn
    growing: Sequence[int] = ()  # the size of each row
    needs: str = ""  # a package
    notes: Sequence[str] = ()


def _named(*names: str, **arguments: Any) -> dict[str, Row]:
    return {name: {"name": name, **arguments} for name in names}


_LARGE: dict[str, Row] = {
    **{name: {"name": name, "keep_memory": name.startswith("mpframe")} for name in STEPS},
    **{f"{name}, memory kept": {"name": name, "keep_memory": True} for name in (PLAIN, AUTOCAST)},
    f"{MIXED}, memory given back": {"name": MIXED},
}
_AMP = ("mpframe amp bfloat16", AUTOCAST, 1.02)
_MODES = ("fp32", "amp bfloat16", "mixed float16")
_RESNET18 = [PLAIN, AUTOCAST, "mpframe fp32"]
_RESNET18 += [
    f"mpframe {mode} {half}" for mode in ("mixed", "amp") for half in ("float16", "bfloat16")
]
_RECIPES = [FLOAT16, *(name for name in RECIPE_STEPS if name != TORCHAO)]
_HAS_TORCHAO = find_spec("torchao") is not None


def _resnet18(batch: int, width: int = 64) -> Comparison:
    marks: list[Mark] = [
        ("float16", PLAIN, 1.4),
        ("float16", "torch.autocast float16", 1 / 20),
        ("bfloat16", PLAIN, 1 / 1.7),
    ]
    return Comparison(
        "resnet18",
        {name: {"name": f"{name}, SGD"} for name in (*_RESNET18, "torch.autocast float16")},
        {"width": width, "batch": batch},
        [
            (f"mpframe {mode} {half}", other, most)
            for (half, other, most), mode in product(marks, ("mixed", "amp"))
        ],
        title=f"ResNet-18, {batch} images",
        optimizer="fused SGD with momentum",
    )


def _option(
    words: str, title: str, workload: str, modes: Sequence[str], chosen: Row, **sizes: int
) -> Comparison:
    """Compare every mode without and with an option."""
    rows: dict[str, Row] = {}
    for mode in modes:
        plain = {"name": f"mpframe {mode}", "keep_memory": True}
        rows[mode], rows[f"{mode}, {words}"] = plain, {**plain, **chosen}
    return Comparison(workload, rows, sizes, title=f"{title}: ", apart=True, steps=3)


def _products(workload: str, *more: str, notes: Sequence[str] = ()) -> Comparison:
    rows, marks = _named(*_RECIPES, *more, keep_memory=True), [(MXFP8, FLOAT16, 2.0)]
    marks += [(MXFP8, other, 1.0) for other in more]
    return Comparison(workload, rows, {}, marks, apart=True, steps=3, notes=notes)


def _growth(
    name: str, workload: str, size: str, values: Sequence[int], **others: int
) -> Comparison:
    rows = {f"{size} {n}": {"name": MIXED, "sizes": {**others, size: n}} for n in values}
    how = f"{MIXED}, fused AdamW; sizes of the first row"
    return Comparison(
        workload, rows, title=f"Growth with {name}", optimizer=how, steps=3, growing=values
    )


_LAST = {"channels_last": True}
COMPARISONS: dict[str, list[Comparison]] = {
    "resnet18": [_resnet18(128), _resnet18(32)],
    "large": [
        Comparison(
            "linear",
            _LARGE,
            marks=[_AMP, (FLOAT16, PLAIN, 1.4), (MIXED, AUTOCAST, 0.9)],
            memory=[(MIXED, AUTOCAST, 0.8)],
            apart=True,
            steps=5,
        ),
        Comparison("transformer", _LARGE, marks=[_AMP], apart=True, steps=5),
        Comparison("recommender", _LARGE, marks=[_AMP], apart=True, steps=5),
    ],
    "small": [
        Comparison(
            name,
            _named(AUTOCAST, "mpframe amp bfloat16", MIXED, *PROFILE_STEPS),
            marks=[("mpframe amp bfloat16", AUTOCAST, 1.1)],
            threads=1,
            steps=20,
            needs=package,
        )
        for name, package in (("tiny_bert", "transformers"), ("unet", ""))
    ],
    "options": [
        _option("channels last", "channels last, ResNet-18", "resnet18", _MODES, _LAST),
        _option(
            "channels last",
            "channels last, U-Net",
            "unet",
            _MODES,
            _LAST,
            width=16,
            side=64,
            batch=8,
        ),
        _option(
            "recompute=[blocks.*]",
            "recompute=[blocks.*]",
            "transformer",
            _MODES[1:],
            {"recompute": ["blocks.*"]},
            batch=16,
        ),
    ],
    "products": [
        _products("linear", TORCHAO)
        if _HAS_TORCHAO
        else _products("linear", notes=[f"{TORCHAO}: skipped, torchao is not installed"]),
        _products("resnet18"),
    ],
    "growth": [
        _growth("width", "linear", "width", (256, 512, 1024, 2048), layers=8, batch=32),
        _growth("depth", "linear", "layers", (4, 8, 16, 32), width=512, batch=32),
        _growth("batch", "linear", "batch", (32, 128, 512, 2048), width=512, layers=8),
        # It has products for 256 rows only, whatever the number of its weights.
        _growth("parameters", "recommender", "rows", (4000, 16000, 64000, 256000), batch=256),
    ],
}
"""The comparisons of each group, a table each."""


def compare(comparison: Comparison, rounds: int) -> Table:
    """Race the rows of a comparison."""
    if comparison.needs and find_spec(comparison.needs) is None:
        note = f"skipped, {comparison.needs} is not installed; pip install 'mpframe[text]'"
        baseline = next(iter(comparison.rows))
        return Table(comparison.workload, "", baseline, {}, notes=[note])
    race_rows = _in_processes if comparison.apart else _in_this_process
    table, notes = race_rows(comparison, rounds), list(comparison.notes)
    if comparison.growing:
        found = slope(table.times, comparison.growing)
        notes.append(f"slope: {found.median:.2f} ({found.low:.2f} to {found.high:.2f})")
    return replace(table, claims=claims_of(comparison, table.times, table.details), notes=notes)


def claims_of(
    comparison: Comparison, times: Times, details: Mapping[str, Times] | None = None
) -> list[Claim]:
    """Return the marks of the rows that took part, in bfloat16 only if the machine has it."""
    native, memory = has_native_half("bfloat16"), (details or {}).get(BYTES, {})
    claims = [
        Claim.between(times, name, other, most)
        for name, other, most in comparison.marks
        if {name, other} <= times.keys() and (native or "bfloat16" not in name)
    ]
    return claims + [
        Claim(f"bytes per parameter, {name} / {other}", ratio(memory, name, other), most)
        for name, other, most in comparison.memory
        if memory.get(name)
    ]


def slope(times: Times, sizes: Sequence[int]) -> Spread:
    """Fit the slope of log(time) over log(size) in each round, by least squares.

    Args:
        times: by name, in the order of `sizes`.
        sizes: at least two, all different.
    """
    rounds = np.log(np.array(list(times.values())))
    return Spread.of([float(s) for s in np.polyfit(np.log(sizes), rounds, deg=1)[0]])


def _rounds_of(row: str) -> int | None:
    """Return in how many rounds torch's kernels take part if they take 40 times as long."""
    slow = row.startswith("torch.autocast float16") or not has_native_half("bfloat16")
    return SLOW_ROUNDS if row.startswith("torch.autocast") and slow else None


def _in_this_process(comparison: Comparison, rounds: int) -> Table:
    make = WORKLOADS[comparison.workload]
    works = {
        name: make(**{**comparison.sizes, **row.get("sizes", {})})
        for name, row in comparison.rows.items()
    }
    with threads(comparison.threads):
        steps = {n: ALL_STEPS[row["name"]](works[n], Laps()) for n, row in comparison.rows.items()}
        turns = [
            Competitor(name, timed(step, comparison.steps), _rounds_of(name))
            for name, step in steps.items()
        ]
        times = race(turns, rounds)
    first = next(iter(works))
    title = comparison.title or works[first].title
    return Table(title, _setting(comparison, works[first].sizes), first, times)


class Turn:
    """Turns of one row, each in a new process, with the arguments of `one_turn.measure`."""

    def __init__(self, row: str, arguments: Row) -> None:
        self._row, self._arguments = row, json.dumps(arguments)
        self.turns: list[OneTurn] = []

    def __call__(self) -> float:
        """Return seconds per step. Raises MpframeError if the process failed."""
        words = ["-m", "bench.step.one_turn", self._arguments]
        printed = run_python(words, Path(tempfile.gettempdir()), f"bench: {self._row!r}")
        self.turns.append(OneTurn(**json.loads(printed)))
        return self.turns[-1].seconds


def _in_processes(comparison: Comparison, rounds: int) -> Table:
    """Also measure laps and memory."""
    common = {
        "workload": comparison.workload,
        "sizes": dict(comparison.sizes),
        "threads": comparison.threads,
        "steps": comparison.steps,
    }
    turns = {name: Turn(name, {**common, **row}) for name, row in comparison.rows.items()}
    # No warm-up: nothing of a process is left for the next.
    racing = [Competitor(name, turn, _rounds_of(name)) for name, turn in turns.items()]
    times = race(racing, rounds, warmup=0)
    work = WORKLOADS[comparison.workload](**comparison.sizes)
    details = {
        f"{lap}, ms": {row: [t.laps[lap] * 1e3 for t in turn.turns] for row, turn in turns.items()}
        for lap in LAPS
    }
    details[BYTES] = {
        row: [t.bytes_per_parameter for t in turn.turns if t.bytes_per_parameter is not None]
        for row, turn in turns.items()
    }
    count = work.parameters
    words = f"{count / 1e6:.0f} million" if count >= 1e6 else str(count)
    title = f"{comparison.title}{work.title}, {words} parameters"
    return Table(title, _setting(comparison, work.sizes), next(iter(turns)), times, details=details)


def _setting(comparison: Comparison, sizes: str) -> str:
    cores = "1 thread" if comparison.threads == 1 else f"{comparison.threads} threads"
    scaled = any(re.search(r"\bfloat16", row) for row in comparison.rows)
    return f"{sizes}, {comparison.optimizer}, {cores}" + (
        "; float16 with Backoff." if scaled else "."
    )
