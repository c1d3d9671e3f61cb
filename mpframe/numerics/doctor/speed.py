"""What will cost time: emulated half, waits for the data."""

import math
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from mpframe.numerics.doctor.finding import Finding, note, warning
from mpframe.numerics.doctor.patient import Patient
from mpframe.numerics.doctor.undoing import undone
from mpframe.precision.policy import has_native_half

_MEASURED = 4  # batches
_MUCH = 1 / 3  # of the time of a step
_SECONDS = 10.0  # of the whole run, below which nothing is worth mending


def check_emulation(patient: Patient) -> Iterator[Finding]:
    """Half on a CPU: emulated, or in kernels that are far slower than fp32's."""
    policy = patient.policy
    if patient.half is None or patient.device.type != "cpu":
        return
    if policy.emulates(patient.device):
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


def check_loading(patient: Patient) -> Iterator[Finding]:
    """Data that come slower than the steps that use them; measured on a few batches."""
    steps = patient.trainer.plan.total_steps(len(patient.loader))
    pace = measure(patient)
    if pace is None or pace.waits <= _MUCH * (pace.step + pace.waits):
        return
    whole = pace.waits * steps * patient.trainer.plan.accumulate
    if whole > _SECONDS:
        yield warning(
            f"dataset.workers={pace.workers}: loading is the bottleneck, {pace.load * 1e3:.0f} ms "
            f"a batch for steps of {pace.step * 1e3:.1f} ms, about {whole:.0f} s of waiting in all",
            *_faster(patient, pace),
        )


@dataclass(frozen=True)
class Pace:
    """Seconds a batch.

    Attributes:
        load: to load one, with the workers there are.
        step: to train on one.
        workers: processes that load.
    """

    load: float
    step: float
    workers: int

    @property
    def waits(self) -> float:
        """Seconds each step waits for its batch; workers load while the step computes."""
        return max(0.0, self.load - self.step) if self.workers else self.load


def measure(patient: Patient) -> Pace | None:
    """Time a few batches and as many steps on them; None where an epoch is too short.

    The trainer is afterwards what it was.
    """
    workers = int(patient.options.get("dataset.workers", 0))
    ahead = 1 + 2 * workers  # what workers loaded while nobody asked
    stream = patient.loader.epoch(0)
    for _ in islice(stream, ahead):
        pass
    started = time.perf_counter()
    batches = list(islice(stream, _MEASURED))
    load = time.perf_counter() - started
    if not batches:
        return None
    with undone(patient.trainer):
        patient.trainer.train_step(batches[0])
        step = _seconds(patient, batches)
    return Pace(load / len(batches), step / len(batches), workers)


def _seconds(patient: Patient, batches: Iterable[Any]) -> float:
    _wait(patient.device)
    started = time.perf_counter()
    for batch in batches:
        patient.trainer.train_step(batch)
    _wait(patient.device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _faster(patient: Patient, pace: Pace) -> tuple[str, ...]:
    """More workers, up to the number of cores; past that, no augmentation."""
    cores = os.cpu_count() or 1
    wanted = math.ceil(pace.load * max(pace.workers, 1) / max(pace.step, 1e-6))
    if pace.workers < cores:
        return (f"dataset.workers={min(cores, max(wanted, pace.workers + 1))}",)
    augmented = patient.options.get("dataset.augment", "none") != "none"
    return ("dataset.augment=none",) if augmented else ()


def _native(half: str) -> str:
    if torch.cuda.is_available():
        return "device=cuda"
    other = half == "float16" and has_native_half("bfloat16")
    return "dtype.half=bfloat16" if other else "dtype=fp32"
