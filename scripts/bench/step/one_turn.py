"""One turn of one competitor in this process: its time, its laps, its memory.

Usage: python -m bench.step.one_turn JSON, the arguments of `measure` by name.

A process for each turn, since memory can be measured in no other way: a peak is one of the whole
process, and what an allocator has kept from the one before is there for the next.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench import measure as measuring
from bench.step.competitors import PROFILE_STEPS, RECIPE_STEPS, SGD_STEPS, STEPS
from bench.step.laps import Laps
from bench.step.workloads import WORKLOADS
from mpframe.training.memory import keep_freed_memory, to_channels_last
from mpframe.training.memory import recompute as recompute_modules

ALL_STEPS = {**STEPS, **RECIPE_STEPS, **SGD_STEPS, **PROFILE_STEPS}
WARMUP = 2  # steps: the first one makes the optimizer's state

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class OneTurn:
    """One measured turn."""

    seconds: float  # per step
    laps: dict[str, float]  # of them, forward, backward and step
    # The most that was resident at once, above what the imports take, or None if the system does
    # not tell.
    bytes_per_parameter: float | None


def measure(
    workload: str,
    sizes: Mapping[str, int],
    name: str,
    threads: int,
    steps: int,
    keep_memory: bool = False,
    channels_last: bool = False,
    recompute: Sequence[str] = (),
) -> OneTurn:
    """Take steps.

    Args:
        workload: one of `WORKLOADS`.
        sizes: its arguments.
        name: one of ALL_STEPS.
        threads: that torch computes with.
        steps: that count, >= 1, after `WARMUP` that do not.
        keep_memory: what is freed, as `mpframe train` does.
        channels_last, recompute: as the options of `trainer`.
    """
    _import_all()
    if keep_memory:
        keep_freed_memory()
    before = status_bytes("VmRSS")
    work, laps = WORKLOADS[workload](**sizes), Laps()
    if channels_last:
        to_channels_last(work.model)
    recompute_modules(work.model, recompute)
    step = ALL_STEPS[name](work, laps)
    with measuring.threads(threads):
        for _ in range(WARMUP):
            step()
        laps.clear()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        seconds = (time.perf_counter() - began) / steps
    peak = status_bytes("VmHWM")
    used = None if before is None or peak is None else (peak - before) / work.parameters
    return OneTurn(seconds, {lap: total / steps for lap, total in laps.seconds.items()}, used)


def status_bytes(key: str) -> int | None:
    """`VmRSS`, the memory that is resident now, or `VmHWM`, the most so far, or None without /proc.

    Not ru_maxrss, which in a new process begins at the peak of the one that started it.
    """
    if not _STATUS.exists():
        return None
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return int(lines[key].split()[0]) * 1024


def _import_all() -> None:
    """Torch imports its compiler when the first optimizer is made: no memory of a parameter."""
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])


if __name__ == "__main__":
    print(json.dumps(asdict(measure(**json.loads(sys.argv[1])))))
