"""Checkpoints: folders that appear whole or not at all, and are verified before they are read.

    checkpoints/step_00001200/state.pt       everything that can change the run's future
                              config.yaml    the resolved options, to read and to compare
                              manifest.json  format version, facts, size and SHA-256 of each file

Begin with folder.py (names, the manifest, which checkpoints are kept), then state.py, whose
`Snapshot` saving.py writes and reads. untrusted.py loads a file without running its code.
init_from.py fits other weights to a model. export.py and export_graph.py write files for other
programs, and huggingface.py a folder. training/callbacks/checkpoints.py decides when to save,
run/resume.py how to resume.

This package imports torch, `core` and `files`: no trainer and no options.
"""

from mpframe.checkpoint.folder import all_in, newest
from mpframe.checkpoint.saving import load, read, save
from mpframe.checkpoint.state import Snapshot, restore_rng, rng_state

__all__ = ["Snapshot", "all_in", "load", "newest", "read", "restore_rng", "rng_state", "save"]
