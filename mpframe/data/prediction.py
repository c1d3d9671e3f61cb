"""A model's outputs as columns of a table, one row a sample.

It takes the place of a metric, so predictions have the weights, formats and batches of an
evaluation.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpframe.core.errors import ConfigError
from mpframe.core.user_code import describe
from mpframe.data.fetching import named_tensors

OUTPUTS = ("class", "probabilities", "raw")

Array = np.ndarray[Any, np.dtype[Any]]
Columns = dict[str, list[str] | Array]


class Predictions:
    """Gives the columns of each batch of an evaluation to `write`, in order.

    Samples without names are numbered. `outputs` is `class`, `probabilities` or `raw`; by default
    the class if the targets are class numbers or the classes have names, else raw. `targets` are
    written if there is one number a sample.
    """

    higher_is_better = None

    def __init__(
        self,
        write: Callable[[Columns], None],
        *,
        samples: Sequence[str] | None = None,
        outputs: str | None = None,
        class_names: Sequence[str] | None = None,
        targets: bool = True,
    ) -> None:
        self._write, self._samples, self._outputs = write, samples, outputs
        self._class_names, self._targets = class_names, targets
        self.count = 0
        self._columns: list[str] | None = None

    def update(self, outputs: Any, targets: Any) -> None:
        """Write one batch. ConfigError if it does not fit `outputs`, the samples or the table."""
        if isinstance(outputs, list | tuple) and any(isinstance(one, Mapping) for one in outputs):
            raise _not_a_row_each(describe(outputs))  # A detector finds any number of boxes.
        named = {name: tensor.detach().cpu() for name, tensor in named_tensors(outputs)}
        known = targets.detach().cpu() if self._targets and isinstance(targets, Tensor) else None
        numbers = known is not None and known.dim() == 1 and not known.is_floating_point()
        fitting = "class" if _is_logits(named) and (self._class_names or numbers) else "raw"
        sizes = {len(tensor) if tensor.dim() else 0 for tensor in named.values()}
        if len(sizes) != 1 or 0 in sizes:
            raise _not_a_row_each(_shapes(named))
        kind, size = self._outputs or fitting, sizes.pop()
        columns: Columns = {"index": np.arange(self.count, self.count + size)}
        if self._samples is not None:
            columns = {"name": list(self._samples[self.count : self.count + size])}
        if known is not None and known.dim() and known.numel() == len(known) == size:
            columns["target"] = known.reshape(size).numpy()
        if kind == "raw":
            columns |= _raw(named)
        elif _is_logits(named):
            (logits,) = named.values()
            columns |= self._classes(logits, kind == "probabilities")
        else:
            raise ConfigError(
                f"outputs={kind}: needs one number for each of several classes, and the model "
                f"gives {_shapes(named)}; use outputs=raw"
            )
        first, self._columns = self._columns or list(columns), list(columns)
        if first != self._columns:
            raise ConfigError(
                f"outputs: a batch has {len(columns)} columns and the one before it {len(first)}; "
                "let the objective return outputs of one size for samples of any length"
            )
        self._write(columns)
        self.count += size

    def compute(self) -> float:
        """Return the number of samples, because a metric has a value."""
        return float(self.count)

    def _classes(self, logits: Tensor, with_probabilities: bool) -> Columns:
        chosen = logits.argmax(dim=1)
        columns: Columns = {"class": chosen.numpy()}
        names = self._class_names
        if names is not None and len(names) == logits.shape[1]:
            columns["class_name"] = [names[number] for number in chosen.tolist()]
        if with_probabilities:
            shares = logits.softmax(dim=1)
            columns |= {f"probability_{n}": share.numpy() for n, share in enumerate(shares.T)}
        return columns


def _is_logits(named: dict[str, Tensor]) -> bool:
    (tensor, *others) = named.values() if named else (torch.empty(0),)
    return not others and tensor.dim() == 2 and tensor.shape[1] > 1 and tensor.is_floating_point()


def _shapes(named: dict[str, Tensor]) -> str:
    shapes = (f"{name or 'a tensor'} {tuple(tensor.shape)}" for name, tensor in named.items())
    return ", ".join(shapes) or "no tensor"


def _not_a_row_each(given: str) -> ConfigError:
    return ConfigError(
        f"outputs: the model gives {given}, which is not a row for each sample; let the objective "
        "return such outputs"
    )


def _raw(named: dict[str, Tensor]) -> Columns:
    """Return a column for each number of a sample, named by its place."""
    columns: Columns = {}
    for name, tensor in named.items():
        for place in np.ndindex(*tensor.shape[1:]):
            word = "_".join([name or "output", *map(str, place if tensor[0].numel() > 1 else ())])
            columns[word] = tensor[(slice(None), *place)].numpy()
    return columns
