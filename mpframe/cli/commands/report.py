"""Compare runs on one page that opens without a network.

Usage: mpframe report FOLDER ... [out=FOLDER]

    mpframe report runs/2026-11-21/05-45-42
    mpframe report runs/first runs/second out=compared

Options:
    FOLDER ...      runs or sweeps, at least one
    out=FOLDER      default: the first folder, or the one beside it if it is a run

The command writes report.html.
"""

from pathlib import Path

from mpframe.cli.program import command, take_own
from mpframe.core.errors import ConfigError
from mpframe.files.durable import refuse_unwritable, write_atomically
from mpframe.files.text import few, say
from mpframe.lab.report.page import as_page
from mpframe.lab.report.records import find_runs
from mpframe.lab.report.tables import group_runs


@command
def main(arguments: list[str]) -> None:
    options, folders = take_own(arguments, ["out"])
    if not folders:
        raise ConfigError("no folder given; name runs or a sweep, e.g. runs/2026-11-21/05-45-42")
    home, records = find_runs([Path(folder) for folder in folders])
    out = Path(options.get("out") or home)
    refuse_unwritable("out", out)
    out.mkdir(parents=True, exist_ok=True)
    groups = group_runs(records)
    names = list(dict.fromkeys(Path(folder).resolve().name for folder in folders))
    title = f"Runs of {few(names) if len(names) > 1 else home.name}"
    page = out / "report.html"
    write_atomically(page, as_page(title, groups, records))
    finished = sum(record.finished for record in records)
    say(f"{finished} of {len(records)} runs finished; {page} shows them")
