"""Checkpoints: folders that appear whole or not at all, and are verified before they are read.

    checkpoints/step_00001200/state.pt       everything that can change the run's future
                              config.yaml    the resolved options, to read and to compare
                              manifest.json  format version, facts, size and SHA-256 of each file

Begin with layout.py (names), then writing.py and reading.py. A `Snapshot` is what both handle;
parts.py is for ranks that divide the weights: each writes its own in a file beside state.pt;
rank_states.py adds what each rank has of its own; untrusted.py refuses damaged and crafted files;
retention.py decides which checkpoints stay; saved_weights.py takes the weights out of a state;
init_from/ fits weights of others to a model; export/ writes files for others.
training/callbacks/checkpoints.py decides when a run saves, run/resume/ how it resumes.

Imports torch and, of mpframe, `distributed`, `files`, `tree` and `errors`: no trainer and no
options.
"""

from mpframe.checkpoint.identity import identity_of, new_identity, refuse_mixed
from mpframe.checkpoint.layout import FOLDER, all_in, newest
from mpframe.checkpoint.random_state import restore_rng, rng_state
from mpframe.checkpoint.rank_states import OTHER_RANKS, of_other_ranks, of_rank
from mpframe.checkpoint.reading import load, read
from mpframe.checkpoint.snapshot import Snapshot
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
