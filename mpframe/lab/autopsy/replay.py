"""A step to examine, and its replay in another format or at another scale, observed op by op.

Nothing changes: no optimizer steps, and gradients, modes and all that `preserve_state` keeps are
put back. The fp32 replay computes with the masters and without casts, so precision is not the cause
if it is not finite. It is not scaled: its gradients times the scale are the gradients that the run
would have in a format without limits.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from mpframe.checkpoint.state import RandomState
from mpframe.core.callback import Batch
from mpframe.core.objective import NamedObjective, samples_in
from mpframe.core.optim.widening import fp32_weights
from mpframe.core.tree import HALF, device_of
from mpframe.lab.autopsy.watch import Trace, Watch, magnitudes_of
from mpframe.precision.precision import Precision
from mpframe.precision.storage import formats_of
from mpframe.precision.trace import preserve_state


@dataclass(frozen=True)
class Case:
    """A step, and the model that takes it."""

    model: nn.Module  # with the weights and buffers the step began with
    precision: Precision  # has prepared the model
    objectives: Sequence[NamedObjective]  # in their order. Their scalers are not used.
    batches: Sequence[Batch]  # as the objectives take them, on the model's device
    scales: Mapping[str, float]  # by the name of the loss
    floors: Mapping[str, float] = field(default_factory=dict)  # of the scalers that have one
    scaling: str = "none"  # or `static`, `Backoff`, `LogMax`
    samples: Sequence[Sequence[int]] = ()  # each batch's indices in the dataset, if known
    random: RandomState | None = None  # before the step, or None for the current state
    first_loss: float | None = None  # unscaled, of the run's first step, to tell divergence
    skipped: frozenset[str] | None = None  # the losses whose step was skipped, or None for all

    def count(self, number: int) -> int:
        known = self.samples[number] if number < len(self.samples) else ()
        return len(known) or samples_in(self.batches[number])

    @property
    def half(self) -> torch.dtype:
        """The run's 16-bit format, or float32 in an fp32 run, which has no narrower limit."""
        policy = self.precision.policy
        return torch.float32 if policy.mode == "fp32" else policy.half_dtype

    @property
    def room_below(self) -> int:
        """Octaves down to the floor, or to 1 if the floor is higher: a user can lower it."""
        lowest = {name: min(1.0, self.floors.get(name, 1.0)) for name in self.scales}
        rooms = (max(0.0, math.log2(scale / lowest[name])) for name, scale in self.scales.items())
        return int(min(rooms, default=0.0))


@dataclass(frozen=True)
class Setting:
    """The way a step is replayed. Without arguments, as it ran."""

    fp32: bool = False  # without any cast and unscaled, whatever the run's mode
    octaves: int = 0  # the scales are multiplied by 2^octaves
    pins: tuple[str, ...] = ()  # modules pinned to fp32 besides the run's pins
    denied: tuple[str, ...] = ()  # ops that run in fp32 besides the run's

    @property
    def recast(self) -> bool:
        """Whether other ops or weights are half than in the run."""
        return bool(self.fp32 or self.pins or self.denied)


@dataclass(frozen=True)
class Pass:
    """Forward and backward of one loss on one micro-batch."""

    batch: int  # number of the micro-batch in the step
    objective: str
    scale: float
    loss: float  # unscaled
    trace: Trace
    weights_finite: bool  # the gradients of all weights

    @property
    def loss_finite(self) -> bool:
        return math.isfinite(self.loss)

    @property
    def finite(self) -> bool:
        """Whether the optimizer could have taken the step."""
        return self.loss_finite and self.weights_finite


@dataclass(frozen=True)
class Replay:
    """All passes of a step, in the order they ran."""

    setting: Setting
    passes: Sequence[Pass]

    @property
    def finite(self) -> bool:
        return all(one.finite for one in self.passes)

    @property
    def loss(self) -> float:
        return sum(one.loss for one in self.passes) / max(1, len(self.passes))


def replay(case: Case, setting: Setting) -> Replay:
    """Repeat a step's forward and backward passes, and leave all as it was."""
    precision = _precision(case.precision, setting)
    with _preserve(case), ExitStack() as stack:
        if setting.recast:
            formats = formats_of(case.model, precision.policy, case.precision.uses(case.model))
            narrow = {weight for weight, dtype in formats.items() if dtype != torch.float32}
            stack.enter_context(fp32_weights(case.model, narrow))
            for hook in precision.attach(case.model):
                stack.callback(hook.remove)
        if setting.fp32:
            for buffer in case.model.buffers():
                if buffer.dtype in HALF:
                    stack.callback(setattr, buffer, "data", buffer.data)
                    buffer.data = buffer.data.float()
        passes = [
            _pass(case, number, objective, precision, setting)
            for number in range(len(case.batches))
            for objective in case.objectives
        ]
    wanted = case.skipped
    return Replay(setting, [p for p in passes if wanted is None or p.objective in wanted])


def _pass(
    case: Case, number: int, loss_of: NamedObjective, precision: Precision, setting: Setting
) -> Pass:
    case.model.zero_grad()
    scale = 1.0 if setting.fp32 else case.scales[loss_of.name] * 2.0**setting.octaves
    watch = Watch(case.model, case.half, case.count(number))
    with watch.modules(), precision.cast(), watch:
        loss = loss_of(case.model, case.batches[number]).loss
    (loss * scale).backward(inputs=loss_of.parameters)  # type: ignore[no-untyped-call]
    watch.count_weights()
    gradients = [p.grad for p in case.model.parameters() if p.grad is not None]
    finite = magnitudes_of(gradients).finite
    return Pass(number, loss_of.name, scale, float(loss.detach()), watch.trace, finite)


def _precision(run: Precision, setting: Setting) -> Precision:
    if setting.fp32:
        return Precision()
    if not setting.recast:
        return run
    policy = run.policy
    ops = policy.ops.moved(dict.fromkeys(setting.denied, "deny"))
    ops = replace(ops, modules={**ops.modules, **dict.fromkeys(setting.pins, "fp32")})
    kept = {"compute": policy.compute, "products": policy.products, "recipes": policy.recipes}
    return Precision(policy.mode, policy.half, ops=ops, **kept)  # type: ignore[arg-type]


@contextmanager
def _preserve(case: Case) -> Iterator[None]:
    """Context manager that starts as the step did, and puts everything back."""
    gradients = {parameter: parameter.grad for parameter in case.model.parameters()}
    modes = {module: module.training for module in case.model.modules()}
    try:
        with preserve_state(case.model), case.precision.preserve_state():
            case.model.train()
            if case.random is not None:
                case.random.restore(device_of(case.model))
            yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for module, training in modes.items():
            module.training = training
