"""What one optimizer step did, and the one place where the host reads whether it was skipped."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


class Verdict(NamedTuple):
    """What the host knows of a step of one optimizer.

    Attributes:
        skipped: nothing was changed.
        dropped: micro-batches that were left out.
    """

    skipped: bool
    dropped: int


def read(steps: Sequence[tuple[Tensor, Tensor | None]]) -> list[Verdict]:
    """THE HOST WAITS HERE for the device, and nowhere else in a step: one transfer for all steps.

    Args:
        steps: whether each was skipped, 0-d bool, and how many micro-batches it dropped, 0-d int64;
            None if it was not accumulated.
    """
    numbers = []
    for skipped, dropped in steps:
        numbers += [skipped] if dropped is None else [skipped, dropped]
    alone = len(numbers) == 1
    values = iter([numbers[0].item()] if alone else torch.stack(numbers).tolist())
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
        verdict: the same on the host, if it was read already; None if it was not.
        parts: the same of each optimizer, by name, if several share the step; None with one.
            `skipped` is then true if all of them skipped, `amax` the largest, `grad_norm` that
            of all gradients together, `loss` the sum.
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
        """The verdict, if it was read; of a step that a callback is called with, it was.

        Raises:
            RuntimeError: it was not read.
        """
        if self.verdict is None:
            raise RuntimeError("the verdict on this step was not read yet: Trainer.read_verdicts")
        return self.verdict

    def each(self) -> "Mapping[str, StepResult]":
        """The parts by name; a step with one optimizer is its own part, with an empty name."""
        return {"": self} if self.parts is None else self.parts

    def any_skipped(self) -> Tensor | bool:
        """Whether any of the parts was skipped: a bool if the host knows it, else 0-d bool."""
        if self.parts is None:
            return self.skipped if self.verdict is None else self.verdict.skipped
        known = [part.verdict for part in self.parts.values() if part.verdict is not None]
        if len(known) == len(self.parts):
            return any(verdict.skipped for verdict in known)
        return any_of([part.skipped for part in self.parts.values()])


def any_of(verdicts: list[Tensor]) -> Tensor:
    """Whether any of these 0-d verdicts is true, 0-d bool; a single one is returned itself."""
    return verdicts[0] if len(verdicts) == 1 else torch.stack(verdicts).any()


def either(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Whether one of two 0-d masks is true; None is no mask."""
    if first is None or second is None:
        return first if second is None else second
    return first | second


def largest(magnitudes: list[Tensor]) -> Tensor:
    """The largest of these 0-d magnitudes, nan if one is nan; a single one is returned itself."""
    return magnitudes[0] if len(magnitudes) == 1 else torch.stack(magnitudes).max()


def with_verdicts(results: list[StepResult]) -> list[StepResult]:
    """The same steps with their verdicts on the host; all that are not known are read together."""
    unread: list[StepResult] = []
    for own in results:
        if own.verdict is None:
            unread += own.each().values()
    if not unread:
        return results
    verdicts = iter(read([(part.skipped, part.dropped) for part in unread]))
    return [own if own.verdict else _told(own, verdicts) for own in results]


def _told(result: StepResult, verdicts: Iterator[Verdict]) -> StepResult:
    """A step and its parts with the next of the verdicts."""
    if result.parts is None:
        return replace(result, verdict=next(verdicts))
    parts = {name: replace(own, verdict=next(verdicts)) for name, own in result.parts.items()}
    return replace(result, parts=parts, verdict=joined_verdict(parts))


def joined_verdict(parts: Mapping[str, StepResult]) -> Verdict | None:
    """The verdict on all parts of a step: skipped if all of them are; None if one is not known."""
    known = [part.verdict for part in parts.values() if part.verdict is not None]
    if len(known) < len(parts):
        return None
    skipped = all(verdict.skipped for verdict in known)
    return Verdict(skipped, max(verdict.dropped for verdict in known))
