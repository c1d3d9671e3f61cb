"""Steps that the ranks of one torchrun take together, beside the steps of rank 0 by itself.

Usage: torchrun --nproc-per-node 2 -m bench.step.on_ranks JSON, the arguments of `measure`
by name. Rank 0 prints the times.

All competitors take turns in the same processes, which keep freed memory as `mpframe train` does. A
turn begins and ends with all ranks, so it takes as long as the slowest of them.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from bench.measure import Competitor, race, threads
from bench.step.competitors import Step, by_hand, by_trainer
from bench.step.laps import Laps
from bench.step.workloads import WORKLOADS, Workload
from mpframe.core.comm import Comm
from mpframe.training.memory import keep_freed_memory
from mpframe.training.parallel.launch import init_comm
from mpframe.training.parallel.place import place

BY_HAND = {"fp32": "DistributedDataParallel fp32", "bfloat16": "DistributedDataParallel bfloat16"}
SINGLE_PROCESS = ", one process"
_AMP = {"mode": "amp", "half": "bfloat16"}
_TRAINED: dict[str, dict[str, Any]] = {
    "mpframe fp32": {"mode": "fp32"},
    "mpframe amp bfloat16": _AMP,
    "mpframe amp bfloat16, torch's casts": {**_AMP, "torchs_casts": True},
    "mpframe mixed bfloat16": {"mode": "mixed", "half": "bfloat16"},
    "mpframe mixed float16": {"mode": "mixed", "half": "float16"},
}


def measure(
    workload: str, sizes: Mapping[str, int], names: Sequence[str], rounds: int, steps: int
) -> dict[str, list[float]]:
    """Seconds per step of each round, by competitor, on every rank with one thread each.

    Args:
        workload: one of `WORKLOADS`, with the batch of one rank.
        sizes: its arguments.
        names: some of `STEPS`.
        rounds: measured rounds, >= 1.
        steps: per turn.
    """
    with init_comm(None, lambda: torch.device("cpu"), 300) as comm, threads(1):
        works = {name: WORKLOADS[workload](**sizes) for name in names}
        taken = {name: STEPS[name](work, Laps(), comm) for name, work in works.items()}
        turns = [Competitor(name, _turn(step, steps, comm)) for name, step in taken.items()]
        return race(turns, rounds)


def _turn(step: Step, steps: int, comm: Any) -> Callable[[], float]:
    def turn() -> float:
        comm.any(False)  # All ranks wait for each other.
        began = time.perf_counter()
        for _ in range(steps):
            step()
        comm.any(False)
        return (time.perf_counter() - began) / steps

    return turn


def _by_hand(work: Workload, laps: Laps, comm: Any, half: torch.dtype | None = None) -> Step:
    return by_hand(work, laps, half, parallel=DistributedDataParallel)


def _by_trainer(work: Workload, laps: Laps, comm: Any, **how: Any) -> Step:
    return by_trainer(work, laps, comm=comm, **how)


def _alone(work: Workload, laps: Laps, comm: Any, step: Any = by_trainer, **how: Any) -> Step:
    """Step on rank 0, while the others wait."""
    return step(work, laps, **how) if comm.is_main else lambda: None


STEPS: dict[str, Callable[[Workload, Laps, Comm], Step]] = {
    BY_HAND["fp32"]: _by_hand,
    BY_HAND["bfloat16"]: partial(_by_hand, half=torch.bfloat16),
    **{name: partial(_by_trainer, **how) for name, how in _TRAINED.items()},
    "mpframe fp32, after_backward": partial(_by_trainer, mode="fp32", reduce="after_backward"),
    **{f"{name}{SINGLE_PROCESS}": partial(_alone, **how) for name, how in _TRAINED.items()},
    f"{BY_HAND['bfloat16']}{SINGLE_PROCESS}": partial(_alone, step=by_hand, half=torch.bfloat16),
}
"""Who takes part, by the name in the tables."""


if __name__ == "__main__":
    keep_freed_memory()
    found = measure(**json.loads(sys.argv[1]))
    if place().rank == 0:
        print(json.dumps(found))
