"""The zoo's results: a line for each model in zoo.csv, and the tables of README.md beside it."""

import csv
import platform
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from statistics import median

import torch
from comparison import MODES, RECOMPUTED, Row

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- zoo -->\n", "<!-- end of zoo -->\n"
KEYS = (*MODES, "fp32 recomputed", *(f"{mode} recomputed" for mode in RECOMPUTED))
HEAD = ("model", "class", "verdict", "torch.autocast bfloat16", "allowed", *KEYS)
AGREES = "agrees"


def write(new: Iterable[dict[str, str]]) -> None:
    """Put these lines in the place of what was known of their models, and write both files."""
    known = {line["model"]: line for line in (*read(), *new)}
    lines = [known[name] for name in sorted(known)]
    with (HERE / "zoo.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, HEAD, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    page = HERE / "README.md"
    before, rest = page.read_text().split(BEGIN)
    page.write_text(before + BEGIN + tables(lines) + END + rest.split(END)[1])


def read() -> list[dict[str, str]]:
    path = HERE / "zoo.csv"
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


def line_of(row: Row) -> dict[str, str]:
    verdict = f"not built: {row.built}" if row.built else "; ".join(row.failures) or AGREES
    modes = (row.modes.get(key, "") for key in KEYS)
    cells = map(_cell, (row.name, row.kind, verdict, row.autocast, row.allowed, *modes))
    return dict(zip(HEAD, cells, strict=True))


def tables(lines: list[dict[str, str]]) -> str:
    machine = f"torch {torch.__version__} on one CPU thread ({platform.machine()}), one run each.\n"
    counts = _row("library", "models", "not built", "agree", "fail", "recomputed as well")
    counts += "|---" * 6 + "|\n"
    for library, group in groupby(lines, lambda line: line["model"].split("/")[0]):
        own = list(group)
        verdicts = Counter(_kind(line["verdict"]) for line in own)
        again = sum(_number(line["mixed float16 recomputed"]) is not None for line in own)
        cells = (len(own), *(verdicts[kind] for kind in ("not built", AGREES, "fails")), again)
        counts += _row(f"{library} {version(library)}", *map(str, cells))
    told = "median distance from fp32", "beside torch's, median", "largest"
    distances = _row("mode", "models", *told) + "|---" * 5 + "|\n"
    for mode in MODES:
        pairs = [(_number(line[mode]), _number(line["torch.autocast bfloat16"])) for line in lines]
        both = [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs]
        if both:
            shares = [ours / theirs for ours, theirs in both]
            found = median(ours for ours, _ in both), median(shares), max(shares)
            distances += _row(mode, str(len(both)), *map(_cell, found))
    failed = [line for line in lines if _kind(line["verdict"]) == "fails"]
    failures = "".join(f"- {line['model']}: {line['verdict']}\n" for line in failed)
    return "\n".join(filter(None, [machine, counts, distances, failures]))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def _cell(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.2g}"


def _kind(verdict: str) -> str:
    return verdict if verdict == AGREES else verdict[:9] if verdict[:9] == "not built" else "fails"


def _number(cell: str) -> float | None:
    return float(cell) if cell[:1].isdigit() else None
