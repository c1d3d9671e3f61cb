"""Do the optimizer's numbers exist in the format of the tensors they meet?

An optimizer adds eps to, and multiplies by lr and the betas, tensors of one format, and what it
computes is rounded to that format. In float16 (smallest number 2^-24) eps = 1e-8 is 0 and Adam
divides by 0; in bfloat16 (8 bits) beta = 0.999 is 1 and an average never forgets. So

    small numbers    lost where round(x) = 0, bad where |round(x) - x| > 1 % of x
    decays           lost where round(x) = 1, bad where 1 - x is off by more than 1 %
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mpframe.optim import MasterWeights

SMALL = ("eps", "lr", "weight_decay")
DECAYS = ("betas", "momentum", "alpha", "rho")
_BADLY = 0.01


@dataclass(frozen=True)
class Misheld:
    """A number that the format of an optimizer's tensors does not hold.

    Attributes:
        name: the optimizer's argument; `index` is `[i]` where that is a tuple, else empty.
        value: as it was given.
        held: what the format makes of it.
        form: the format.
        lost: 0 instead of a small number, or 1 instead of a decay.
    """

    name: str
    index: str
    value: float
    held: float
    form: torch.dtype
    lost: bool

    def __str__(self) -> str:
        becomes = f"is {self.held:g}" if self.lost else f"becomes {self.held:.6g}"
        return f"{self.name}{self.index}={self.value:.10g} {becomes} in {self.format}"

    @property
    def format(self) -> str:
        """The format's name: `float16`, `bfloat16` or `float32`."""
        return str(self.form).removeprefix("torch.")


def misheld_numbers(optimizer: MasterWeights) -> Iterator[Misheld]:
    """The numbers an optimizer was made with that its format loses or holds badly."""
    form = _format_of(optimizer)
    for name, index, value in _numbers(optimizer):
        held = float(torch.tensor(value, dtype=torch.float64).to(form))
        kept, given = (1.0 - held, 1.0 - value) if name in DECAYS else (held, value)
        lost = kept == 0.0 < given
        if lost or abs(kept - given) > _BADLY * abs(given):
            yield Misheld(name, index, value, held, form, lost)


def _format_of(optimizer: MasterWeights) -> torch.dtype:
    """The narrowest format of what the optimizer updates."""
    formats = {optimizer.master_of(parameter).dtype for parameter in optimizer.parameters}
    return min(formats, key=lambda form: form.itemsize, default=torch.float32)


def _numbers(optimizer: MasterWeights) -> Iterator[tuple[str, str, float]]:
    """(name, index, value) of every number the optimizer was made with."""
    for name, value in optimizer.optimizer.defaults.items():
        if name in (*SMALL, *DECAYS):
            several = isinstance(value, tuple | list)
            for index, number in enumerate(value if several else [value]):
                if isinstance(number, float):
                    yield name, f"[{index}]" if several else "", number
