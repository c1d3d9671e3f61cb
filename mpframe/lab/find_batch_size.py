"""The largest micro-batch that fits in memory, by trying: doubled until memory ends.

Each size trains two steps, and all is undone in the end. The first allocates the optimizer's state,
and the second needs it beside the activations. Then the size halfway to the one that failed is
tried. The suggestion is a third less than the largest that fit, because other batches may need
more, for longer texts or when freed memory is in pieces.

On a CPU memory seldom ends in an error, because the system ends the process. So the search ends at
the size of the training set, and before a size that would need more memory than the machine has.
"""

import gc
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from mpframe.core.callback import Batch
from mpframe.core.errors import MpframeError, UserCodeError
from mpframe.core.ranges import require_whole
from mpframe.core.tree import device_of
from mpframe.tracking.environment import peak_memory
from mpframe.training.rollback import rollback
from mpframe.training.trainer import Trainer

log = logging.getLogger(__name__)

_STEPS = 2
# The CPU's allocator has no class of errors for it.
_OF_CPU = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")


@dataclass
class MemorySearch:
    """The sizes that were tried."""

    most: int  # samples in the training set
    fits: list[int] = field(default_factory=list)
    fails: list[int] = field(default_factory=list)

    @property
    def suggestion(self) -> int | None:
        """A third less than the largest that fit, rounded down, or None if memory never ended.

        From 16 samples on it is a multiple of 8, as tensor cores prefer.
        """
        if not self.fails:
            return None
        size = max(1, max(self.fits) * 2 // 3)
        return size - size % 8 if size >= 16 else size

    def describe(self) -> str:
        """Say what to type, and how sure it is."""
        largest = max(self.fits)
        if self.suggestion is None:
            return (
                f"all {self.most} training samples fit in one batch, so memory does not limit "
                "dataset.batch_size"
            )
        return (
            f"dataset.batch_size={self.suggestion} ({largest} fit in {_STEPS} steps, "
            f"{min(self.fails)} did not; a third of {largest} is left free for larger batches)"
        )


def find_batch_size(
    trainer: Trainer, load: Callable[[int], Batch], first: int, most: int
) -> MemorySearch:
    """Find the largest micro-batch that fits, and leave the trainer as it was.

    Args:
        trainer: before its training.
        load: makes a batch of so many samples.
        first: samples to begin with, 1 to `most`. If they do not fit, it is halved.
        most: samples in the training set.

    Raises:
        MpframeError: not even one sample fits.
    """
    require_whole("find_batch_size: first", first, least=1)
    search = MemorySearch(most)
    with rollback(trainer):
        _search(trainer, load, min(first, most), search)
    return search


def _search(
    trainer: Trainer, load: Callable[[int], Batch], size: int, search: MemorySearch
) -> None:
    """Halve the first size until one fits, double it until one fails, and try one between."""
    while not _try(trainer, load, size, search):
        if size == 1:
            raise MpframeError(
                "trainer.find=batch_size: not even one sample fits in memory; use "
                "trainer.recompute, trainer.parallel=fsdp, or a smaller model"
            )
        size //= 2
    while not search.fails and size < search.most:
        size = min(2 * size, search.most)
        _try(trainer, load, size, search)
    halfway = (max(search.fits) + min(search.fails, default=0)) // 2
    if halfway > max(search.fits):
        _try(trainer, load, halfway, search)


def _try(trainer: Trainer, load: Callable[[int], Batch], size: int, search: MemorySearch) -> bool:
    """Try a size, and note whether it fits."""
    fits = _has_room(search, size, trainer) and _fits(trainer, load, size)
    trainer.optimizer.zero_grad()
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.memory.empty_cache()
    (search.fits if fits else search.fails).append(size)
    says = "fits" if fits else "does not fit"
    log.info("batch size %d %s, %.2f GiB at most so far", size, says, peak_memory() / 2**30)
    return fits


def _has_room(search: MemorySearch, size: int, trainer: Trainer) -> bool:
    """Return False on a CPU if the memory, grown with the size, would be more than there is."""
    if device_of(trainer.model).type != "cpu" or not search.fits or not hasattr(os, "sysconf"):
        return True
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return peak_memory() * size / max(search.fits) < machine


def _fits(trainer: Trainer, load: Callable[[int], Batch], size: int) -> bool:
    """Return whether steps on a batch of this size fit. Other errors are raised."""
    batches = min(2, trainer.plan.accumulate)  # More of them need no more memory.
    try:
        trainer.model.train()
        batch = load(size)
        for _ in range(_STEPS):
            trainer.train_step(*[batch] * batches)
        trainer.read_verdicts()  # Waits for the device, whose error may come late.
    except (RuntimeError, MemoryError, UserCodeError) as error:
        # The error holds the frames, and these hold the batch: it must end before memory is freed.
        if not _is_out_of_memory(error):
            raise
        return False
    return True


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ended, in mpframe's code or a user's."""
    cause = error.__cause__ if isinstance(error, UserCodeError) else error
    if isinstance(cause, torch.OutOfMemoryError | MemoryError):
        return True
    return any(words in str(cause) for words in _OF_CPU)
