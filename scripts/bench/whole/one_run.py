"""One run of one trainer in this process, which prints the time of its loop as JSON.

Usage: python -m bench.whole.one_run JSON, the arguments of `run` by name.

Each has a process, as a whole run begins with a new one, and leaves the next one no memory, threads
or warm code.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from bench.whole.loop_time import LoopTime
from bench.whole.workloads import WORKLOADS

OURS = "mpframe"


def run(workload: str, sizes: Mapping[str, int], trainer: str, folder: str) -> LoopTime:
    """Train.

    Args:
        workload: one of `WORKLOADS`.
        sizes: its arguments.
        trainer: OURS, or one of `trainers.TRAINERS`.
        folder: what is logged goes there.
    """
    work = WORKLOADS[workload](**sizes)
    torch.set_num_threads(1)
    if trainer == OURS:
        from bench.whole import ours

        return ours.train(work, Path(folder))
    from bench.whole.trainers import TRAINERS  # Its imports are no part of our process.

    return TRAINERS[trainer][1](work, Path(folder)).time


if __name__ == "__main__":
    print(json.dumps(asdict(run(**json.loads(sys.argv[1])))))
