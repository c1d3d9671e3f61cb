"""A count of the optimizer steps of this process, of all optimizers together.

Fused optimizers write weights without raising their version counters, so what was made from a
weight is old after a step, whatever its counter says. An update by buckets counts more than once:
compare the number, and do not compute with it.
"""

from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

_taken = 0


def _count_step(*_: Any) -> None:
    global _taken
    _taken += 1


register_optimizer_step_post_hook(_count_step)


def taken() -> int:
    """A number that differs after each step."""
    return _taken
