"""What a user waits for: the help, a refused mistake, the first step; each as a new process.

Importing torch alone is the baseline: help and a mistake are answered without it.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.child import run_python
from bench.measure import Competitor, Spread, Times, race, timed
from bench.table import Claim, Table

IMPORT_TORCH = "import torch"
MOST = 1.5  # times a step by hand
MOST_OF_TYPO = 0.3  # seconds

_PROGRAM = ["-c", "from mpframe.cli.commands.train import main; main()"]  # as scripts/train.py
# torch imports its compiler when the first optimizer is made: part of anybody's first step.
_ADAMW_STEP = """
import torch
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.AdamW([weight])
weight.sum().backward()
optimizer.step()
"""
_STEP, _TYPO = "import torch, one step of AdamW", "a refused typo"
_RUN = "default run, to the end of its first step"
_FIRST_STEP = ["-m", "bench.first_step", "callbacks.progress_bar=null", "hydra.run.dir=run"]
# What is measured: the command, and the exit code it must have.
_COMMANDS: dict[str, tuple[list[str], int]] = {
    IMPORT_TORCH: (["-c", "import torch"], 0),
    _STEP: (["-c", _ADAMW_STEP], 0),
    "--help": ([*_PROGRAM, "--help"], 0),
    _TYPO: ([*_PROGRAM, "trainer.max_stepz=1"], 1),
    _RUN: (_FIRST_STEP, 0),
}


def tables(rounds: int, folder: Path, names: Sequence[str] = tuple(_COMMANDS)) -> list[Table]:
    """The waits at start-up.

    Args:
        rounds: measured rounds, >= 1.
        folder: not used: runs go into a temporary folder.
        names: what is measured, `IMPORT_TORCH` among it.
    """
    with tempfile.TemporaryDirectory() as scratch:
        times = race([_competitor(name, Path(scratch)) for name in names], rounds)
    setting = "A new Python process each, from its start to its end."
    return [Table("Start-up", setting, IMPORT_TORCH, times, _claims(times))]


def _claims(times: Times) -> list[Claim]:
    claims = []
    if _TYPO in times:
        claims.append(Claim(f"{_TYPO}, seconds", Spread.of(times[_TYPO]), MOST_OF_TYPO))
    if _RUN in times and _STEP in times:
        claims.append(Claim.between(times, _RUN, _STEP, MOST))
    return claims


def _competitor(name: str, scratch: Path) -> Competitor:
    arguments, expected = _COMMANDS[name]

    def run() -> None:
        run_python(arguments, scratch, f"startup: {name!r}", expected)

    return Competitor(name, timed(run))
