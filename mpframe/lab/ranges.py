"""How large the numbers of every layer are in one step: counts by exponent, in five kinds.

    weights                as stored
    activations            outputs of leaf modules, as computed
    activation_gradients   dL/d(output), as the backward pass gave them, divided by the scale s
    gradients              dL/dw, also divided by s
    updates                master after the step minus master before it

The exponent of x is floor(log2 |x|), for x other than 0. A half format with smallest normal number
2^e, f bits behind the point and largest number M meets a scaled value y = s x. If |y| <= 2^(e-f-1),
half its smallest number, y becomes 0 (a tie goes to the even number, zero). Below 2^e the format
keeps fewer bits of y than it has. Above M it cannot hold y.

The half format holds gradients multiplied by s, so for gradients its limits are log2(s) lower. A
value that half has already rounded to zero counts as a zero, because nobody can tell the two apart.
An update is `rounded_away` if a weight without a master, stored in half, would not change.

Everything is counted in fp32 on the device while the step runs; one transfer brings it to the host.
`RangeRecord` appends each report to a file of the run's folder:

    numerics/ranges.bin    { length (8 bytes), zlib of a JSON line and float64 numbers } ...

When the file is opened again, a report that a kill cut short is dropped, and so are the reports of
steps that a resumed run repeats.
"""

import json
import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from mpframe.core.errors import DataError
from mpframe.core.trainer import Trainer
from mpframe.core.tree import device_of, tensors_in
from mpframe.files.durable import AppendLog, write_atomically

LOWEST, HIGHEST = -127, 127
"""The exponents that are counted. All subnormal fp32 numbers, below 2^-126, share one bin."""
BINS = HIGHEST - LOWEST + 1

_PATTERNS = 2**15  # magnitudes of a 16-bit format
_PART = 2**16  # fp32 values that are counted at once on a CPU: what is made of them fits its cache

FIELDS = (
    "count",
    "zeros",
    "bad",
    "lost_at_half_scale",
    "lost",
    "lost_at_twice_scale",
    "subnormal",
    "over",
    "amax",
)
"""The numbers before the bins in a row of `count_exponents`."""
WIDTH = len(FIELDS) + BINS


@dataclass(frozen=True)
class Limits:
    """The limits of a half format."""

    lost: float  # the largest magnitude that rounds to zero
    normal: float  # the smallest that keeps all its bits
    largest: float

    @classmethod
    def of(cls, half: torch.dtype) -> "Limits":
        info = torch.finfo(half)
        return cls(info.smallest_normal * info.eps / 2, info.smallest_normal, info.max)


def count_exponents(
    values: Tensor, limits: Limits, scale: Tensor | float = 1.0, held_at: Tensor | float = 1.0
) -> Tensor:
    """Count a tensor's magnitudes.

    Args:
        values: any shape, floating.
        limits: of the half format.
        scale: s, by which the values are multiplied in the format: 0-d or a number, a power of two.
        held_at: what they are multiplied by already, likewise; they are divided by it first.

    Returns:
        [WIDTH] float64 on the tensor's device: the counts of `FIELDS`, then of each exponent from
        LOWEST to HIGHEST. `count` counts all values, `bad` those that are inf or nan, `lost` and
        its neighbours those that are not zero and round to zero at that multiple of the scale,
        `subnormal` those that do not and are below the smallest normal number, `over` finite ones
        above the largest; `amax` is the largest finite |s x|, 0 if there is none.
    """
    values = values.detach().reshape(-1)
    if values.device.type == "cpu" and values.element_size() > 2 and values.numel() > _PART:
        parts = torch.split(values, _PART)
        return add_rows([count_exponents(part, limits, scale, held_at) for part in parts])
    magnitudes, counts = _different(values)
    held = isinstance(held_at, Tensor) or held_at != 1
    wide = magnitudes.float() / held_at if held else magnitudes.float()

    def count(which: Tensor) -> Tensor:
        return which.sum() if counts is None else (which * counts).sum()

    finite = wide < torch.inf
    zero = wide == 0
    scaled = torch.where(finite, wide, 0.0) * scale
    zeros, bad = count(zero), count(~finite)
    nothing = zeros + bad  # these are 0 in `scaled`, but they are not lost
    lost = [count(scaled <= limits.lost * k) - nothing for k in (2.0, 1.0, 0.5)]
    below_normal = count(scaled < limits.normal) - nothing
    there = scaled if counts is None else torch.where(counts > 0, scaled, 0.0)
    fields = [
        torch.as_tensor(values.numel(), device=wide.device),
        zeros,
        bad,
        *lost,
        (below_normal - lost[1]).clamp(min=0),
        count(scaled > limits.largest),
        there.max() if there.numel() else torch.zeros((), device=wide.device),
    ]
    row = torch.stack([field.double() for field in fields])
    return torch.cat([row, _counted(wide, zeros, counts).double()])


def _different(values: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return magnitudes, and how often each is there; None: once.

    A 16-bit format has 2^15 of them: with more values it is faster to count each one once.
    """
    if values.element_size() != 2 or values.numel() <= _PATTERNS:
        return values.abs(), None
    patterns = torch.arange(_PATTERNS, dtype=torch.int16, device=values.device)
    counts = _tally(values.view(torch.int16) & (_PATTERNS - 1), _PATTERNS)
    return patterns.view(values.dtype), counts


def _counted(wide: Tensor, zeros: Tensor, counts: Tensor | None = None) -> Tensor:
    """Count how many values of a float32 tensor, of which some are 0, have each exponent.

    With `counts`, how many values have each magnitude in `wide`. Returns [BINS] int64.
    """
    bits = (wide.view(torch.int32) >> 23) & 255  # The biased exponent; 0 for subnormals and zero.
    bins = _tally(bits, 256, counts)
    bins[0] -= zeros
    return bins[:BINS]  # The last one, 255, stands for inf and nan.


def _tally(numbers: Tensor, size: int, counts: Tensor | None = None) -> Tensor:
    """Count how often each of 0 to size - 1 is there, or sum its counts: [size] int64."""
    if numbers.device.type == "cpu" and counts is None:
        return torch.bincount(numbers, minlength=size)
    ones = torch.ones_like(numbers, dtype=torch.int64) if counts is None else counts
    total = torch.zeros(size, dtype=torch.int64, device=numbers.device)
    return total.scatter_add_(0, numbers.long(), ones)


def add_rows(rows: list[Tensor]) -> Tensor:
    """Merge the rows of several tensors: counts add up, `amax` is the largest."""
    stacked = torch.stack(rows)
    total = stacked.sum(dim=0)
    at = FIELDS.index("amax")
    total[at] = stacked[:, at].max()
    return total


class ExponentHistogram:
    """How the magnitudes of several tensors spread over the exponents.

    Attributes:
        counts: [BINS] int64, on the CPU: finite values other than 0, by exponent.
        amax: the largest magnitude; inf or nan if a value is.
    """

    def __init__(self) -> None:
        self.counts = torch.zeros(BINS, dtype=torch.int64)
        self.amax = 0.0

    def add(self, values: Tensor) -> None:
        """Count the values of a tensor, or the entries of a sparse one."""
        entries = values.coalesce().values() if values.is_sparse else values
        wide = entries.detach().reshape(-1).float()
        if wide.numel():
            largest = float(wide.abs().max())
            self.amax = float(torch.tensor([self.amax, largest]).max())  # Unlike max, keeps nan.
            self.counts += _counted(wide, (wide == 0).sum()).cpu()

    def lost_fraction(self, scale: float, half: torch.dtype) -> float:
        """Return the share of the values other than 0 that round to 0 in half at `scale`.

        Exact to the octave: at a power of two only a value on the limit itself is not counted.
        """
        first_kept = math.floor(math.log2(Limits.of(half).lost / scale))
        lost = int(self.counts[: max(first_kept - LOWEST, 0)].sum())
        return lost / max(int(self.counts.sum()), 1)


KINDS = ("weights", "activations", "activation_gradients", "gradients", "updates")
SCALED = ("activation_gradients", "gradients")
OF_SAMPLES = ("activations", "activation_gradients", "gradients")
"""Each rank has its part of the batch. Weights and updates are the same on all."""

Counts = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Ranges:
    """The numbers of one step."""

    step: int  # global
    scale: float  # of the loss
    layers: tuple[str, ...]  # names of modules
    rows: Counts  # [kinds, layers, WIDTH] of `count_exponents`; count 0 if a layer has none
    rounded_away: Counts  # [layers], weights whose update half would have rounded away
    in_half: npt.NDArray[np.bool_]  # [kinds, layers], the values were in a 16-bit format

    def field(self, kind: str, name: str) -> Counts:
        """[layers]: one of FIELDS."""
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
    """Measures a training step of a trainer. Make it before the step, call `ranges` after it."""

    def __init__(self, trainer: Trainer, half: torch.dtype) -> None:
        self._trainer = trainer
        self._half = half
        self._limits = Limits.of(half)
        self._rows: dict[tuple[str, str], Tensor] = {}
        self._in_half = set[tuple[str, str]]()
        self._before: dict[Tensor, Tensor] = {}
        # The scale of the step; with several losses the first one's.
        self._scale = next((scaler.scale for scaler in trainer.scalers.values()), 1.0)
        self._handles = [*self._watch_modules(), *self._watch_parameters()]
        self.layers = tuple(dict.fromkeys(layer for layer, _ in _leaves(trainer.model)))

    def ranges(self) -> Ranges:
        """Return what was measured, in one transfer from the device, and remove the hooks.

        All ranks call it, and get what all of them measured.
        """
        for handle in self._handles:
            handle.remove()
        away = self._measure_weights()
        device = device_of(self._trainer.model)
        empty = torch.zeros(WIDTH, dtype=torch.float64, device=device)
        keys = [(kind, layer) for kind in KINDS for layer in self.layers]
        rows = torch.stack([self._rows.get(key, empty) for key in keys])
        rows = self._of_all_ranks(rows.view(len(KINDS), -1, WIDTH))
        in_half = self._trainer.comm.max_of([key in self._in_half for key in keys])
        counts = [away.get(layer, empty[0]) for layer in self.layers]
        scale = torch.as_tensor(self._scale, dtype=torch.float64, device=device)
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

    def _of_all_ranks(self, rows: Tensor) -> Tensor:
        """Add what the other ranks saw of their samples to rows [KINDS, layers, WIDTH]."""
        comm, kinds = self._trainer.comm, [KINDS.index(kind) for kind in OF_SAMPLES]
        seen, amax = rows[kinds], FIELDS.index("amax")
        largest = comm.max(seen[..., amax])
        comm.sum_([seen])
        seen[..., amax] = largest
        rows[kinds] = seen
        return rows

    def _watch_modules(self) -> Iterator[Any]:
        def watch(layer: str, _: nn.Module, __: Any, output: Any) -> None:
            for tensor in tensors_in(output):
                self._seen("activations", layer, tensor)
                if tensor.requires_grad:
                    seen = partial(self._seen, "activation_gradients", layer)
                    tensor.register_hook(seen)  # type: ignore[no-untyped-call]

        for layer, module in _leaves(self._trainer.model):
            if not list(module.children()):
                yield module.register_forward_hook(partial(watch, layer))

    def _watch_parameters(self) -> Iterator[Any]:
        def watch(layer: str, parameter: Tensor) -> None:
            self._seen("gradients", layer, parameter.grad)

        for layer, parameter in _parameters(self._trainer.model):
            if parameter.requires_grad:
                master = self._trainer.optimizer.master_of(parameter)
                self._before[parameter] = master.detach().clone()
                hook = parameter.register_post_accumulate_grad_hook
                yield hook(partial(watch, layer))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _seen(self, kind: str, layer: str, values: Tensor | None) -> None:
        if values is None or not values.is_floating_point():
            return
        if values.element_size() == 2:
            self._in_half.add((kind, layer))
        values = values.coalesce().values() if values.is_sparse else values
        scale = self._scale if kind in SCALED else 1.0
        with torch._C.DisableTorchFunction():  # A hook of a module runs in its casts, op by op.
            row = count_exponents(values, self._limits, scale, held_at=scale)
            known = self._rows.get((kind, layer))
            self._rows[kind, layer] = row if known is None else add_rows([known, row])

    @torch.no_grad()
    def _measure_weights(self) -> dict[str, Tensor]:
        """Count weights and updates; by layer, how many updates half would have rounded away."""
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
    """Yield modules without children, and those that hold parameters themselves, by name."""
    for name, module in model.named_modules():
        if not list(module.children()) or list(module.parameters(recurse=False)):
            yield name or "model", module


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every parameter once, with the name of the module that holds it."""
    for name, parameter in model.named_parameters():
        yield name.rpartition(".")[0] or "model", parameter


FOLDER = "numerics"
FILE_NAME = "ranges.bin"
_LENGTH = struct.Struct("<q")


class RangeRecord:
    """Appends to the record in a run's folder.

    Args:
        kept: steps whose reports stay, for a resumed run.
        on_error: `stop` if the disk is full, or `warn` and write what waits once there is room.
    """

    def __init__(self, folder: Path, kept: int = 0, on_error: str = "stop") -> None:
        path = folder / FOLDER / FILE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        self._log = AppendLog(path, on_error)
        content = path.read_bytes() if path.exists() else b""
        whole = [block for block in _blocks(content) if _decoded(block).step <= kept]
        write_atomically(path, b"".join(_LENGTH.pack(len(block)) + block for block in whole))

    def add(self, ranges: Ranges) -> None:
        """Append a report.

        Raises:
            OSError: there is no room, and that stops the run.
        """
        block = _encoded(ranges)
        self._log.append(_LENGTH.pack(len(block)) + block)

    @property
    def pending(self) -> bool:
        """Whether the last report waits for room on the disk."""
        return self._log.pending


def read_ranges(folder: Path) -> list[Ranges]:
    """Return the reports of a run, the oldest first.

    Raises:
        DataError: the run has none, or the file is damaged.
    """
    path = folder / FOLDER / FILE_NAME
    try:
        reports = [_decoded(block) for block in _blocks(path.read_bytes())]
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; train the run with numerics=on") from None
    except (ValueError, KeyError, zlib.error) as error:
        raise DataError(f"{path}: damaged ({error}); train the run again") from None
    if not reports:
        raise DataError(f"{path}: holds no report; train for numerics.every steps or more")
    return reports


def _encoded(ranges: Ranges) -> bytes:
    head = {
        "step": ranges.step,
        "scale": ranges.scale,
        "layers": ranges.layers,
        "in_half": ranges.in_half.tolist(),
    }
    numbers = np.concatenate([ranges.rounded_away, ranges.rows.ravel()]).astype("<f8")
    return zlib.compress(json.dumps(head).encode() + b"\n" + numbers.tobytes(), level=1)


def _decoded(block: bytes) -> Ranges:
    head, _, body = zlib.decompress(block).partition(b"\n")
    known = json.loads(head)
    layers, numbers = tuple(known["layers"]), np.frombuffer(body, "<f8")
    rows = numbers[len(layers) :].reshape(len(KINDS), len(layers), WIDTH)
    in_half = np.array(known["in_half"], dtype=bool)
    return Ranges(known["step"], known["scale"], layers, rows, numbers[: len(layers)], in_half)


def _blocks(content: bytes) -> Iterator[bytes]:
    """Yield the whole blocks of a file."""
    at = 0
    while at + _LENGTH.size <= len(content):
        (length,) = _LENGTH.unpack_from(content, at)
        at += _LENGTH.size
        if at + length > len(content):
            return
        yield content[at : at + length]
        at += length
