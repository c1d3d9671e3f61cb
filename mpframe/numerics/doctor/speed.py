"""What costs time: emulated half, and waits for data."""

import math
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from mpframe.numerics.doctor.restored import restored
from mpframe.numerics.doctor.subject import Subject
from mpframe.numerics.hints import Finding, note, warning
from mpframe.precision.policy import has_native_half

_MEASURED = 4  # batches
_MUCH = 1 / 3  # of the time of a step
_SECONDS = 10.0  # of the whole run; a shorter wait is not worth a warning


def check_emulation(subject: Subject) -> Iterator[Finding]:
    """Half on a CPU: emulated, or in kernels that are much slower than fp32's."""
    policy = subject.policy
    if subject.half is None or subject.device.type != "cpu":
        return
    if policy.emulates(subject.device):
        yield note(
            f"dtype.half={policy.half} on cpu is emulated: the numbers are a tensor core's, the "
            "speed and memory are not",
            _native(policy.half),
        )
    elif not has_native_half(policy.half):
        yield warning(
            f"dtype.compute=native: this cpu has no {policy.half} products, and PyTorch's kernels "
            "for them are many times slower than fp32's",
            "dtype.compute=auto",
        )


def check_loading(subject: Subject) -> Iterator[Finding]:
    """Data that loads slower than the steps that use it; measured on a few batches."""
    steps = subject.trainer.plan.total_steps(len(subject.loader))
    pace = measure(subject)
    if pace is None or pace.waits <= _MUCH * (pace.step + pace.waits):
        return
    whole = pace.waits * steps * subject.trainer.plan.accumulate
    if whole > _SECONDS:
        yield warning(
            f"dataset.workers={pace.workers}: loading is the bottleneck, {pace.load * 1e3:.0f} ms "
            f"a batch for steps of {pace.step * 1e3:.1f} ms, about {whole:.0f} s of waiting in all",
            *_faster(subject, pace),
        )


@dataclass(frozen=True)
class Pace:
    """Seconds for each batch.

    Attributes:
        load: to load it, with the workers there are.
        step: to train on it.
        workers: processes that load.
    """

    load: float
    step: float
    workers: int

    @property
    def waits(self) -> float:
        """Seconds each step waits for its batch; workers load while the step computes."""
        return max(0.0, self.load - self.step) if self.workers else self.load


def measure(subject: Subject) -> Pace | None:
    """Time a few batches and as many steps on them; None if an epoch is too short.

    The trainer is restored.
    """
    workers = int(subject.options.get("dataset.workers", 0))
    ahead = 1 + 2 * workers  # The workers have loaded these in advance.
    stream = subject.loader.epoch(0)
    for _ in islice(stream, ahead):
        pass
    started = time.perf_counter()
    batches = list(islice(stream, _MEASURED))
    load = time.perf_counter() - started
    if not batches:
        return None
    with restored(subject.trainer):
        subject.trainer.train_step(batches[0])
        step = _seconds(subject, batches)
    return Pace(load / len(batches), step / len(batches), workers)


def _seconds(subject: Subject, batches: Iterable[Any]) -> float:
    _wait(subject.device)
    started = time.perf_counter()
    for batch in batches:
        subject.trainer.train_step(batch)
    _wait(subject.device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _faster(subject: Subject, pace: Pace) -> tuple[str, ...]:
    """More workers, up to the number of cores; then no augmentation."""
    cores = os.cpu_count() or 1
    wanted = math.ceil(pace.load * max(pace.workers, 1) / max(pace.step, 1e-6))
    if pace.workers < cores:
        return (f"dataset.workers={min(cores, max(wanted, pace.workers + 1))}",)
    augmented = subject.options.get("dataset.augment", "none") != "none"
    return ("dataset.augment=none",) if augmented else ()


def _native(half: str) -> str:
    if torch.cuda.is_available():
        return "device=cuda"
    other = half == "float16" and has_native_half("bfloat16")
    return "dtype.half=bfloat16" if other else "dtype=fp32"
