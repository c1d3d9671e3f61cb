"""Split masters: an fp32 master in the 16 bits that its bfloat16 weight lacks.

bfloat16 is the upper half of fp32. So only the difference to the weight w is kept, as int16:

    bits(m) = bits(w) * 2^16 + low,    -2^15 <= low < 2^15

and 4 bytes hold what takes 6 otherwise. The weight is the bfloat16 nearest to the master, or the
one away from zero if two are equally near, as ties to even would need one more bit. The fp32 tensor
that the optimizer steps has memory only while its bucket is updated. A master beyond the end of
bfloat16 is held there with its weight.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from mpframe.core.errors import ConfigError
from mpframe.core.optim.masters import Master, mark_known, sync_from_weights

_END = torch.finfo(torch.bfloat16).max
_PIECE = 2**17  # values


class SplitMaster(Master):
    """The fp32 value behind a bfloat16 weight, kept as the weight and its `low` bits.

    Args:
        weight: bfloat16, which is overwritten. Raises ConfigError for float16.
        start: the first value, of the weight's shape and any format.

    Attributes:
        value: fp32, in the optimizer's groups. It has memory only during an update.
        low: int16, of the weight's shape.
    """

    option = "split"

    def __init__(self, weight: Tensor, start: Tensor) -> None:
        self.check_format(weight.dtype)
        self.half = weight.dtype
        self.value = torch.empty_like(weight, dtype=torch.float32, requires_grad=False)
        self._drop_value()
        self.low = torch.zeros_like(weight, dtype=torch.int16, requires_grad=False)
        self.start_from(weight, start)

    @classmethod
    def check_format(cls, half: torch.dtype) -> None:
        if half != torch.bfloat16:
            raise ConfigError(
                f"dtype.master_weights=split: the weights are {str(half)[6:]}, and only bfloat16 "
                "is a part of fp32; use dtype.half=bfloat16, or dtype.master_weights=on"
            )

    def current(self, weight: Tensor) -> Tensor:
        """Return a copy of the fp32 value."""
        sync_from_weights([(weight, self)])
        if self._in_update:
            return self.value.detach().clone()
        return self._fp32_into(torch.empty_like(self.low, dtype=torch.float32), weight)

    def start_from(self, weight: Tensor, start: Tensor) -> None:
        self._write(weight, start)
        self._drop_value()
        mark_known([(weight, self)])

    @torch.no_grad()
    def sync_from_weight(self, weight: Tensor, noticed: bool) -> bool:
        """Take over the weight's values and keep its low bits, which zero, inf and nan lose."""
        if weight.dtype == torch.bfloat16:
            bits = weight.detach().view(torch.int16) & 0x7FFF
            self.low.masked_fill_((bits == 0) | (bits >= 0x7F80), 0)
        if self._in_update:
            self._fp32_into(self.value.detach(), weight)
        return noticed

    @staticmethod
    def materialize(pairs: Collection[tuple[Tensor, Any]]) -> None:  # type: ignore[override]
        """Allocate each `value` and fill it with the fp32 master."""
        sync_from_weights(pairs)
        for weight, master in pairs:
            if not master._in_update:
                master.value.untyped_storage().resize_(4 * master.value.numel())
                master._fp32_into(master.value.detach(), weight)
                master._in_update = True

    @staticmethod
    def round_to_weights(pairs: Collection[tuple[Tensor, Any]]) -> None:
        """Round each `value` into its weight, keep the rest as `low`, and free its memory."""
        for weight, master in pairs:
            if master._in_update:
                master._write(weight, master.value)
                master._drop_value()
        mark_known(pairs)

    def _drop_value(self) -> None:
        self.value.untyped_storage().resize_(0)
        self._in_update = False

    @torch.no_grad()
    def _write(self, weight: Tensor, values: Tensor) -> None:
        """Round values into the weight, and keep the rest as `low`."""
        if weight.dtype != torch.bfloat16:
            weight.detach().copy_(values)  # Someone has made the model wider.
            return
        parts = map(_pieces, (values, weight.detach(), self.low))
        for value, rounded, low in zip(*parts, strict=True):
            held = value.to(weight.device, torch.float32).clamp(-_END, _END)
            bits = held.view(torch.int32)
            high = (bits + 0x8000) >> 16
            rounded.view(torch.int16).copy_(high)
            low.copy_(bits.sub_(high << 16))

    @torch.no_grad()
    def _fp32_into(self, into: Tensor, weight: Tensor) -> Tensor:
        """Fill `into`, fp32, with the value."""
        if weight.dtype != torch.bfloat16:
            return into.copy_(weight)
        parts = map(_pieces, (into, weight.detach(), self.low))
        for value, rounded, low in zip(*parts, strict=True):
            bits = value.view(torch.int32).copy_(rounded.view(torch.int16))
            bits.mul_(2**16).add_(low)
        return into


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """Split a tensor along its first axis into parts that fit a CPU's cache."""
    if not tensor.dim():
        return (tensor,)
    size = _PIECE if tensor.is_cpu else max(1, tensor.numel())
    row = max(1, tensor.numel() // max(1, len(tensor)))
    return torch.split(tensor, max(1, size // row))
