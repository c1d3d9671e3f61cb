"""Checks for options that are allowed, but probably not intended. They compute nothing.

Each yields findings on a `PlannedRun`: a line with the command-line words that fix it. A run
reports them at its start, and so does the doctor, which has more checks. `find_rounded_numbers`
finds numbers of an optimizer that a format loses.
"""

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

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
# Their updates are about as large as the learning rate, for any gradients.
_STEPS_OF_LR = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)
_SAMPLED = 4096  # values of each weight that are looked at instead of all


@dataclass
class PlannedRun:
    """A run that is built and has not begun."""

    trainer: Trainer  # `init_from` taken, before its first step
    loader: Loader  # of the training data
    options: Mapping[str, Any]  # every option by its dotted path

    @property
    def policy(self) -> Policy:
        return self.trainer.precision.policy

    @property
    def half(self) -> torch.dtype | None:
        return None if self.policy.mode == "fp32" else self.policy.half_dtype

    @property
    def scaling(self) -> str:
        return scaling_of(self.trainer)

    @property
    def optimizers(self) -> dict[str, MasterWeights]:
        """The optimizers by the path of their options."""
        parts = parts_of(self.trainer.optimizer)
        return {f"optimizer.parts.{n}" if n else "optimizer": part for n, part in parts.items()}


def scaling_of(trainer: Trainer) -> str:
    """Return the name of the loss scaling, which is of one kind for all losses."""
    return name_of(next(iter(trainer.scalers.values()), NoScaling()))


def check_unscaled(run: PlannedRun) -> Iterator[Finding]:
    if run.half == torch.float16 and not run.trainer.scalers:
        what = "loss_scaling=none with float16: gradients of at most 3e-08 become 0"
        yield warning(what, "loss_scaling=Backoff")


def check_needless_scaling(run: PlannedRun) -> Iterator[Finding]:
    kind = run.scaling
    if kind in ADAPTIVE and run.half != torch.float16:
        reason = f", and {run.policy.half} has the range of fp32" if run.half else ""
        what = f"loss_scaling={kind} with dtype={run.policy.mode}{reason}"
        yield note(f"{what}: no gradient needs a scale", "loss_scaling=none")


def check_masters(run: PlannedRun) -> Iterator[Finding]:
    if run.trainer.precision.master_weights:
        return
    if (mode := run.policy.mode) != "mixed":
        what = f"dtype.master_weights=false: changes nothing with dtype={mode}"
        yield warning(f"{what}, whose weights are fp32", "dtype.master_weights=true")
    else:
        lost = f"below half a unit in the last place of {run.policy.half} weights are lost"
        yield warning(f"dtype.master_weights=false: updates {lost}", "dtype.master_weights=true")


def check_casts(run: PlannedRun) -> Iterator[Finding]:
    if run.half and run.policy.ops.empty:
        costs = f"norms, softmax and reductions run in {run.policy.half} too, and lose small terms"
        nothing = "casts nothing with dtype=amp: the run is an fp32 run"
        what = costs if run.policy.mode == "mixed" else nothing
        yield warning(f"ops=none: {what}", "ops=default")


def check_learning_rate(run: PlannedRun) -> Iterator[Finding]:
    """A learning rate that the format of the weights cannot add to most of them."""
    for path, optimizer in run.optimizers.items():
        rate = optimizer.optimizer.defaults.get("lr")
        if not isinstance(optimizer.optimizer, _STEPS_OF_LR) or not isinstance(rate, float):
            continue
        half_unit, form = _half_unit(optimizer)
        if 0.0 < rate < half_unit:
            wide = run.trainer.precision.master_weights or form == torch.float32
            yield warning(
                f"{path}.lr={rate:g}: below {half_unit:.2g}, half a unit in the last place of most "
                f"{dtype_name(form)} weights, which therefore do not move",
                f"{path}.lr=0.001" if wide else "dtype.master_weights=true",
            )


def check_average(run: PlannedRun) -> Iterator[Finding]:
    ema = ema_of(run.trainer)
    steps = run.trainer.plan.total_steps(len(run.loader))
    if ema is not None and steps and 1.0 / (1.0 - ema.decay) > steps:
        over = f"averages over the last {1 / (1 - ema.decay):.0f} steps, and the run has {steps}"
        forgotten = float(f"{10.0 / steps:.2g}")  # a decay rounded to few digits may be 1
        fits = f"trainer.ema_decay={max(0.5, 1.0 - forgotten):.12g}"
        yield warning(f"trainer.ema_decay={ema.decay:g}: {over}", fits)


def check_accumulation(run: PlannedRun) -> Iterator[Finding]:
    wanted, batches = run.trainer.plan.accumulate, len(run.loader)
    if wanted > batches:
        what = f"an epoch has {batches} batches, all that a step takes"
        yield warning(f"trainer.accumulate={wanted}: {what}", f"trainer.accumulate={batches}")


def check_classes(run: PlannedRun) -> Iterator[Finding]:
    outputs, classes = (run.options.get(f"{part}.classes") for part in ("model", "dataset"))
    if not isinstance(outputs, int) or not isinstance(classes, int) or outputs == classes:
        return
    lost = f"its labels from {outputs} on have no output"
    lost = f"{outputs - classes} outputs are never right" if outputs > classes else lost
    what = f"model.classes={outputs}: the data set has {classes}, so {lost}"
    yield warning(what, f"model.classes={classes}")


def _half_unit(optimizer: MasterWeights) -> tuple[float, torch.dtype]:
    """Return half a unit in the last place of the median weight, and the format of its updates."""
    updated = [optimizer.master_of(parameter).detach() for parameter in optimizer.parameters]
    if not updated:
        return 0.0, torch.float32
    narrow = min((tensor.dtype for tensor in updated), key=lambda form: form.itemsize)
    values = [tensor.flatten() for tensor in updated if tensor.dtype == narrow]
    sampled = torch.cat([v[:: -(-v.numel() // _SAMPLED) or 1].float() for v in values])
    magnitudes = sampled[sampled != 0].abs()
    if not magnitudes.numel():
        return 0.0, narrow
    octave = torch.frexp(magnitudes.median()).exponent - 1
    return torch.finfo(narrow).eps / 2 * 2.0 ** int(octave), narrow


SMALL = ("eps", "lr", "weight_decay")
DECAYS = ("betas", "momentum", "alpha", "rho")
_BADLY = 0.01


@dataclass(frozen=True)
class RoundedNumber:
    """A number that the format of an optimizer's tensors loses or rounds badly."""

    name: str  # the optimizer's argument
    index: str  # `[i]` if that is a tuple, else empty
    value: float
    rounded: float  # in the format
    form: torch.dtype
    lost: bool  # 0 instead of a small number, or 1 instead of a decay

    def __str__(self) -> str:
        becomes = f"is {self.rounded:g}" if self.lost else f"becomes {self.rounded:.6g}"
        return f"{self.name}{self.index}={self.value:.10g} {becomes} in {dtype_name(self.form)}"


def find_rounded_numbers(optimizer: MasterWeights) -> Iterator[RoundedNumber]:
    """Yield the numbers given to an optimizer that its format loses or rounds badly.

    An optimizer adds eps to tensors of one format, multiplies them by lr and the betas, and rounds
    the results to that format. In float16 (smallest number 2^-24) eps = 1e-8 is 0 and Adam divides
    by 0. In bfloat16 (8 bits) beta = 0.999 is 1 and an average never forgets. So

        small numbers    lost if round(x) = 0, bad if |round(x) - x| > 1 % of x
        decays           lost if round(x) = 1, bad if 1 - x is off by more than 1 %
    """
    form = _format_of(optimizer)
    for name, index, value in _numbers(optimizer):
        rounded = float(torch.tensor(value, dtype=torch.float64).to(form))
        kept, given = (1.0 - rounded, 1.0 - value) if name in DECAYS else (rounded, value)
        lost = kept == 0.0 < given
        if lost or abs(kept - given) > _BADLY * abs(given):
            yield RoundedNumber(name, index, value, rounded, form, lost)


def _format_of(optimizer: MasterWeights) -> torch.dtype:
    """Return the narrowest format of the tensors that the optimizer updates."""
    formats = {optimizer.master_of(parameter).dtype for parameter in optimizer.parameters}
    return min(formats, key=lambda form: form.itemsize, default=torch.float32)


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
    check_unscaled,
    check_needless_scaling,
    check_masters,
    check_casts,
    check_learning_rate,
    check_average,
    check_accumulation,
    check_classes,
)


def hints_on(run: PlannedRun) -> list[Finding]:
    """Return the findings that a run reports at its start."""
    return findings_of(HINTS, run)


def findings_of(checks: Iterable[Callable[[R], Iterable[Finding]]], run: R) -> list[Finding]:
    """Return the findings of some checks, the worst first."""
    found = [finding for check in checks for finding in check(run)]
    return sorted(found, key=lambda finding: finding.severity)
