"""Several processes, and a GPU.

distributed: two processes with one core each, beside DistributedDataParallel by hand and beside
one process. Scaling efficiency is the step of one process with its batch over the step of two with
such a batch each: 1 if the second process cost no time at all.

cuda: a train step beside a hand-written torch.amp loop. Both train ResNet-18 in float16 with fused
AdamW, loss scaling and clipping. A step should queue its work and go on. Each wait for the device
(`.item()`, `bool(tensor)`, a copy to the host) leaves it idle. They are counted with
`torch.cuda.set_sync_debug_mode`.
"""

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.child import run_python
from bench.measure import Competitor, Times, race, ratio, timed
from bench.step.competitors import MAX_NORM
from bench.step.on_ranks import BY_HAND, SINGLE_PROCESS, STEPS
from bench.step.workloads import WORKLOADS
from bench.table import Claim, Table
from mpframe.core.loss_scaling import Backoff
from mpframe.core.objective import supervised
from mpframe.precision.policy import has_native_half
from mpframe.precision.precision import Precision
from mpframe.training.plan import Plan
from mpframe.training.trainer import Trainer
from mpframe.workloads.images import resnet18

PROCESSES = 2
MOST = 1.03  # times the step by hand

SIZES: dict[str, dict[str, int]] = {
    "resnet18": {"width": 16},
    "transformer": {"vocab_size": 4096, "depth": 4, "width": 256},
}
"""The models, each with the sizes of one process."""

_BESIDE = {
    "mpframe fp32": BY_HAND["fp32"],
    "mpframe amp bfloat16": BY_HAND["bfloat16"],
    "mpframe amp bfloat16, torch's casts": BY_HAND["bfloat16"],  # What the ranks add to one.
}


def distributed_tables(
    rounds: int, folder: Path, workloads: Mapping[str, Mapping[str, int]] = SIZES, steps: int = 5
) -> list[Table]:
    """A table for each workload.

    Args:
        rounds: measured rounds, >= 1.
        folder: where the processes run.
        workloads: the sizes of each, by its name.
        steps: per turn.
    """
    return [_of_workload(name, sizes, rounds, folder, steps) for name, sizes in workloads.items()]


def _of_workload(
    name: str, sizes: Mapping[str, int], rounds: int, folder: Path, steps: int
) -> Table:
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
    return [
        Claim.between(times, name, hand, MOST) for name, hand in _BESIDE.items() if hand in times
    ]


def efficiencies(times: Times) -> list[str]:
    """A line for each step that one process takes as well."""
    lines = []
    for alone in (name for name in times if name.endswith(SINGLE_PROCESS)):
        together = alone.removesuffix(SINGLE_PROCESS)
        found = ratio(times, alone, together)
        spread = f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f})"
        lines.append(f"scaling efficiency, {together}: {spread}")
    return lines


HAND = "torch.amp by hand"

Batch = tuple[Tensor, Tensor]
Step = Callable[[], Any]


def cuda_tables(
    rounds: int, folder: Path, batch: int = 256, width: int = 64, steps: int = 20
) -> list[Table]:
    """The step in float16, or a table that says that there is no GPU.

    Args:
        rounds: measured rounds, >= 1.
        folder: not used: nothing is written.
        batch: images.
        width: channels of the first stage.
        steps: per turn.
    """
    setting = f"Batch {batch}, width {width}, 3 x 32 x 32, fused AdamW, clipped to {MAX_NORM}."
    if not torch.cuda.is_available():
        return [Table("CUDA", setting, HAND, {}, notes=["skipped: no CUDA device"])]
    data = _batch(batch)
    competing = {
        HAND: torch_step(data, width),
        "mpframe amp float16": mpframe_step(data, "amp", width),
        "mpframe mixed float16": mpframe_step(data, "mixed", width),
    }
    times = race([Competitor(n, _synchronised(s, steps)) for n, s in competing.items()], rounds)
    notes = [
        f"{name}: {syncs_in(step)} waits for the device in a step, "
        f"{_peak_bytes(step) / 2**20:.0f} MiB at most"
        for name, step in competing.items()
    ]
    return [Table("CUDA", setting, HAND, times, notes=notes)]


def torch_step(data: Batch, width: int) -> Step:
    """One step with autocast and GradScaler."""
    model, optimizer = _parts(width)
    scaler = torch.amp.GradScaler("cuda")
    loss_function = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = loss_function(model(data[0]), data[1])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()

    return step


def mpframe_step(data: Batch, mode: str, width: int) -> Step:
    """One step of the trainer."""
    precision = Precision(mode, "float16")
    model, optimizer = precision.prepare(*_parts(width))
    scaler, plan = Backoff().to("cuda"), Plan(clip_norm=MAX_NORM)
    objective = supervised(nn.CrossEntropyLoss())
    trainer = Trainer(model, optimizer, objective, precision, scaler=scaler, plan=plan)
    return lambda: trainer.train_step(data)


def syncs_in(step: Step) -> int:
    """How often one call of `step` makes the host wait for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)


def _peak_bytes(step: Step) -> int:
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated()


def _synchronised(step: Step, steps: int) -> Callable[[], float]:
    """A turn that ends when the device has finished, not when all is queued."""

    def run() -> None:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()

    turn = timed(run)
    return lambda: turn() / steps


def _parts(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = resnet18(classes=10, width=width).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def _batch(size: int) -> Batch:
    return torch.randn(size, 3, 32, 32).cuda(), torch.randint(0, 10, (size,)).cuda()
