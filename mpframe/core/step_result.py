"""The result of one optimizer step, and the only place where the host reads a skip."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Verdict(NamedTuple):
    """Whether one optimizer's step was skipped, on the host."""

    skipped: bool  # Nothing was changed.
    dropped: int  # micro-batches that were left out


def read_verdicts(steps: Sequence[tuple[Tensor, Tensor | None]]) -> list[Verdict]:
    """THE HOST WAITS HERE for the device, and nowhere else in a step: one transfer for all steps.

    Args:
        steps: whether each was skipped, 0-d, 0 or 1, and how many micro-batches it dropped, 0-d
            int64 or None if it was not accumulated.
    """
    if len(steps) == 1 and steps[0][1] is None:
        return [Verdict(bool(steps[0][0].item()), 0)]
    numbers = [number for step in steps for number in step if number is not None]
    together = [number.to(numbers[0].device) for number in numbers]  # from several devices
    values = iter(torch.stack(together).tolist())
    return [Verdict(bool(next(values)), 0 if n is None else int(next(values))) for _, n in steps]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one optimizer step. Every value stays on the device until it is read.

    Attributes:
        found_inf: 0-d, 1 if the step was skipped, as its gradients were not finite, else 0.
        amax: 0-d float32, the largest |gradient|, unscaled, before clipping, inf on overflow.
        grad_norm: 0-d float32, the global 2-norm of the gradients, unscaled, before clipping.
        scale: 0-d float32, the loss scale this step was computed with.
        dropped: 0-d int64, how many micro-batches were left out because they overflowed, or None
            if the step was not accumulated.
        loss: 0-d float32, the unscaled mean loss of the step. Outside the trainer it is the return
            value of the closure, or None.
        verdict: `skipped` and `dropped` on the host, or None until they are read.
        parts: each optimizer's result, by name, if several share the step, else None. Then
            `skipped` is true if all of them skipped, `amax` is the largest, `grad_norm` the norm
            of all gradients together, and `loss` the sum.
    """

    found_inf: Tensor
    amax: Tensor
    grad_norm: Tensor
    scale: Tensor
    dropped: Tensor | None = None
    loss: Tensor | None = None
    verdict: Verdict | None = None
    parts: "Mapping[str, StepResult] | None" = None

    @property
    def skipped(self) -> Tensor:
        """Whether nothing was changed, 0-d bool."""
        return self.found_inf.bool()

    @property
    def known(self) -> Verdict:
        """The verdict, or RuntimeError before it is read. `on_optimizer_step` always has it."""
        if self.verdict is None:
            raise RuntimeError("the verdict on this step was not read yet: Trainer.read_verdicts")
        return self.verdict

    def each(self) -> "Mapping[str, StepResult]":
        """Return the parts by name. The step of a single optimizer is its only part, named ""."""
        return {"": self} if self.parts is None else self.parts

    def any_skipped(self) -> Tensor | bool:
        """Return whether any part was skipped: a bool if the host knows it, else 0-d, 0 or 1."""
        if self.parts is None:
            return self.found_inf if self.verdict is None else self.verdict.skipped
        if self.verdict is None:
            return torch.stack([part.skipped for part in self.parts.values()]).any()
        return any(part.known.skipped for part in self.parts.values())
