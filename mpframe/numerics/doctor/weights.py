"""Does the half format in which weights are stored or computed hold them?

float16 holds magnitudes from 2^-24 to 65504, with all of its bits from 2^-14 on; bfloat16 has the
range of fp32. Weights that were trained in bfloat16 may be anywhere in that range, and so may their
activations.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mpframe.numerics.doctor.subject import Subject
from mpframe.numerics.hints import Finding, error, few, warning
from mpframe.numerics.remedies import pin_words

_MANY_SUBNORMAL = 0.05
_MANY_LOST = 0.01
_TELLING = (
    64  # values, and a quarter as many different ones: fewer values may fit bfloat16 by chance
)


def check_weight_range(subject: Subject) -> Iterator[Finding]:
    """Weights beyond the half format's largest number."""
    if subject.half is None:
        return
    limit = torch.finfo(subject.half).max
    beyond = {
        module: (name, float(values.abs().max()))
        for module, name, values in subject.half_weights()
        if values.numel() and bool((values.abs() > limit).any())
    }
    if beyond:
        name, largest = next(iter(beyond.values()))
        yield error(
            f"{few(n for n, _ in beyond.values())}: weights beyond {limit:g}, the largest "
            f"{subject.policy.half} number ({name} reaches {largest:.4g})",
            *pin_words(beyond),
        )


def check_small_weights(subject: Subject) -> Iterator[Finding]:
    """Weights that are 0 or have fewer bits in half."""
    small = {
        module: (name, lost, subnormal)
        for module, name, values in subject.half_weights()
        for lost, subnormal in [_small(values, subject.half)]
        if lost > _MANY_LOST or subnormal > _MANY_SUBNORMAL
    }
    if small:
        name, lost, subnormal = max(small.values(), key=lambda entry: entry[1:])
        yield warning(
            f"{few(n for n, *_ in small.values())}: small weights; in {subject.policy.half} "
            f"{lost:.1%} of {name} become 0 and {subnormal:.1%} subnormal",
            *pin_words(small),
        )


def check_training_format(subject: Subject) -> Iterator[Finding]:
    """Weights that were trained in bfloat16, in a float16 run."""
    if subject.half != torch.float16:
        return
    fix = ("dtype.half=bfloat16",)
    source = subject.options.get("init_from")
    if subject.trained_in and "bfloat16" in subject.trained_in:
        yield warning(
            f"init_from={source}: trained as {subject.trained_in}, whose activations may be beyond "
            "65504, the largest float16 number",
            *fix,
        )
        return
    born = [name for _, name, values in subject.half_weights() if _all_bfloat16(values)]
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


def _all_bfloat16(values: Tensor) -> bool:
    """All values are bfloat16 numbers, and there are too many of them for chance.

    Every format has powers of two and whole numbers up to 2^8, so a few of them prove nothing.
    """
    if values.numel() < _TELLING or not torch.equal(values, values.bfloat16().float()):
        return False
    different: int = torch.unique(values).numel()
    return different >= _TELLING // 4
