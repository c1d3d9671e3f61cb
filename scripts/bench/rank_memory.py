"""How much memory a rank takes to start, and to take two steps, beside a rank with a tiny model.

Usage, in scripts/: python -m bench.rank_memory [n]. It trains a GPT with 74 million weights (295
MB) on the CPU with AdamW, by 2 and 4 ranks that shard it, n times (3), and prints a table. The
table has the largest rank's peak of resident memory (VmHWM in /proc/self/status, Linux). glibc
is told to give freed memory back at once, because what it keeps for later is not needed.
"""

import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.child import run_python
from mpframe.core.callback import Batch, Callback
from mpframe.core.step_result import StepResult

LARGE = ["model.depth=15", "model.heads=10", "model.width=640"]
TINY = ["model.depth=1", "model.heads=1", "model.width=8"]
_COMMON = [
    "experiment=gpt",
    "device=cpu",
    "trainer.parallel=fsdp",
    "trainer.max_steps=2",
    "dataset.batch_size=4",
    "dataset.context=16",
    "dataset.eval_windows=4",
    "dataset.workers=0",
    "hydra.run.dir=run",
    "+callbacks.peak._target_=bench.rank_memory.Peak",
]
_RETURN_FREED = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "MALLOC_ARENA_MAX": "1",
}
_MARK = "peak memory in kB:"


class Peak(Callback):
    """Prints this rank's peaks, in kB, before the first step and after the last one."""

    def __init__(self) -> None:
        self._peaks: list[int] = []

    def on_step_begin(self, trainer: Any, batches: Sequence[Batch]) -> None:
        """Note the peak of the start."""
        self._peaks = self._peaks or [peak()]

    def on_optimizer_step(self, trainer: Any, result: StepResult) -> None:
        """Note the peak of the steps so far."""
        self._peaks[1:] = [peak()]

    def on_train_end(self, trainer: Any) -> None:
        """Print them."""
        print(_MARK, *self._peaks, flush=True)


def peak() -> int:
    """Return the largest resident memory that this process has had, in kB."""
    facts = Path("/proc/self/status").read_text().splitlines()
    return next(int(fact.split()[1]) for fact in facts if fact.startswith("VmHWM"))


def measure(ranks: int, options: Sequence[str]) -> list[int]:
    """Return the largest rank's peaks at the start and after two steps, in kB."""
    program = str(Path(__file__).parents[1] / "train.py")
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), program]
    with tempfile.TemporaryDirectory() as folder:
        said = run_python([*start, *_COMMON, *options], Path(folder), f"{ranks} ranks")
    lines = [line.partition(_MARK)[2].split() for line in said.splitlines() if _MARK in line]
    return [max(int(line[n]) for line in lines) for n in (0, 1)]


def table(repeats: int) -> str:
    """Return the medians over the repeats above a tiny model's peaks, in MB, as Markdown."""
    lines = ["| | at the start | after 2 steps |", "| --- | --- | --- |"]
    for ranks in (2, 4):
        tiny = measure(ranks, TINY)
        large = [measure(ranks, LARGE) for _ in range(repeats)]
        columns = [[(row[n] - tiny[n]) / 1e3 for row in large] for n in (0, 1)]
        cells = [f"{statistics.median(c):.0f} ({min(c):.0f} to {max(c):.0f})" for c in columns]
        lines.append(f"| {ranks} ranks | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    os.environ.update(_RETURN_FREED)
    print(table(int(sys.argv[1]) if len(sys.argv) > 1 else 3))
