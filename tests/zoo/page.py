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
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def line_of(row: Row) -> dict[str, str]:
    """A row as text: distances with two digits, errors as they were said."""
    verdict = f"not built: {row.built}" if row.built else "; ".join(row.failures) or AGREES
    cells = {key: _cell(row.modes.get(key, "")) for key in KEYS}
    return {
        "model": row.name,
        "class": row.kind,
        "verdict": verdict,
        "torch.autocast bfloat16": _cell(row.autocast),
        "allowed": _cell(row.allowed),
        **cells,
    }


def tables(lines: list[dict[str, str]]) -> str:
    """Counts by library, distances by mode, and what fails."""
    parts = [_machine(), _counts(lines), _distances(lines), _failures(lines)]
    return "\n".join(part for part in parts if part)


def _cell(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.2g}"


def _machine() -> str:
    return f"torch {torch.__version__} on one CPU thread ({platform.machine()}), one run each.\n"


def _counts(lines: list[dict[str, str]]) -> str:
    text = "| library | models | not built | agree | fail | recomputed as well |\n"
    text += "|---|---|---|---|---|---|\n"
    libraries = sorted({line["model"].split("/")[0] for line in lines})
    for library in libraries:
        own = [line for line in lines if line["model"].startswith(f"{library}/")]
        verdicts = Counter(_kind(line["verdict"]) for line in own)
        again = sum(_number(line["mixed float16 recomputed"]) is not None for line in own)
        text += (
            f"| {library} {version(library)} | {len(own)} | {verdicts['not built']} "
            f"| {verdicts[AGREES]} | {verdicts['fails']} | {again} |\n"
        )
    return text


def _kind(verdict: str) -> str:
    if verdict == AGREES:
        return AGREES
    return "not built" if verdict.startswith("not built") else "fails"


def _distances(lines: list[dict[str, str]]) -> str:
    text = "| mode | models | median distance from fp32 | beside torch's, median | largest |\n"
    text += "|---|---|---|---|---|\n"
    for mode in MODES:
        pairs = [(_number(line[mode]), _number(line["torch.autocast bfloat16"])) for line in lines]
        both = [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs]
        if both:
            shares = [ours / theirs for ours, theirs in both]
            text += (
                f"| {mode} | {len(both)} | {median(ours for ours, _ in both):.2g} "
                f"| {median(shares):.2g} | {max(shares):.2g} |\n"
            )
    return text


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _failures(lines: list[dict[str, str]]) -> str:
    failed = [line for line in lines if _kind(line["verdict"]) == "fails"]
    return "".join(f"- {line['model']}: {line['verdict']}\n" for line in failed)
