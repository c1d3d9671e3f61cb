"""What a validation gives, and the fp32 weights it may be made with."""

from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from mpframe.precision import JointOptimizer, MasterWeights


@dataclass(frozen=True)
class Evaluation:
    """One validation: the mean loss per sample, and the metric by name.

    Attributes:
        loss: mean loss per sample.
        metric: the metric's name; `none` without one.
        value: its value; nan without one.
        higher_is_better: the metric's direction; None where it does not tell.
    """

    loss: float
    metric: str
    value: float
    higher_is_better: bool | None = None

    @property
    def watched(self) -> float:
        """What tells progress: the metric where it has a direction, else the loss."""
        return self.loss if self.higher_is_better is None else self.value


@contextmanager
def fp32_weights(
    optimizer: MasterWeights | JointOptimizer, model: nn.Module, but: Container[nn.Parameter] = ()
) -> Iterator[None]:
    """Within the block half weights are replaced by copies of their fp32 masters, save `but`."""
    narrow = (p for p in model.parameters() if p.dtype in (torch.float16, torch.bfloat16))
    half = {p: p.data for p in narrow if p not in but}
    try:
        for parameter in half:
            parameter.data = optimizer.master_of(parameter).detach().float().clone()
        yield
    finally:
        for parameter, weight in half.items():
            parameter.data = weight
