"""How large the numbers of every layer are in one step: counts by exponent, in five kinds.

    weights                as stored, or as gathered if ranks divide them
    activations            outputs of leaf modules, as computed
    activation_gradients   dL/d(output), as the backward pass gave them, divided by the scale s
    gradients              dL/dw, also divided by s
    updates                master after the step minus master before it

The half format holds gradients multiplied by s, so for gradients its limits are log2(s) lower. A
value that half has already rounded to zero counts as a zero, because nobody can tell the two apart.
An update is `rounded_away` if a weight without a master, stored in half, would not change.

Everything is counted in fp32 on the device while the step runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from mpframe.checkpoint.parts import is_copy
from mpframe.core.comm import is_sharded, part_of
from mpframe.core.tree import device_of, tensors_in, widest
from mpframe.lab.exponents import FIELDS, WIDTH, Limits, add_rows, count_exponents
from mpframe.tracking import tags
from mpframe.training.trainer import Trainer

FOLDER = "numerics"  # of a run, with pictures and products.csv
KINDS = tuple(tags.KINDS)
SCALED = ("activation_gradients", "gradients")
OF_SAMPLES = ("activations", "activation_gradients", "gradients")
"""Each rank has its part of the batch. Weights and updates are the same on all, or divided."""

Counts = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Ranges:
    step: int  # global
    scale: float  # of the loss
    layers: tuple[str, ...]  # names of modules
    rows: Counts  # [kinds, layers, WIDTH] of `count_exponents`, with count 0 if a layer has none
    rounded_away: Counts  # [layers], weights whose update half would have rounded away

    def field(self, kind: str, name: str) -> Counts:
        """[layers]: one of FIELDS."""
        column: Counts = self.rows[KINDS.index(kind), :, FIELDS.index(name)]
        return column

    def fraction(self, kind: str, name: str) -> Counts:
        """[layers]: a counted field over all values, nan if the layer has none."""
        with np.errstate(invalid="ignore"):
            return self.field(kind, name) / self.field(kind, "count")

    def rounded_away_fraction(self) -> Counts:
        """[layers]: the share of the weights a step changes that half would not have changed."""
        moved = self.field("updates", "count") - self.field("updates", "zeros")
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.rounded_away / moved

    def headroom(self, kind: str, limits: Limits) -> Counts:
        """[layers]: bits from the largest value up to the format's, nan if all are 0."""
        amax = self.field(kind, "amax")
        with np.errstate(divide="ignore"):
            bits = np.log2(limits.largest) - np.log2(amax)
        return np.where(amax > 0, bits, np.nan)

    def bins(self, kind: str) -> Counts:
        """[layers, BINS]: values per exponent."""
        counts: Counts = self.rows[KINDS.index(kind), :, len(FIELDS) :]
        return counts


class RangeProbe:
    """A measurement of a training step, made before the step. `ranges` ends it."""

    def __init__(self, trainer: Trainer, half: torch.dtype) -> None:
        self._trainer, self._half = trainer, half
        self._sharding = trainer.comm.sharding
        self._rows: dict[tuple[str, str], Tensor] = {}
        self._before: dict[Tensor, Tensor] = {}
        # With several losses, the first one's scale.
        self._scale = next((scaler.scale for scaler in trainer.scalers.values()), 1.0)
        self._handles = [*self._watch_modules(), *self._watch_parameters()]
        self.layers = tuple(dict.fromkeys(layer for layer, _ in _leaves(trainer.model)))

    def ranges(self) -> Ranges:
        """Return the numbers of all ranks, and remove the hooks. All ranks call it."""
        for handle in self._handles:
            handle.remove()
        away = self._measure_weights()
        device = device_of(self._trainer.model)
        empty = torch.zeros(WIDTH, dtype=widest(device), device=device)
        keys = [(kind, layer) for kind in KINDS for layer in self.layers]
        rows = torch.stack([self._rows.get(key, empty) for key in keys])
        rows = self._add_ranks(rows.view(len(KINDS), -1, WIDTH))
        counts = torch.stack([away.get(layer, empty[0]) for layer in self.layers])
        if self._sharding is not None:
            self._trainer.comm.sum_([counts])
        step, scale = self._trainer.progress.global_step, float(self._scale)
        return Ranges(step, scale, self.layers, rows.cpu().numpy(), counts.cpu().numpy())

    def _add_ranks(self, rows: Tensor) -> Tensor:
        """Add the other ranks' samples and parts of weights to rows [KINDS, layers, WIDTH]."""
        comm, divided = self._trainer.comm, self._sharding is not None
        kinds = [n for n, kind in enumerate(KINDS) if divided or kind in OF_SAMPLES]
        seen, amax = rows[kinds], FIELDS.index("amax")
        largest = comm.max(seen[..., amax])
        comm.sum_([seen])
        seen[..., amax] = largest
        rows[kinds] = seen
        return rows

    def _watch_modules(self) -> Iterator[Any]:
        def watch(layer: str, _: nn.Module, __: Any, output: Any) -> None:
            for tensor in tensors_in(output):
                self._count("activations", layer, tensor)
                if tensor.requires_grad:
                    seen = partial(self._count, "activation_gradients", layer)
                    tensor.register_hook(seen)  # type: ignore[no-untyped-call]

        for layer, module in _leaves(self._trainer.model):
            if not list(module.children()):
                yield module.register_forward_hook(partial(watch, layer))

    def _watch_parameters(self) -> Iterator[Any]:
        def watch(layer: str, parameter: Tensor) -> None:
            self._count("gradients", layer, parameter.grad)

        def see(name: str, gathered: Tensor) -> None:
            watch(_layer_of(name), gathered)

        if self._sharding is not None:
            yield self._sharding.usage.watch(see)
        for name, parameter in self._trainer.model.named_parameters():
            if parameter.requires_grad:
                master = self._trainer.optimizer.master_of(parameter)
                self._before[parameter] = master.detach().clone()
                if self._sharding is None:
                    hook = parameter.register_post_accumulate_grad_hook
                    yield hook(partial(watch, _layer_of(name)))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _count(self, kind: str, layer: str, values: Tensor | None) -> None:
        if values is None or not values.is_floating_point():
            return
        scale = self._scale if kind in SCALED else 1.0
        with torch._C.DisableTorchFunction():  # A hook of a module runs in its casts, op by op.
            row = count_exponents(values, Limits.of(self._half), scale, held_at=scale)
            known = self._rows.get((kind, layer))
            self._rows[kind, layer] = row if known is None else add_rows([known, row])

    @torch.no_grad()
    def _measure_weights(self) -> dict[str, Tensor]:
        """Count weights and updates, and return how many half would round away, by layer."""
        away: dict[str, Tensor] = {}
        for name, parameter in self._trainer.model.named_parameters():
            layer = _layer_of(name)
            if is_sharded(parameter) and is_copy(parameter):
                continue
            stored = part_of(parameter)
            if self._sharding is not None:
                stored = stored.to(self._sharding.formats[parameter])
            self._count("weights", layer, stored)
            before = self._before.get(parameter)
            if before is None:
                continue
            after = self._trainer.optimizer.master_of(parameter)
            self._count("updates", layer, after - before)
            stuck = after.to(self._half) == before.to(self._half)
            count = (stuck & (after != before)).sum().to(widest(after.device))
            away[layer] = away[layer] + count if layer in away else count
        return away


def _leaves(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules without children, and those that hold parameters themselves, by name."""
    for name, module in model.named_modules():
        if not list(module.children()) or list(module.parameters(recurse=False)):
            yield name or "model", module


def _layer_of(name: str) -> str:
    return name.rpartition(".")[0] or "model"
