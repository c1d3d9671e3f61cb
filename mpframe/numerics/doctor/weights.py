"""Do the weights exist in the half format they are stored in or computed with?

float16 holds magnitudes from 2^-24 to 65504, with all of its bits from 2^-14 on; bfloat16 has the
range of fp32. Weights that were trained in bfloat16 may lie anywhere in that range, and so may the
activations they make.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mpframe.numerics.doctor.finding import Finding, error, few, warning
from mpframe.numerics.doctor.patient import Patient
from mpframe.numerics.overrides import pin_words

_MANY_SUBNORMAL = 0.05
_MANY_LOST = 0.01
_TELLING = 64  # values, and a quarter as many different ones: fewer may be short by chance


def check_weight_range(patient: Patient) -> Iterator[Finding]:
    """Weights beyond the half format's largest number."""
    if patient.half is None:
        return
    limit = torch.finfo(patient.half).max
    beyond = {
        module: (name, float(values.abs().max()))
        for module, name, values in patient.half_weights()
        if values.numel() and bool((values.abs() > limit).any())
    }
    if beyond:
        name, largest = next(iter(beyond.values()))
        yield error(
            f"{few(n for n, _ in beyond.values())}: weights beyond {limit:g}, the largest "
            f"{patient.policy.half} number ({name} reaches {largest:.4g})",
            *pin_words(beyond),
        )


def check_small_weights(patient: Patient) -> Iterator[Finding]:
    """Weights that are 0 or short of bits in half."""
    small = {
        module: (name, lost, subnormal)
        for module, name, values in patient.half_weights()
        for lost, subnormal in [_small(values, patient.half)]
        if lost > _MANY_LOST or subnormal > _MANY_SUBNORMAL
    }
    if small:
        name, lost, subnormal = max(small.values(), key=lambda entry: entry[1:])
        yield warning(
            f"{few(n for n, *_ in small.values())}: small weights; in {patient.policy.half} "
            f"{lost:.1%} of {name} become 0 and {subnormal:.1%} subnormal",
            *pin_words(small),
        )


def check_birth(patient: Patient) -> Iterator[Finding]:
    """Weights that were trained in bfloat16, in a float16 run."""
    if patient.half != torch.float16:
        return
    fix = ("dtype.half=bfloat16",)
    source = patient.options.get("init_from")
    if patient.born_in and "bfloat16" in patient.born_in:
        yield warning(
            f"init_from={source}: trained as {patient.born_in}, whose activations may lie beyond "
            "65504, the largest float16 number",
            *fix,
        )
        return
    born = [name for _, name, values in patient.half_weights() if _bfloat16_born(values)]
    if born:
        yield warning(
            f"{few(born)}: all values are bfloat16 numbers; weights trained in bfloat16 may make "
            "activations beyond 65504, the largest float16 number",
            *fix,
        )


def _small(values: Tensor, half: torch.dtype | None) -> tuple[float, float]:
    """The shares of the values other than 0 that are 0, and that are subnormal, in half."""
    assert half is not None
    magnitudes = values[values != 0].abs()
    if magnitudes.numel() == 0:
        return 0.0, 0.0
    lost = magnitudes.to(half) == 0
    subnormal = (magnitudes < torch.finfo(half).smallest_normal) & ~lost
    return float(lost.float().mean()), float(subnormal.float().mean())


def _bfloat16_born(values: Tensor) -> bool:
    """All values are short, and there are too many of them for chance.

    A value with bits to spare (a power of two, a whole number up to 2^8) says nothing.
    """
    if values.numel() < _TELLING or not torch.equal(values, values.bfloat16().float()):
        return False
    different: int = torch.unique(values).numel()
    return different >= _TELLING // 4
