"""Two processes with one core each: beside DistributedDataParallel by hand, and beside one process.

Scaling efficiency is the step of one process with its batch over that of two with such a batch
each: 1 if the second process cost no time at all.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from bench.child import run_python
from bench.measure import Times, ratio
from bench.step.competitors import MAX_NORM
from bench.step.on_ranks import BY_HAND, SINGLE_PROCESS, STEPS
from bench.step.workloads import WORKLOADS
from bench.table import Claim, Table
from mpframe.core.policy import has_native_half

PROCESSES = 2
MOST = 1.03  # times the step by hand

SIZES: dict[str, dict[str, int]] = {
    "resnet18": {"width": 16},
    "transformer": {"vocab_size": 4096, "depth": 4, "width": 256},
}
"""The models, each with the sizes of one process."""

_BESIDE = {"mpframe fp32": BY_HAND["fp32"], "mpframe amp bfloat16": BY_HAND["bfloat16"]}


def tables(
    rounds: int, folder: Path, workloads: Mapping[str, Mapping[str, int]] = SIZES, steps: int = 5
) -> list[Table]:
    """A table for each workload.

    Args:
        rounds: measured rounds, >= 1.
        folder: where the processes run.
        workloads: the sizes of each, by its name.
        steps: per turn.
    """
    return [_table(name, sizes, rounds, folder, steps) for name, sizes in workloads.items()]


def _table(name: str, sizes: Mapping[str, int], rounds: int, folder: Path, steps: int) -> Table:
    native = has_native_half("bfloat16")  # Where it is emulated, torch's own kernels are slow.
    names = [row for row in STEPS if native or "bfloat16" not in row]
    wanted = {"workload": name, "sizes": sizes, "names": names, "rounds": rounds, "steps": steps}
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
    words = [*torchrun, "-m", "bench.step.on_ranks", json.dumps(wanted)]
    times = json.loads(run_python(words, folder, f"distributed: {name!r}"))
    work = WORKLOADS[name](**sizes)
    setting = (
        f"{PROCESSES} processes, one thread each; {work.sizes} in each process, fused AdamW, "
        f"gradients clipped to {MAX_NORM}; all keep freed memory."
    )
    notes = efficiencies(times)
    return Table(work.title, setting, BY_HAND["fp32"], times, claims_of(times), notes)


def claims_of(times: Times) -> list[Claim]:
    """How the step is to compare with that by hand."""
    return [Claim.between(times, own, hand, MOST) for own, hand in _BESIDE.items() if hand in times]


def efficiencies(times: Times) -> list[str]:
    """A line for each step that one process takes alone, too."""
    lines = []
    for alone in (name for name in times if name.endswith(SINGLE_PROCESS)):
        own = alone.removesuffix(SINGLE_PROCESS)
        found = ratio(times, alone, own)
        spread = f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f})"
        lines.append(f"scaling efficiency, {own}: {spread}")
    return lines
