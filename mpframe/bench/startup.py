"""What a user waits for: help, a refused mistake, the first step; each as a new process.

Importing torch alone is the baseline. Help and a mistake are answered without it.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mpframe.bench.measure import Competitor, race
from mpframe.bench.table import Table

_TRAIN = ["-m", "mpframe.launch"]
IMPORT_TORCH = "import torch"


def tables(rounds: int, folder: Path) -> list[Table]:
    """The waits at start-up.

    Args:
        rounds: measured rounds, >= 1.
        folder: not used: runs go into a temporary folder.
    """
    with tempfile.TemporaryDirectory() as scratch:
        first_step = ["-m", "mpframe.bench.first_step", "trainer.progress=false"]
        commands = {
            IMPORT_TORCH: (["-c", "import torch"], 0),
            "--help": ([_SCRIPT, "--help"], 0),
            "a refused typo": ([_SCRIPT, "trainer.max_stepz=1"], 1),
            "first step of the default run": ([*first_step, f"hydra.run.dir={scratch}/run"], 0),
        }
        times = race([_competitor(name, *command) for name, command in commands.items()], rounds)
    return [Table("Start-up", "A new process each, to its end.", IMPORT_TORCH, times)]
