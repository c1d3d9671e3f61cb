"""A step to examine, and its replay in another format or at another scale, observed op by op.

Nothing changes: no optimizer steps, and gradients, buffers and random generators are restored. The
fp32 replay computes with the masters and without casts, so precision is not the cause if it is not
finite. It is not scaled: its gradients times the scale are what the run's own pass would have in a
format without limits.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from mpframe.checkpoint.state import RandomState
from mpframe.core.buffers import State
from mpframe.core.objective import NamedObjective, compute, count_of
from mpframe.core.op_lists import OpLists
from mpframe.core.precision import Precision
from mpframe.core.storage import formats_of
from mpframe.core.trainer import StepOptimizer
from mpframe.core.tree import HALF, device_of
from mpframe.core.widening import fp32_weights
from mpframe.lab.autopsy.watch import Trace, Watch, magnitudes_of

Batch = Any


@dataclass(frozen=True)
class Case:
    """A step.

    Attributes:
        model: prepared by `precision`, holding the weights and buffers the step began with.
        optimizer: has the fp32 masters of the weights.
        precision: the dtype mode of the run.
        objectives: the losses, in their order; their scalers are not used.
        batches: each micro-batch as the objectives take it, on the model's device.
        scales: the loss scale of each objective, by its name.
        floors: the least scale of each scaler that has a floor, by the name of its loss.
        scaling: `static`, `Backoff`, `LogMax`, or `none`.
        samples: the dataset's indices of each micro-batch's samples; empty if unknown.
        random: the states of torch's generators before the step; None: as they are now.
        first_loss: the unscaled loss of the run's first steps, to tell divergence; None: unknown.
        skipped: the objectives whose step was skipped; None: all count.
    """

    model: nn.Module
    optimizer: StepOptimizer
    precision: Precision
    objectives: Sequence[NamedObjective]
    batches: Sequence[Batch]
    scales: Mapping[str, float]
    floors: Mapping[str, float] = field(default_factory=dict)
    scaling: str = "none"
    samples: Sequence[Sequence[int]] = ()
    random: RandomState | None = None
    first_loss: float | None = None
    skipped: frozenset[str] | None = None

    def count(self, number: int) -> int:
        """How many samples a micro-batch holds."""
        known = self.samples[number] if number < len(self.samples) else ()
        return len(known) or int(count_of(None, self.batches[number]))

    @property
    def half(self) -> torch.dtype:
        """The run's 16-bit format; float32 in an fp32 run, which has no narrower limit."""
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
    """How a step is replayed.

    Attributes:
        fp32: without any cast and unscaled, whatever the run's mode.
        octaves: the scales are multiplied by 2^octaves.
        pins: modules pinned to fp32 besides the run's pins.
        denied: ops that run in fp32 besides the run's.
    """

    fp32: bool = False
    octaves: int = 0
    pins: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()

    @property
    def own(self) -> bool:
        """True if the lists and pins are the run's."""
        return not (self.pins or self.denied)


@dataclass(frozen=True)
class Pass:
    """Forward and backward of one loss on one micro-batch.

    Attributes:
        batch: number of the micro-batch in the step.
        objective: name of the loss.
        scale: the loss scale.
        loss: unscaled.
        trace: what was observed.
        weights_finite: whether the gradients of all weights are.
    """

    batch: int
    objective: str
    scale: float
    loss: float
    trace: Trace
    weights_finite: bool

    @property
    def loss_finite(self) -> bool:
        """Whether the loss is finite."""
        return abs(self.loss) < float("inf")

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
        """Whether all of them are finite."""
        return all(one.finite for one in self.passes)

    @property
    def loss(self) -> float:
        """The mean loss."""
        return sum(one.loss for one in self.passes) / max(1, len(self.passes))


def replay(case: Case, setting: Setting) -> Replay:
    """Repeat a step's forward and backward passes.

    Args:
        case: the step; left as it was.
        setting: how.
    """
    precision = _precision(case.precision, setting)
    with _restored(case), ExitStack() as stack:
        if setting.fp32 or not setting.own:
            stack.enter_context(fp32_weights(case.model, _narrow(case, precision)))
            for hook in precision.attach(case.model):
                stack.callback(hook.remove)
        if setting.fp32:
            stack.enter_context(_fp32_buffers(case.model))
        passes = [
            _pass(case, (number, objective), precision, setting)
            for number in range(len(case.batches))
            for objective in case.objectives
        ]
    wanted = case.skipped
    return Replay(setting, [p for p in passes if wanted is None or p.objective in wanted])


def _pass(
    case: Case, which: tuple[int, NamedObjective], precision: Precision, setting: Setting
) -> Pass:
    number, own = which
    case.model.zero_grad()
    scale = 1.0 if setting.fp32 else case.scales[own.name] * 2.0**setting.octaves
    watch = Watch(case.model, case.half, case.count(number))
    with watch.modules(), precision.cast(), watch:
        loss = compute(own.objective, case.model, case.batches[number]).loss
    (loss * scale).backward(inputs=own.parameters)  # type: ignore[no-untyped-call]
    watch.count_weights()
    gradients = [p.grad for p in case.model.parameters() if p.grad is not None]
    finite = magnitudes_of(gradients).finite
    return Pass(number, own.name, scale, float(loss.detach()), watch.trace, finite)


def _precision(run: Precision, setting: Setting) -> Precision:
    if setting.fp32:
        return Precision()
    if setting.own:
        return run
    policy = run.policy
    ops: OpLists = policy.ops.moved(dict.fromkeys(setting.denied, "deny"))
    ops = replace(ops, modules={**ops.modules, **dict.fromkeys(setting.pins, "fp32")})
    return Precision(
        policy.mode,
        policy.half,
        ops=ops,
        compute=policy.compute,
        products=policy.products,
        recipes=policy.recipes,
    )


def _narrow(case: Case, precision: Precision) -> set[nn.Parameter]:
    """The weights that `precision` stores in half."""
    formats = formats_of(case.model, precision.policy, case.precision.uses(case.model))
    return {parameter for parameter, dtype in formats.items() if dtype != torch.float32}


@contextmanager
def _fp32_buffers(model: nn.Module) -> Iterator[None]:
    """Within the block half buffers are fp32, like the weights."""
    half = {b: b.data for b in model.buffers() if b.dtype in HALF}
    try:
        for buffer in half:
            buffer.data = buffer.data.float()
        yield
    finally:
        for buffer, values in half.items():
            buffer.data = values


@contextmanager
def _restored(case: Case) -> Iterator[None]:
    model, device = case.model, device_of(case.model)
    before = RandomState.now(device)
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    modes = {module: module.training for module in model.modules()}
    try:
        model.train()
        (case.random or before).restore(device)
        with State.of(model), case.precision.preserve_state():
            yield
    finally:
        before.restore(device)
        _restore(gradients, modes)


def _restore(gradients: dict[nn.Parameter, Tensor | None], modes: dict[nn.Module, bool]) -> None:
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
    for module, training in modes.items():
        module.training = training
