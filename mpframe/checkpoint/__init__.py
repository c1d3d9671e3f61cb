"""Checkpoints: folders that appear whole or not at all, and are verified before they are read.

    checkpoints/step_00001200/state.pt       everything that can change the run's future
                              config.yaml    the resolved options, to read and to compare
                              manifest.json  format version, facts, size and SHA-256 of each file

Begin with folder.py (names, the manifest, which checkpoints stay), then state.py, whose `Snapshot`
writing.py and reading.py handle. untrusted.py refuses damaged and crafted files. init_from.py fits
other weights to a model; export.py and export_graph.py write files for other programs.
training/callbacks/checkpoints.py decides when a run saves, run/resume.py how it resumes.

Imports torch and, of mpframe, `core` and `files`: no trainer and no options.
"""

from mpframe.checkpoint.folder import (
    FOLDER,
    all_in,
    identity_of,
    new_identity,
    newest,
    refuse_mixed,
)
from mpframe.checkpoint.reading import load, read
from mpframe.checkpoint.state import (
    OTHER_RANKS,
    Snapshot,
    of_other_ranks,
    of_rank,
    restore_rng,
    rng_state,
)
from mpframe.checkpoint.writing import save, save_as, save_together

__all__ = [
    "FOLDER",
    "OTHER_RANKS",
    "Snapshot",
    "all_in",
    "identity_of",
    "load",
    "new_identity",
    "newest",
    "of_other_ranks",
    "of_rank",
    "read",
    "refuse_mixed",
    "restore_rng",
    "rng_state",
    "save",
    "save_as",
    "save_together",
]
