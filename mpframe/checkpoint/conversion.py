"""What loading weights into another precision does to them: the format's rounding and no more.

A checkpoint holds fp32 masters whatever the run's format, so every mode loads every other's.
Masters and optimizer state are taken bit for bit; weights that this mode stores in half are the
masters' rounding. Only the loss scale does not go everywhere: a mode without scaling has no use
for one.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

HALF = (torch.float16, torch.bfloat16)


def rounding(model: nn.Module, weights: Mapping[str, Tensor]) -> str:
    """A clause on the weights of `model` that are half, and so the rounding of `weights`."""
    half = {name: p.dtype for name, p in model.named_parameters() if p.dtype in HALF}
    if not half:
        return "no parameter is rounded"
    held = sum(int((weights[n].abs() > torch.finfo(dtype).max).sum()) for n, dtype in half.items())
    formats = " and ".join(sorted({str(dtype).removeprefix("torch.") for dtype in half.values()}))
    beyond = f", {held} values beyond its range held at its end" if held else ""
    return f"{len(half)} parameters are rounded to {formats}{beyond}"


def conversion(before: str, now: str, rounded: str, scaled: tuple[bool, bool]) -> str:
    """The line that says what became of a checkpoint of another precision.

    Args:
        before, now: the precisions, e.g. `fp32` and `mixed(float16)`.
        rounded: what `rounding` said.
        scaled: whether the loss was scaled then, and is now.
    """
    scale = {
        (True, False): "; its loss scale is not used",
        (False, True): "; the loss scale starts anew",
    }.get(scaled, "")
    return (
        f"checkpoint of {before} taken into {now}: masters and optimizer state as they were, "
        f"{rounded}{scale}"
    )
