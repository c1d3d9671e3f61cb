"""Split masters: an fp32 master in the 16 bits that its bfloat16 weight lacks.

bfloat16 is the upper half of fp32. So beside the weight w only the difference is kept, as int16:

    bits(m) = bits(w) * 2^16 + low,    -2^15 <= low < 2^15

and 4 bytes hold what takes 6 with a master of its own. The weight is the nearest to the master, as
otherwise, but of two that are equally near the one away from zero, for ties to even would need one
more bit. The fp32 tensor that the optimizer steps has memory only while its bucket is updated.

A master beyond the end of bfloat16 is held there with its weight: a difference cannot say more.
"""

import torch
from torch import Tensor

from mpframe.errors import ConfigError
from mpframe.optim.masters.master import Master
from mpframe.optim.masters.write_detector import adopt_writes, find_written, mark_known

_END = torch.finfo(torch.bfloat16).max
_PIECE = 2**17  # values


class SplitMaster(Master):
    """The fp32 value behind a bfloat16 weight, kept as the weight and its `low` bits.

    Args:
        weight: bfloat16; it is written.
        start: the value to begin with, of the weight's shape and any format; copied.

    Attributes:
        value: the tensor in the optimizer's groups, fp32; without memory unless it is `joined`.
        low: int16, of the weight's shape.

    Raises:
        ConfigError: the weight is float16, whose bits are no part of fp32's.
    """

    def __init__(self, weight: Tensor, start: Tensor) -> None:
        refuse_split(weight.dtype)
        self.half = weight.dtype
        self.value = torch.empty_like(weight, dtype=torch.float32, requires_grad=False)
        self._drop_value()
        self.low = torch.zeros_like(weight, dtype=torch.int16, requires_grad=False)
        self.start_from(weight, start)

    def current(self, weight: Tensor) -> Tensor:
        """The fp32 value, in memory of its own: what is written there does not reach the master."""
        adopt_writes([(weight, self)])
        if self.joined:
            return self.value.detach().clone()
        return self._joined(weight, torch.empty_like(self.low, dtype=torch.float32))

    def start_from(self, weight: Tensor, start: Tensor) -> None:
        """Take another value, and write it into the weight."""
        self._write(weight, start)
        self._drop_value()
        mark_known([(weight, self)])

    @torch.no_grad()
    def adopt(self, weight: Tensor) -> bool:
        """Take over what others have written into the weight: its low bits stay as they are.

        With them the master is still one that rounds to the weight. Only to zero, inf and nan no
        bits can be added.
        """
        if weight.dtype == torch.bfloat16:
            bits = weight.detach().view(torch.int16) & 0x7FFF
            self.low.masked_fill_((bits == 0) | (bits >= 0x7F80), 0)
        if self.joined:
            self._joined(weight, self.value.detach())
        return bool(find_written([(weight, self)]))

    def join(self, weight: Tensor) -> None:
        """Let `value` have its memory, and what it stands for."""
        if not self.joined:
            self.value.untyped_storage().resize_(4 * self.value.numel())
            self._joined(weight, self.value.detach())
            self.joined = True

    def publish(self, weight: Tensor) -> None:
        """Round `value` into the weight, keep the rest as `low`, and give the memory back."""
        if self.joined:
            self._write(weight, self.value)
            self._drop_value()

    def _drop_value(self) -> None:
        self.value.untyped_storage().resize_(0)
        self.joined = False

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
    def _joined(self, weight: Tensor, into: Tensor) -> Tensor:
        """Fill `into`, fp32, with the value."""
        if weight.dtype != torch.bfloat16:
            return into.copy_(weight)
        parts = map(_pieces, (into, weight.detach(), self.low))
        for value, rounded, low in zip(*parts, strict=True):
            bits = value.view(torch.int32).copy_(rounded.view(torch.int16))
            bits.mul_(2**16).add_(low)
        return into


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """A tensor by its first axis, in pieces that a CPU's cache holds."""
    if not tensor.dim():
        return (tensor,)
    size = _PIECE if tensor.is_cpu else max(1, tensor.numel())
    row = max(1, tensor.numel() // max(1, len(tensor)))
    return torch.split(tensor, max(1, size // row))


def refuse_split(half: torch.dtype) -> None:
    """Refuse to split masters of another format.

    Raises:
        ConfigError: it is not bfloat16.
    """
    if half != torch.bfloat16:
        raise ConfigError(
            f"dtype.master_weights=split: the weights are {str(half)[6:]}, and only bfloat16 is a "
            "part of fp32; use dtype.half=bfloat16, or dtype.master_weights=on"
        )


# By what `dtype.master_weights` is: False leaves masters out.
KINDS: dict[bool | str, type[Master] | None] = {True: Master, False: None, "split": SplitMaster}
