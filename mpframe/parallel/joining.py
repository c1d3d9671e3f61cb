"""Joins the ranks for one run, and leaves them however it ends."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mpframe.core.comm import SINGLE_PROCESS, Comm
from mpframe.parallel.launch import place, refuse_misfit

if TYPE_CHECKING:
    import torch


@contextmanager
def joined(
    parallel: str | None, device: "Callable[[], torch.device]", timeout: float
) -> Iterator[Comm]:
    """Within the block the ranks that torchrun started are one comm.

    At its end each waits for all others: a rank that left first could abort one that still works.
    After an error it does not wait.

    Args:
        parallel: `none`, `ddp`, `fsdp`, or None for the one that fits. Whoever joins several ranks
            checks it afterwards, when it is known to be the same on all of them.
        device: what this rank computes on; asked if there are several.
        timeout: seconds without an answer of another rank that end the run, > 0.

    Raises:
        ConfigError: `parallel` does not fit a process alone.
        LostRankError: a rank does not come.
    """
    if place().size == 1:
        refuse_misfit(parallel)
        yield SINGLE_PROCESS
        return
    from mpframe.parallel.process_group import ProcessGroup  # Loads torch.distributed.

    group = ProcessGroup(place(), device(), timeout)
    try:
        yield group
        group.barrier()
    finally:
        group.leave()
