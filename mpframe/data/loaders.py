"""The loader of a dataset, of a stream, or of a task's training data."""

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from mpframe.core.errors import DataError
from mpframe.data.loading import Loader
from mpframe.data.task import Task


def make_loader(
    dataset: Any, batch_size: int, *, batches_per_epoch: int | None = None, **options: Any
) -> Loader:
    """Make the loader of a dataset or of a stream, with the options of `Loader`.

    A stream has its own order, so that `shuffle` is not used. With `drop_last` it begins again when
    it ends, and an epoch is `batches_per_epoch`. Without, it is read once.
    """
    if is_stream(dataset):
        from mpframe.data.streaming import StreamLoader  # seldom needed

        del options["shuffle"]
        endless = options.pop("drop_last", False)
        return StreamLoader(
            dataset, batch_size, endless=endless, batches_per_epoch=batches_per_epoch, **options
        )
    if batches_per_epoch is not None:
        raise DataError(
            f"dataset: its Task has batches_per_epoch={batches_per_epoch}, which is for streams, "
            f"and {type(dataset).__name__} has a length; leave it out"
        )
    return Loader(dataset, batch_size, **options)


def training_loader(task: Task, batch_size: int, seed: int, **options: Any) -> Loader:
    """Make the loader of a task's training data, shuffled and in whole batches only."""
    options |= {"seed": seed, "collate": task.collate, "batches_per_epoch": task.batches_per_epoch}
    return make_loader(task.train, batch_size, shuffle=True, drop_last=True, **options)


def is_stream(dataset: Any) -> bool:
    """Whether samples come in the order of an iterator, or are in batches already."""
    if isinstance(dataset, IterableDataset | DataLoader):
        return True
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
