"""`trainer.find=batch_size`: the micro-batch is doubled until memory ends.

Each size trains two steps: the first allocates the optimizer's state, and the second needs it
beside the activations. Then the size halfway to the one that failed is tried. The suggestion is a
third less than the largest that fit, because other batches may need more memory.

On a CPU memory seldom ends in an error, because the system ends the process. So the search ends at
the size of the training set, or 2^16 for a stream, and before a size that would need more memory
than the machine has.
"""

import gc
import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch

from mpframe.config.schema import Config
from mpframe.core.callback import Batch
from mpframe.core.errors import MpframeError, UserCodeError
from mpframe.core.tree import device_of
from mpframe.data.loading import Loader
from mpframe.data.task import Task, training_loader
from mpframe.lab.find import rollback
from mpframe.tracking.environment import peak_memory
from mpframe.training.trainer import Trainer

log = logging.getLogger(__name__)

_MOST_OF_A_STREAM = 2**16  # samples that are tried, as it has no size


def find_batch_size(
    trainer: Trainer, load: Callable[[int], Batch], first: int, most: int
) -> tuple[int, int]:
    """Return the largest size that fit, and the smallest that did not, `most` + 1 if all did.

    `load` makes a batch of so many samples, from `first` on, at most `most`. The trainer is left as
    it was. MpframeError: not even one sample fits.
    """
    fits, fails, size = 0, most + 1, min(first, most)
    with rollback(trainer):
        while fits < size < fails:
            halfway = fits > 0 and fails <= most
            if _has_room(trainer, size, fits) and _try(trainer, load, size):
                fits = size
            else:
                fails = size
            trainer.optimizer.zero_grad()
            gc.collect()
            if torch.accelerator.is_available():
                torch.accelerator.memory.empty_cache()
            log.info("%d samples %s", size, "fit" if fits == size else "do not fit in memory")
            if halfway or fails == 1:
                break
            size = min(2 * fits, most) if fails > most else (fits + fails) // 2
    if not fits:
        raise MpframeError(
            "trainer.find=batch_size: not even one sample fits in memory; use trainer.recompute, "
            "trainer.parallel=fsdp, or a smaller model"
        )
    return fits, fails


def _has_room(trainer: Trainer, size: int, fits: int) -> bool:
    """Return False on a CPU if the memory, grown with the size, would be more than there is."""
    if device_of(trainer.model).type != "cpu" or not fits or not hasattr(os, "sysconf"):
        return True
    return peak_memory() * size / fits < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _try(trainer: Trainer, load: Callable[[int], Batch], size: int) -> bool:
    """Return whether steps on a batch of this size fit. Errors other than of memory are raised."""
    try:
        batches = [load(size)] * min(2, trainer.plan.accumulate)  # More need no more memory.
        for _ in range(2):
            trainer.train_step(*batches)
        trainer.read_verdicts()  # Waits for the device, whose error may come late.
    except (RuntimeError, MemoryError, UserCodeError) as error:
        cause = error.__cause__ if isinstance(error, UserCodeError) else error
        on_cpu = "DefaultCPUAllocator: can't allocate memory" in str(cause)  # It has no class.
        if not (on_cpu or isinstance(cause, torch.OutOfMemoryError | MemoryError)):
            raise
        return False
    return True


def find(config: Config, trainer: Trainer, task: Task, train: Loader, folder: Path) -> str:
    """Find a run's batch size, and return what to type and how sure it is."""

    def load(size: int) -> Batch:
        return next(training_loader(task, size, config.run.seed).epoch(0))

    most = train.size or _MOST_OF_A_STREAM
    fits, fails = find_batch_size(trainer, load, config.data.batch_size, most)
    if fails > most:
        samples = f"all {most} training samples" if train.size else f"{most} samples of the stream"
        return f"{samples} fit, so memory does not limit dataset.batch_size"
    size = max(1, fits * 2 // 3)
    size -= size % 8 if size >= 16 else 0  # as tensor cores prefer
    return (
        f"dataset.batch_size={size} (two steps of {fits} fit and {fails} did not; a third is left)"
    )
