"""What torchrun tells each process of its place, by variables of the environment.

    RANK, WORLD_SIZE             which process of how many
    LOCAL_RANK                   which one on this machine: its CUDA device
    MASTER_ADDR, MASTER_PORT     where the ranks find each other

Without them, or with a world size of 1, there is one process. It is read without torch. `joined`
joins the ranks for one run.

An error that many ranks meet is printed once, by rank 0, or else by the only rank that met it.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpframe.core.errors import ConfigError, LostRankError, MpframeError

if TYPE_CHECKING:
    import torch

    from mpframe.core.comm import Comm

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
START = "torchrun --nproc-per-node 2 scripts/train.py ..."


@dataclass(frozen=True)
class Place:
    """Where a process stands.

    Attributes:
        rank: its number, 0 to size - 1.
        size: how many processes there are, >= 1.
        local_rank: its number on this machine.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0


def place() -> Place:
    """The place of this process, as torchrun says it; the only one without torchrun."""
    if not all(name in os.environ for name in _VARIABLES):
        return Place()
    rank, size, local_rank = (int(os.environ[name]) for name in _VARIABLES[:3])
    return Place(rank, size, local_rank) if size > 1 else Place()


def _tasks_of_srun() -> int:
    """How many processes srun has started beside this one, itself included.

    SLURM_NTASKS does not say it: a batch script without srun has it, too.
    """
    rank = int(os.environ.get("SLURM_PROCID", 0))
    return max(int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)), rank + 1)


def refuse_misfit(parallel: str | None) -> None:
    """Refuse a kind of parallelism that does not fit how this process was started.

    Args:
        parallel: `none`, `ddp`, `fsdp`, or None for the one that fits.

    Raises:
        ConfigError: `ddp` or `fsdp` with one process, `none` with several, or srun has started
            several without torchrun.
    """
    size = place().size
    tasks = _tasks_of_srun()
    if parallel != "none" and size == 1 and tasks > 1:
        raise ConfigError(
            f"srun has started {tasks} processes, and each would train by itself; let it start one "
            f"torchrun on each machine: srun --ntasks-per-node 1 {START}; or, for runs of their "
            "own, set trainer.parallel=none"
        )
    if parallel in ("ddp", "fsdp") and size == 1:
        raise ConfigError(
            f"trainer.parallel={parallel}: needs several processes; start it as {START}"
        )
    if parallel == "none" and size > 1:
        raise ConfigError(
            f"trainer.parallel=none: torchrun has started {size} processes, and each would train "
            "the same; use trainer.parallel=ddp, or start one process"
        )


_WAIT = 3.0  # seconds in which rank 0 comes to the same error


def line_of(error: MpframeError) -> str | None:
    """What this rank is to print of the error that ends it; None: another rank prints it.

    With one process it is the error's text. The line of a rank above 0 begins with its number.
    """
    own = place()
    text = str(error)
    if own.size == 1:
        return text
    line = text if own.rank == 0 or isinstance(error, LostRankError) else f"rank {own.rank}: {text}"
    from mpframe.parallel.process_group import answer_within  # torch comes in here.

    # The store may be gone: then it is said twice.
    said = answer_within(3 * _WAIT, lambda: _said(text, line, wait=own.rank > 0))
    return None if said else line


def _said(text: str, line: str, wait: bool) -> bool:
    """Whether another rank prints it; if not, this one tells the others that it does."""
    from mpframe.parallel.process_group import store_at

    store = store_at(place(), _WAIT, "said")
    known = (text, line, text.removeprefix("rank 0: "))
    limit = time.monotonic() + (_WAIT if wait else 0.0)
    while time.monotonic() < limit:
        if any(store.check([own]) for own in known):
            return True
        time.sleep(0.1)
    # By both names: rank 0 may come to the same error after all, later than anybody waits.
    return max(store.add(own, 1) for own in {line, text}) > 1


@contextmanager
def joined(
    parallel: str | None, device: "Callable[[], torch.device]", timeout: float
) -> "Iterator[Comm]":
    """Context manager in which the ranks that torchrun started are one comm.

    At its end each waits for all others: a rank that left first could abort one that still works.
    After an error it does not wait.

    Args:
        parallel: `none`, `ddp`, `fsdp`, or None for the one that fits. Several ranks check it
            later, when it is known to be the same on all of them.
        device: returns what this rank computes on; called if there are several.
        timeout: seconds without an answer of another rank that end the run, > 0.

    Raises:
        ConfigError: `parallel` does not fit a single process.
        LostRankError: a rank does not come.
    """
    if place().size == 1:
        refuse_misfit(parallel)
        from mpframe.core.comm import SINGLE_PROCESS  # It loads torch.

        yield SINGLE_PROCESS
        return
    from mpframe.parallel.process_group import ProcessGroup

    group = ProcessGroup(place(), device(), timeout)
    try:
        yield group
        group.barrier()
    finally:
        group.leave()
