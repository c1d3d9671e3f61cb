"""Two choices that name no scaler: the one that suits the run's format, and none at all."""

import torch

from mpframe.loss_scaling.backoff import Backoff
from mpframe.loss_scaling.no_scaling import NoScaling
from mpframe.loss_scaling.ranges import Half, half_format


def auto(mode: str = "mixed", half: Half = torch.float16) -> Backoff | NoScaling:
    """`Backoff` if anything is stored or computed in float16; else `NoScaling`.

    bfloat16 has the range of fp32, so its gradients need no scale.

    Args:
        mode: the dtype mode, "fp32", "mixed" or "amp".
        half: the run's 16-bit format.

    Raises:
        ConfigError: `half` is no such format.
    """
    float16 = mode != "fp32" and half_format(half) == torch.float16
    return Backoff(half=half) if float16 else NoScaling()


def none() -> NoScaling:
    """No scaling. A step whose gradients are not finite is skipped all the same."""
    return NoScaling()
