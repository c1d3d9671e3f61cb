"""The zoo's results: a line for each model in zoo.csv, and the tables of README.md beside it."""

import csv
import platform
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch
from comparison import MODES, RECOMPUTED, Row

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- zoo -->\n", "<!-- end of zoo -->\n"
KEYS = (*MODES, "fp32 recomputed", *(f"{mode} recomputed" for mode in RECOMPUTED))
HEAD = ("model", "class", "verdict", "torch.autocast bfloat16", "allowed", *KEYS)
AGREES = "agrees"


def write(rows: Iterable[Row]) -> None:
    """Put `rows` in the place of what was known of their models, and write both files."""
    known = {line["model"]: line for line in read()} | {row.name: line_of(row) for row in rows}
    lines = [known[name] for name in sorted(known)]
    with (HERE / "zoo.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, HEAD, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    page = HERE / "README.md"
    before, rest = page.read_text().split(BEGIN)
    page.write_text(before + BEGIN + tables(lines) + END + rest.split(END)[1])


def read() -> list[dict[str, str]]:
    """The lines of zoo.csv; none where there is no such file."""
    path = HERE / "zoo.csv"
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


def line_of(row: Row) -> dict[str, str]:
    """A row as text: distances with two digits, errors as they were said."""
    verdict = f"not built: {row.built}" if row.built else "; ".join(row.failures) or AGREES
    modes = (row.modes.get(key, "") for key in KEYS)
    cells = map(_cell, (row.name, row.kind, verdict, row.autocast, row.allowed, *modes))
    return dict(zip(HEAD, cells, strict=True))


def tables(lines: list[dict[str, str]]) -> str:
    """Counts by library, distances by mode, and what fails."""
    machine = f"torch {torch.__version__} on one CPU thread ({platform.machine()}), one run each.\n"
    failed = [line for line in lines if _kind(line["verdict"]) == "fails"]
    failures = "".join(f"- {line['model']}: {line['verdict']}\n" for line in failed)
    return "\n".join(filter(None, [machine, _counts(lines), _distances(lines), failures]))


def _cell(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.2g}"


def _counts(lines: list[dict[str, str]]) -> str:
    text = "| library | models | not built | agree | fail | recomputed as well |\n"
    text += "|---|---|---|---|---|---|\n"
    for library in sorted({line["model"].split("/")[0] for line in lines}):
        own = [line for line in lines if line["model"].startswith(f"{library}/")]
        verdicts = Counter(_kind(line["verdict"]) for line in own)
        again = sum(_number(line["mixed float16 recomputed"]) is not None for line in own)
        counts = (verdicts[kind] for kind in ("not built", AGREES, "fails"))
        cells = (f"{library} {version(library)}", len(own), *counts, again)
        text += f"| {' | '.join(map(str, cells))} |\n"
    return text


def _kind(verdict: str) -> str:
    return verdict if verdict == AGREES else verdict[:9] if verdict[:9] == "not built" else "fails"


def _distances(lines: list[dict[str, str]]) -> str:
    text = "| mode | models | median distance from fp32 | beside torch's, median | largest |\n"
    text += "|---|---|---|---|---|\n"
    for mode in MODES:
        pairs = [(_number(line[mode]), _number(line["torch.autocast bfloat16"])) for line in lines]
        both = [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs]
        if both:
            shares = [ours / theirs for ours, theirs in both]
            found = median(ours for ours, _ in both), median(shares), max(shares)
            text += f"| {mode} | {len(both)} | {' | '.join(map(_cell, found))} |\n"
    return text


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None
