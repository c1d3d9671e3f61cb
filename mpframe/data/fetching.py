"""A batch of the samples that are asked for, in the main process or in a worker.

While a sample is read, the random generators are seeded by (seed, epoch, sample). A batch is found
to be finite on the host, before the model sees it.
"""

import copy
import math
import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate

from mpframe.core.errors import DataError, MpframeError, first_line
from mpframe.core.tree import fields_of, map_tensors
from mpframe.core.user_code import describe_error
from mpframe.data.samples import hash_key
from mpframe.data.workers import CurrentSamples
from mpframe.files.text import few

Collate = Callable[[list[Any]], Any]


class Fetcher(Dataset[Any]):
    """Batches of a map-style dataset. A worker writes into `current` which sample it is reading."""

    def __init__(
        self,
        dataset: Dataset[Any],
        seed: int,
        current: CurrentSamples,
        split: str,
        collate: Collate | None,
    ) -> None:
        # A TensorDataset draws no random numbers. Its rows are taken at once, as if collated.
        self._by_rows = type(dataset) is TensorDataset and collate is None
        self._dataset = dataset
        self._seed, self._current, self._split, self._collate = seed, current, split, collate
        self._epoch: int | None = None
        self._view: Any = dataset

    def __getitems__(self, request: list[int]) -> Any:
        """Return the batch, the error that prevented it, or None if no sample is asked for."""
        epoch, number, *indices = request
        if not indices:
            return None
        try:
            answer = self._fetch((epoch, number), indices)
        except MpframeError as error:  # Raised in a worker, it would be wrapped in a traceback.
            answer = error
        self._current.note()  # Not if the worker is ending: then its sample is to be reported.
        return answer

    def _fetch(self, place: tuple[int, int], indices: list[int]) -> Any:
        epoch = place[0]
        samples: list[Any] = []
        if epoch != self._epoch:
            with blame_data(f"epoch {epoch} cannot be read"):
                self._view, self._epoch = at_epoch(self._dataset, self._seed, epoch), epoch
        if self._by_rows or hasattr(self._view, "fetch_batch"):
            self._current.note(indices[0])
            with blame_data("cannot be read", indices):
                if self._by_rows:
                    chosen = torch.tensor(indices)
                    batch = tuple(tensor[chosen] for tensor in self._view.tensors)
                else:
                    batch = self._view.fetch_batch(indices)
        else:
            with keep_generators():
                states = hash_key(self._seed, epoch, indices).tolist()
                for index, state in zip(indices, states, strict=True):
                    self._current.note(index)
                    seed_generators(state)
                    with blame_data(f"sample {index} cannot be read"):
                        samples.append(self._view[index])
                batch = stack(samples, indices, self._collate)
        return require_finite(batch, indices, self._split, place, samples)


def stack(samples: list[Any], indices: Sequence[int], collate: Collate | None) -> Any:
    """Make a batch of samples, by `collate` or torch's default_collate."""
    if collate is not None:
        with blame_data("cannot be collated", indices, "fix the collate of its Task"):
            return collate(samples)
    try:
        batch = default_collate(samples)
    except Exception as error:  # The samples are whatever the dataset gave.
        raise DataError(
            f"dataset: {name_samples(indices)} do not stack into one batch "
            f"({first_line(error)}); give every sample the same shapes, or give its Task a "
            "collate that makes a batch of a list of samples"
        ) from error
    return tuple(batch) if type(batch) is list else batch  # torch's list of a tuple's parts


def seed_generators(state: int) -> None:
    """Seed torch's CPU generator, Python's and numpy's, from which a sample's code may draw."""
    torch.default_generator.manual_seed(state)
    random.seed(state)
    np.random.seed(state % 2**32)


def at_epoch(dataset: Any, seed: int, epoch: int) -> Any:
    """Return `dataset` in `epoch`, a copy after `set_epoch` because two loaders may share it."""
    if not isinstance(dataset, Subset | ConcatDataset) and not hasattr(dataset, "set_epoch"):
        return dataset
    view = copy.copy(dataset)
    if isinstance(view, Subset):
        view.dataset = at_epoch(view.dataset, seed, epoch)
    elif isinstance(view, ConcatDataset):
        view.datasets = [at_epoch(part, seed, epoch) for part in view.datasets]
    else:
        view.set_epoch(seed, epoch)
    return view


@contextmanager
def blame_data(
    what: str, samples: Sequence[int] = (), way_out: str = "fix the dataset or its data"
) -> Iterator[None]:
    """Make one line of the dataset's error, and a note of its cause, which stays in a worker.

    It begins with `samples` and `what`. They are named only if there is an error: it takes time.
    """
    try:
        yield
    except MpframeError:
        raise
    except (Exception, SystemExit) as error:
        named = f"{name_samples(samples)} {what}" if samples else what
        blamed = DataError(f"dataset: {named}: {describe_error(error)}; {way_out}")
        blamed.add_note(traceback.format_exc())
        raise blamed from None


@contextmanager
def keep_generators() -> Iterator[None]:
    # Only torch's CPU generator: torch.manual_seed would reset the accelerators' as well.
    states = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def _detach(tensor: Tensor) -> Tensor:
    """Cut a tensor off its graph, which cannot leave a worker and trains nothing."""
    return tensor.detach().requires_grad_() if tensor.grad_fn else tensor


def require_finite(
    batch: Any, indices: Sequence[int], split: str, place: tuple[int, int], samples: Sequence[Any]
) -> Any:
    """Return a batch on the host without its graph. DataError: one of its tensors is not finite.

    `place` is the epoch and the batch's number in it. `samples` are what the batch was made of, in
    the order of `indices`, or empty.
    """
    bad = _first_bad(batch)
    if bad is None:
        return map_tensors(_detach, batch)
    name, whose = bad[0], _name_row(bad[1], indices)
    for index, sample in sorted(zip(indices, samples, strict=False), key=itemgetter(0)):
        if bad := _first_bad(sample):
            name, whose = bad[0], f"sample {index}"
            break
    where = f" in its {name}" if name else ""
    raise DataError(
        f"dataset: {split} {whose} holds NaN or inf{where} (epoch {place[0]}, batch {place[1]}); "
        "every value must be finite: fix or remove the sample"
    )


def name_samples(indices: Sequence[int]) -> str:
    if list(indices) == list(range(indices[0], indices[0] + len(indices))):
        return f"samples {indices[0]} to {indices[-1]}"
    return f"samples {few(map(str, indices))}"


def named_leaves(batch: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor with its path, which begins with `inputs` or `targets` in a pair."""
    if type(batch) is tuple and len(batch) == 2:
        return chain(named_tensors(batch[0], "inputs"), named_tensors(batch[1], "targets"))
    return named_tensors(batch)


def _first_bad(node: Any) -> tuple[str, Tensor] | None:
    return next(((name, t) for name, t in named_leaves(node) if not _is_finite(t)), None)


def _name_row(tensor: Tensor, indices: Sequence[int]) -> str:
    """Name the bad sample, if the tensor has a row for each."""
    if tensor.shape[:1] != (len(indices),) or tensor.layout is not torch.strided:
        return f"one of {name_samples(indices)}"
    rows = ~torch.isfinite(tensor).reshape(len(tensor), -1).all(dim=1)
    return f"sample {min(index for index, bad in zip(indices, rows, strict=True) if bad)}"


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    values = tensor
    if tensor.layout is not torch.strided:
        values = (tensor.coalesce() if tensor.is_sparse else tensor).values()
    # If a value is NaN, both ends are. One pass for them is far cheaper than isfinite's mask.
    low, high = values.aminmax()
    return math.isfinite(low.item()) and math.isfinite(high.item())


def named_tensors(node: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in `node` with its path, such as `[1].boxes`, depth first."""
    if isinstance(node, Tensor):
        yield name, node
    elif isinstance(node, (tuple, list)) and not hasattr(node, "_fields"):
        for number, item in enumerate(node):
            yield from named_tensors(item, f"{name}[{number}]")
    else:
        for key, item in fields_of(node).items():
            yield from named_tensors(item, f"{name}.{key}" if name else str(key))
