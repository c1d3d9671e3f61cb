"""How a run starts as one of several ranks, and how it ends.

`init_comm` joins the ranks that torchrun, srun or mpirun started for one run. Torch is loaded only
if there are several.

An error that many ranks meet is printed once, by rank 0, or else by the only rank that met it.
"""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mpframe.core.errors import ConfigError, LostRankError, MpframeError
from mpframe.training.parallel.place import address, keeps_store, missing, place

if TYPE_CHECKING:
    import torch

    from mpframe.core.comm import Comm

START = "torchrun --nproc-per-node 2 scripts/train.py ..."


def refuse_misfit(parallel: str | None) -> None:
    """Raise ConfigError unless `none`, `ddp` or `fsdp` (None: any) fits this process's start."""
    size, lacking = place().size, missing()
    if lacking and parallel != "none":
        given = [f"{n}={os.environ[n]}" for n in ("RANK", "WORLD_SIZE") if n in os.environ]
        raise ConfigError(
            f"{', '.join(given)}: says that there are other processes, and {', '.join(lacking)} "
            f"must be set as well; start them as {START}; or, for a run of this process only, set "
            "trainer.parallel=none"
        )
    if parallel in ("ddp", "fsdp") and size == 1:
        raise ConfigError(
            f"trainer.parallel={parallel}: needs several processes; start it as {START}"
        )
    if parallel == "none" and size > 1:
        raise ConfigError(
            f"trainer.parallel=none: {place().starter} has started {size} processes, and each "
            "would train the same; use trainer.parallel=ddp, or start one process"
        )


_WAIT = 3.0  # seconds in which rank 0 comes to the same error


def line_of(error: MpframeError) -> str | None:
    """Return the line this rank prints of the error that ends it, if no other rank prints it.

    With one process it is the error's text. The line of a rank above 0 begins with its number.
    """
    text, rank, size = str(error), place().rank, place().size
    if size == 1:
        return text
    if not address()[0]:  # All ranks meet this error, and cannot ask each other.
        return text if rank == 0 else None
    line = text if rank == 0 or isinstance(error, LostRankError) else f"rank {rank}: {text}"
    from mpframe.training.parallel.process_group import (  # torch comes in here.
        answer_within,
        store_at,
    )

    def ask() -> bool:
        store, said = store_at(place(), _WAIT, "said"), re.sub(r"^rank \d+: ", "", text)
        _wait_until(lambda: rank == 0 or store.check([said]))
        printed = store.add(said, 1) > 1  # Rank 0 may come to the error later than anybody waits.
        store.add("asked", 1)
        _wait_until(lambda: not keeps_store() or store.add("asked", 0) >= size)  # It ends with us.
        return printed

    return None if answer_within(3 * _WAIT, ask) else line  # Twice if the store is gone.


def _wait_until(happens: Callable[[], bool]) -> None:
    limit = time.monotonic() + _WAIT
    while not happens() and time.monotonic() < limit:
        time.sleep(0.1)


@contextmanager
def init_comm(
    parallel: str | None, device: "Callable[[], torch.device]", timeout: float
) -> "Iterator[Comm]":
    """Context manager in which the ranks that were started are one comm.

    At its end, unless by an error, each waits for all: one that left first could abort another.
    `device` is called if there are several, and a rank is lost after `timeout` seconds without an
    answer. ConfigError: `parallel` does not fit a single process (several check it later).
    """
    if place().size == 1:
        refuse_misfit(parallel)
        from mpframe.core.comm import SINGLE_PROCESS  # It loads torch.

        yield SINGLE_PROCESS
        return
    if not address()[0]:
        raise ConfigError(
            f"{place().starter} has started {place().size} processes on several machines, which do "
            "not know the first one; name it in MASTER_ADDR, by -x MASTER_ADDR=FIRST or -genv "
            "MASTER_ADDR FIRST"
        )
    from mpframe.training.parallel.process_group import ProcessGroup

    group = ProcessGroup(place(), device(), timeout)
    try:
        yield group
        group.max_of([0])  # Until every rank is here.
    finally:
        group.leave()
