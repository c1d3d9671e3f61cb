"""The ranges of one training step: how large the numbers of every layer are, in five kinds.

    weights                as stored
    activations            outputs of leaf modules, as computed
    activation_gradients   dL/d(output), as the backward pass gave them, divided by the scale s
    gradients              dL/dw, likewise
    updates                master after the step minus master before it

The half format holds gradients multiplied by s, so for gradients its limits are log2(s) lower. A
value that half has already rounded to zero counts as a zero, because nobody can tell the two apart.
An update is `rounded_away` if a weight without a master, stored in half, would not change.

Everything is counted on the device while the step runs; one transfer brings it to the host.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from mpframe.numerics.exponents import FIELDS, WIDTH, Limits, add_rows, count_exponents
from mpframe.training.trainer import Trainer
from mpframe.tree import device_of, tensors_in

KINDS = ("weights", "activations", "activation_gradients", "gradients", "updates")
SCALED = ("activation_gradients", "gradients")
OF_SAMPLES = ("activations", "activation_gradients", "gradients")
"""Each rank has those of its part of the batch. Weights and updates are the same on all."""

Counts = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Ranges:
    """The numbers of one step.

    Attributes:
        step: global step.
        scale: its loss scale.
        layers: names of modules.
        rows: [kinds, layers, WIDTH] of `count_exponents`; count 0 if a layer has none.
        rounded_away: [layers], weights whose update half would have rounded away.
        in_half: [kinds, layers], whether the values were in a 16-bit format.
    """

    step: int
    scale: float
    layers: tuple[str, ...]
    rows: Counts
    rounded_away: Counts
    in_half: npt.NDArray[np.bool_]

    def field(self, kind: str, name: str) -> Counts:
        """[layers]: a field of `FIELDS`."""
        column: Counts = self.rows[KINDS.index(kind), :, FIELDS.index(name)]
        return column

    def fraction(self, kind: str, name: str) -> Counts:
        """[layers]: a counted field over all values; nan if the layer has none."""
        with np.errstate(invalid="ignore"):
            return self.field(kind, name) / self.field(kind, "count")

    def rounded_away_fraction(self) -> Counts:
        """[layers]: the share of the weights a step changes that half would not have changed."""
        moved = self.field("updates", "count") - self.field("updates", "zeros")
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.rounded_away / moved

    def headroom(self, kind: str, limits: Limits) -> Counts:
        """[layers]: bits from the largest value up to the format's; nan if all are 0."""
        amax = self.field(kind, "amax")
        with np.errstate(divide="ignore"):
            bits = np.log2(limits.largest) - np.log2(amax)
        return np.where(amax > 0, bits, np.nan)

    def bins(self, kind: str) -> Counts:
        """[layers, BINS]: values per exponent."""
        counts: Counts = self.rows[KINDS.index(kind), :, len(FIELDS) :]
        return counts


class RangeProbe:
    """Measures one training step. It is made before the step, and `ranges` is called after it.

    Args:
        trainer: about to take the step.
        half: the format whose limits count.
    """

    def __init__(self, trainer: Trainer, half: torch.dtype) -> None:
        self._trainer = trainer
        self._half = half
        self._limits = Limits.of(half)
        self._rows: dict[tuple[str, str], Tensor] = {}
        self._in_half = set[tuple[str, str]]()
        self._before: dict[Tensor, Tensor] = {}
        self._scales = {name: own.scale for name, own in trainer.scalers.items()}
        self._handles = [*self._watch_modules(), *self._watch_parameters()]
        self.layers = tuple(dict.fromkeys(layer for layer, _ in _leaves(trainer.model)))

    def ranges(self) -> Ranges:
        """Return what was measured, in one transfer from the device, and remove the hooks.

        All ranks call it, and get what all of them measured.
        """
        for handle in self._handles:
            handle.remove()
        away = self._measure_weights()
        empty = torch.zeros(WIDTH, dtype=torch.float64, device=self._device)
        keys = [(kind, layer) for kind in KINDS for layer in self.layers]
        rows = torch.stack([self._rows.get(key, empty) for key in keys])
        rows = self._of_all_ranks(rows.view(len(KINDS), -1, WIDTH))
        in_half = self._trainer.world.max_of([key in self._in_half for key in keys])
        counts = [away.get(layer, empty[0]) for layer in self.layers]
        scale = torch.as_tensor(self._scale(), dtype=torch.float64, device=self._device)
        flat = torch.cat([scale.reshape(1), torch.stack(counts), rows.ravel()]).cpu().numpy()
        layers = len(self.layers)
        return Ranges(
            step=self._trainer.progress.global_step,
            scale=float(flat[0]),
            layers=self.layers,
            rows=flat[1 + layers :].reshape(len(KINDS), layers, WIDTH),
            rounded_away=flat[1 : 1 + layers],
            in_half=np.array(in_half, dtype=bool).reshape(len(KINDS), layers),
        )

    @property
    def _device(self) -> torch.device:
        return device_of(self._trainer.model)

    def _of_all_ranks(self, rows: Tensor) -> Tensor:
        """[KINDS, layers, WIDTH] with what the other ranks saw of their samples."""
        world, own = self._trainer.world, [KINDS.index(kind) for kind in OF_SAMPLES]
        seen, amax = rows[own], FIELDS.index("amax")
        largest = world.max(seen[..., amax])
        world.sum_([seen])
        seen[..., amax] = largest
        rows[own] = seen
        return rows

    def _scale(self) -> Tensor | float:
        """The scale of the step; of several losses that of the first."""
        return next(iter(self._scales.values()), 1.0)

    def _watch_modules(self) -> Iterator[Any]:
        def watcher(layer: str) -> Any:
            def watch(_: nn.Module, __: Any, output: Any) -> None:
                for tensor in tensors_in(output):
                    self._seen("activations", layer, tensor)
                    if tensor.requires_grad:
                        tensor.register_hook(  # type: ignore[no-untyped-call]
                            lambda gradient: self._seen("activation_gradients", layer, gradient)
                        )

            return watch

        for layer, module in _leaves(self._trainer.model):
            if not list(module.children()):
                yield module.register_forward_hook(watcher(layer))

    def _watch_parameters(self) -> Iterator[Any]:
        def watcher(layer: str) -> Any:
            return lambda parameter: self._seen("gradients", layer, parameter.grad)

        for layer, parameter in _parameters(self._trainer.model):
            if parameter.requires_grad:
                master = self._trainer.optimizer.master_of(parameter)
                self._before[parameter] = master.detach().clone()
                hook = parameter.register_post_accumulate_grad_hook
                yield hook(watcher(layer))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _seen(self, kind: str, layer: str, values: Tensor) -> None:
        if not values.is_floating_point():
            return
        if values.element_size() == 2:
            self._in_half.add((kind, layer))
        values = values.coalesce().values() if values.is_sparse else values
        scale = self._scale() if kind in SCALED else 1.0
        with torch._C.DisableTorchFunction():  # A hook of a module runs in its casts, op by op.
            self._add(kind, layer, count_exponents(values, self._limits, scale, held_at=scale))

    def _add(self, kind: str, layer: str, row: Tensor) -> None:
        known = self._rows.get((kind, layer))
        self._rows[kind, layer] = row if known is None else add_rows([known, row])

    @torch.no_grad()
    def _measure_weights(self) -> dict[str, Tensor]:
        """Rows of weights and updates; how many updates half would have rounded away."""
        away: dict[str, Tensor] = {}
        for layer, parameter in _parameters(self._trainer.model):
            self._seen("weights", layer, parameter)
            before = self._before.get(parameter)
            if before is None:
                continue
            after = self._trainer.optimizer.master_of(parameter)
            self._seen("updates", layer, after - before)
            stuck = after.to(self._half) == before.to(self._half)
            count = (stuck & (after != before)).sum().double()
            away[layer] = away[layer] + count if layer in away else count
        return away


def _leaves(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules without children, and those with parameters of their own, by name."""
    for name, module in model.named_modules():
        if not list(module.children()) or list(module.parameters(recurse=False)):
            yield name or "model", module


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter once, with the name of the module that owns it."""
    for name, parameter in model.named_parameters():
        yield name.rpartition(".")[0] or "model", parameter
