"""Buckets: an update goes over a few parameters at a time, and so needs fp32 gradients of few.

The wrapped optimizer is stepped once for each bucket, without the gradients of the others. That
equals one step bit for bit if the optimizer treats each parameter by itself, as nearly all of
torch's do. Any other optimizer gets everything in one bucket.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from mpframe.optim.masters.master import Master, Pair, by_kind

# Half weights with their masters, by the masters' kind.
Bucket = list[tuple[type[Master], list[Pair]]]

# 16 MB of fp32 gradients, as much as a CPU's cache holds. On an accelerator launches count more.
_SIZE_ON_CPU = 2**22
_SIZE = 2**26

_BY_PARAMETER = (
    "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax Muon NAdam RAdam RMSprop Rprop SGD"
)
_STEPS_BY_PARAMETER = {getattr(torch.optim, name) for name in _BY_PARAMETER.split()}


def in_buckets(pairs: Iterable[Pair], device: torch.device) -> list[Bucket]:
    """Return the pairs in their order, cut where a bucket would have too many values."""
    size = _SIZE_ON_CPU if device.type == "cpu" else _SIZE
    buckets: list[list[Pair]] = [[]]
    held = 0
    for weight, master in pairs:
        if held and held + weight.numel() > size:
            buckets.append([])
            held = 0
        buckets[-1].append((weight, master))
        held += weight.numel()
    return [list(by_kind(bucket).items()) for bucket in buckets]


def steps_by_parameter(stepped: Optimizer) -> bool:
    """Whether steps with parts of the gradients equal one with all; hooks expect a single step."""
    optimizer: Any = stepped
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    every = [*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()]
    foreign = [hook for hook in every if not str(hook.__module__).startswith("mpframe.")]
    return type(stepped) in _STEPS_BY_PARAMETER and not hooked and not foreign
