"""Does the format of an optimizer's tensors hold the optimizer's numbers?

An optimizer adds eps to tensors of one format, multiplies them by lr and the betas, and rounds the
results to that format. In float16 (smallest number 2^-24) eps = 1e-8 is 0 and Adam divides by 0. In
bfloat16 (8 bits) beta = 0.999 is 1 and an average never forgets. So

    small numbers    lost if round(x) = 0, bad if |round(x) - x| > 1 % of x
    decays           lost if round(x) = 1, bad if 1 - x is off by more than 1 %
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mpframe.core.optim.master_weights import MasterWeights
from mpframe.core.tree import dtype_name

SMALL = ("eps", "lr", "weight_decay")
DECAYS = ("betas", "momentum", "alpha", "rho")
_BADLY = 0.01


@dataclass(frozen=True)
class RoundedNumber:
    """A number that the format of an optimizer's tensors loses or rounds badly."""

    name: str  # the optimizer's argument
    index: str  # `[i]` if that is a tuple, else empty
    value: float
    rounded: float  # in the format
    form: torch.dtype
    lost: bool  # 0 instead of a small number, or 1 instead of a decay

    def __str__(self) -> str:
        becomes = f"is {self.rounded:g}" if self.lost else f"becomes {self.rounded:.6g}"
        return f"{self.name}{self.index}={self.value:.10g} {becomes} in {dtype_name(self.form)}"


def find_rounded_numbers(optimizer: MasterWeights) -> Iterator[RoundedNumber]:
    """Yield the numbers given to an optimizer that its format loses or rounds badly."""
    form = _format_of(optimizer)
    for name, index, value in _numbers(optimizer):
        rounded = float(torch.tensor(value, dtype=torch.float64).to(form))
        kept, given = (1.0 - rounded, 1.0 - value) if name in DECAYS else (rounded, value)
        lost = kept == 0.0 < given
        if lost or abs(kept - given) > _BADLY * abs(given):
            yield RoundedNumber(name, index, value, rounded, form, lost)


def _format_of(optimizer: MasterWeights) -> torch.dtype:
    """Return the narrowest format of the tensors that the optimizer updates."""
    formats = {optimizer.master_of(parameter).dtype for parameter in optimizer.parameters}
    return min(formats, key=lambda form: form.itemsize, default=torch.float32)


def _numbers(optimizer: MasterWeights) -> Iterator[tuple[str, str, float]]:
    """Yield (name, index, value) of every number given to the optimizer."""
    for name, value in optimizer.optimizer.defaults.items():
        if name in (*SMALL, *DECAYS):
            several = isinstance(value, tuple | list)
            for index, number in enumerate(value if several else [value]):
                if isinstance(number, float):
                    yield name, f"[{index}]" if several else "", number
