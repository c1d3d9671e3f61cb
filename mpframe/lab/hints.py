"""Checks for options that are allowed, but probably not intended. They compute nothing.

Each yields findings on a `PlannedRun`: a line, with the words to type if an option helps. A run
reports them at its start, and so does the doctor, which has more checks.
"""

import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

import torch

from mpframe.core.loss_scaling.scaler import NoScaling, name_of
from mpframe.core.optim.master_weights import MasterWeights
from mpframe.core.tree import dtype_name
from mpframe.data.loading import Loader
from mpframe.precision.policy import Policy
from mpframe.training.callbacks.ema import ema_of
from mpframe.training.optimizers.multi_optimizer import parts_of
from mpframe.training.trainer import Trainer


class Severity(IntEnum):
    """The weight of a finding, the worst first."""

    ERROR = 0  # The run will fail, or its numbers will be wrong: the doctor's exit code is 1.
    WARNING = 1  # The run loses accuracy or time.
    NOTE = 2  # Good to know.


@dataclass(frozen=True)
class Finding:
    severity: Severity
    what: str  # the option or the modules, its value, and the consequence, in one line
    fix: tuple[str, ...] = ()  # words for the command line, if an option helps

    def __str__(self) -> str:
        line = f"{self.severity.name.lower()}: {self.what}"
        return f"{line}; fix: {shlex.join(self.fix)}" if self.fix else line


def _finder(severity: Severity) -> Callable[..., Finding]:
    def find(what: str, *fix: str) -> Finding:
        return Finding(severity, what, fix)

    return find


error, warning, note = map(_finder, Severity)


ADAPTIVE = ("Backoff", "LogMax")


@dataclass
class PlannedRun:
    """A run that is built and has not begun."""

    trainer: Trainer  # `init_from` taken, before its first step
    loader: Loader  # of the training data

    @property
    def policy(self) -> Policy:
        return self.trainer.precision.policy

    @property
    def half(self) -> torch.dtype | None:
        return None if self.policy.mode == "fp32" else self.policy.half_dtype


def scaling_of(trainer: Trainer) -> str:
    """Return the name of the loss scaling, which is of one kind for all losses."""
    return name_of(next(iter(trainer.scalers.values()), NoScaling()))


def check_unscaled(run: PlannedRun) -> Iterator[Finding]:
    if run.half == torch.float16 and not run.trainer.scalers:
        what = "loss_scaling=none with float16: gradients of at most 3e-08 become 0"
        yield warning(what, "loss_scaling=Backoff")


def check_masters(run: PlannedRun) -> Iterator[Finding]:
    if run.policy.mode == "mixed" and not run.trainer.precision.master_weights:
        lost = f"below half a unit in the last place of {run.policy.half} weights are lost"
        yield warning(f"dtype.master_weights=false: updates {lost}", "dtype.master_weights=true")


def check_casts(run: PlannedRun) -> Iterator[Finding]:
    if run.half and run.policy.ops.empty:
        costs = f"norms, softmax and reductions run in {run.policy.half} too, and lose small terms"
        nothing = "casts nothing with dtype=amp: the run is an fp32 run"
        what = costs if run.policy.mode == "mixed" else nothing
        yield warning(f"ops=none: {what}", "ops=default")


def check_average(run: PlannedRun) -> Iterator[Finding]:
    ema = ema_of(run.trainer)
    steps = run.trainer.plan.total_steps(len(run.loader))
    if ema is not None and steps and 1.0 / (1.0 - ema.decay) > steps:
        over = f"averages over the last {1 / (1 - ema.decay):.0f} steps, and the run has {steps}"
        yield warning(f"trainer.ema_decay={ema.decay:g}: {over}")


SMALL = ("eps", "lr", "weight_decay")
DECAYS = ("betas", "momentum", "alpha", "rho")


def check_numbers(run: PlannedRun) -> Iterator[Finding]:
    """The numbers given to an optimizer that its format loses.

    An optimizer adds eps to tensors of one format, multiplies them by lr and the betas, and rounds
    the results to that format. In float16 (smallest number 2^-24) eps = 1e-8 is 0 and Adam divides
    by 0. In bfloat16 (8 bits) beta = 0.999 is 1 and an average never forgets.
    """
    for part, optimizer in parts_of(run.trainer.optimizer).items():
        path = f"optimizer.parts.{part}" if part else "optimizer"
        formats = {optimizer.master_of(parameter).dtype for parameter in optimizer.parameters}
        form = min(formats, key=lambda one: one.itemsize, default=torch.float32)
        half = form.itemsize == 2 and not run.trainer.precision.master_weights
        fix = ("dtype.master_weights=true",) if half else ()
        for name, index, value in _numbers(optimizer):
            rounded = float(torch.tensor(value, dtype=torch.float64).to(form))
            if rounded != value and rounded == float(name in DECAYS):
                what = f"{path}.{name}{index}={value:.10g}: is {rounded:g} in {dtype_name(form)}"
                yield error(f"{what}, the format {path} works in", *fix)


def _numbers(optimizer: MasterWeights) -> Iterator[tuple[str, str, float]]:
    """Yield (name, index, value) of every number given to the optimizer."""
    for name, value in optimizer.optimizer.defaults.items():
        if name in (*SMALL, *DECAYS):
            several = isinstance(value, tuple | list)
            for index, number in enumerate(value if several else [value]):
                if isinstance(number, float):
                    yield name, f"[{index}]" if several else "", number


R = TypeVar("R", bound=PlannedRun)

HINTS: tuple[Callable[[PlannedRun], Iterable[Finding]], ...] = (
    check_numbers,
    check_unscaled,
    check_masters,
    check_casts,
    check_average,
)


def findings_of(checks: Iterable[Callable[[R], Iterable[Finding]]], run: R) -> list[Finding]:
    """Return the findings of some checks, the worst first."""
    found = [finding for check in checks for finding in check(run)]
    return sorted(found, key=lambda finding: finding.severity)
