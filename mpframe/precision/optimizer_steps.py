"""Counts the optimizer steps of this process, of all optimizers together.

Fused optimizers write weights without raising their version counters, so a step makes stale all
that was made from a weight.
"""

from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

_count = 0


def _count_step(*_: Any) -> None:
    global _count
    _count += 1


register_optimizer_step_post_hook(_count_step)


def count() -> int:
    """A number that differs after each step. An update in buckets counts more than once."""
    return _count
