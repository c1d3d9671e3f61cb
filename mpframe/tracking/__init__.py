"""The records of a run: curves, tables, its summary and where it happened.

Begin with tracker.py, which writes TensorBoard's event file, and summary.py.

    logger         where results go: the interface, and all of a run as one
    json_lines     the curves as JSON, a line for each step
    tracker        curves, texts, pictures and hyperparameters for TensorBoard
    tags           the name of every curve, picture and text, and what it means
    dtype_map      what each module stores and computes in, and why
    records        the same numbers as a table; the largest gradient of every step, for replays
    summary        summary.json: how a run ended
    environment    versions, hardware, command line; the most memory in use

May import config, files and core, but no trainer. Nothing is exported here, because programs that
do not need torch import summary.py.
"""

from pathlib import Path

# They grow while a run goes on, and are on the disk before a checkpoint counts as made.
RECORDS = (
    *("events.out.tfevents.*", "metrics.csv", "metrics.jsonl", "log2_amax.txt"),
    "numerics/products.csv",
)


def records_in(folder: Path) -> list[str]:
    """Return the paths of a run's `RECORDS`, relative to its folder."""
    found = [path for pattern in RECORDS for path in sorted(folder.glob(pattern))]
    return [str(path.relative_to(folder)) for path in found]
