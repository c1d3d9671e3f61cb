"""What one optimizer step did, and the one place where the host reads whether it was skipped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


class Verdict(NamedTuple):
    """Whether one optimizer's step was skipped, on the host."""

    skipped: bool  # Nothing was changed.
    dropped: int  # micro-batches that were left out


def read(steps: Sequence[tuple[Tensor, Tensor | None]]) -> list[Verdict]:
    """THE HOST WAITS HERE for the device, and nowhere else in a step: one transfer for all steps.

    Args:
        steps: whether each was skipped, 0-d bool, and how many micro-batches it dropped, 0-d int64;
            None if it was not accumulated.
    """
    numbers = []
    for skipped, dropped in steps:
        numbers += [skipped] if dropped is None else [skipped, dropped]
    values = iter([numbers[0].item()] if len(numbers) == 1 else torch.stack(numbers).tolist())
    verdicts = []
    for _, dropped in steps:
        verdicts.append(Verdict(bool(next(values)), 0 if dropped is None else next(values)))
    return verdicts


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did. Every value stays on the device until it is read.

    Attributes:
        skipped: 0-d bool; True if the gradients were not finite and nothing was changed.
        amax: 0-d float32, the largest |gradient|, unscaled, before clipping; inf on overflow.
        grad_norm: 0-d float32, the global 2-norm of the gradients, unscaled, before clipping.
        scale: 0-d float32, the loss scale this step was computed with.
        dropped: 0-d int64, micro-batches of the step left out because they overflowed; None
            if the step was not accumulated.
        loss: 0-d float32, the unscaled mean loss of the step; outside the trainer what a closure
            returned, or None.
        verdict: `skipped` and `dropped` on the host; None until they are read.
        parts: each optimizer's result, by name, if several share the step; None with one.
            `skipped` is then true if all of them skipped, `amax` is the largest, `grad_norm`
            the norm of all gradients together, `loss` the sum.
    """

    skipped: Tensor
    amax: Tensor
    grad_norm: Tensor
    scale: Tensor
    dropped: Tensor | None = None
    loss: Tensor | None = None
    verdict: Verdict | None = None
    parts: "Mapping[str, StepResult] | None" = None

    @property
    def known(self) -> Verdict:
        """The verdict; RuntimeError if it was not read. `on_optimizer_step` always has it."""
        if self.verdict is None:
            raise RuntimeError("the verdict on this step was not read yet: Trainer.read_verdicts")
        return self.verdict

    def each(self) -> "Mapping[str, StepResult]":
        """Return the parts by name; a step of one optimizer is its own part, named ""."""
        return {"": self} if self.parts is None else self.parts

    def any_skipped(self) -> Tensor | bool:
        """Return whether any part was skipped: a bool if the host knows it, else 0-d bool."""
        if self.parts is None:
            return self.skipped if self.verdict is None else self.verdict.skipped
        if self.verdict is None:
            return any_of([part.skipped for part in self.parts.values()])
        return any(part.known.skipped for part in self.parts.values())


def any_of(verdicts: list[Tensor]) -> Tensor:
    """Return whether any of these 0-d verdicts is true, 0-d bool; a single one itself."""
    return verdicts[0] if len(verdicts) == 1 else torch.stack(verdicts).any()


def either(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return whether one of two 0-d masks is true; None is no mask."""
    if first is None or second is None:
        return first if second is None else second
    return first | second


def largest(magnitudes: list[Tensor]) -> Tensor:
    """Return the largest of these 0-d magnitudes, nan if one is nan; a single one itself."""
    return magnitudes[0] if len(magnitudes) == 1 else torch.stack(magnitudes).max()


def joined_verdict(parts: Mapping[str, StepResult]) -> Verdict | None:
    """Return the verdict on a step of several: skipped if all are; None if one is not known."""
    known = [part.verdict for part in parts.values() if part.verdict is not None]
    if len(known) < len(parts):
        return None
    return Verdict(all(verdict.skipped for verdict in known), max(v.dropped for v in known))


def with_verdicts(results: list[StepResult]) -> list[StepResult]:
    """Return the results with their verdicts; the missing ones are read together."""
    unread: list[StepResult] = []
    for result in results:
        if result.verdict is None:
            unread += result.each().values()
    verdicts = iter(read([(part.skipped, part.dropped) for part in unread]) if unread else ())
    complete = []
    for result in results:
        if result.verdict is None:
            parts = {n: replace(part, verdict=next(verdicts)) for n, part in result.each().items()}
            several = replace(result, parts=parts, verdict=joined_verdict(parts))
            result = parts[""] if result.parts is None else several
        complete.append(result)
    return complete
