"""Replays a saved step, in another format or at another scale, and observes every op of it.

Nothing changes: no optimizer steps, and gradients, buffers and random generators are restored. The
fp32 replay computes with the masters and without casts, so precision is not the cause if it is not
finite. It is not scaled: its gradients times the scale are those that the run's own pass would have
in a format without limits.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mpframe.checkpoint.state import RandomState
from mpframe.numerics.autopsy.case import Case
from mpframe.numerics.autopsy.magnitudes import magnitudes_of
from mpframe.numerics.autopsy.watch import Trace, Watch
from mpframe.objectives import compute
from mpframe.optim import fp32_weights
from mpframe.precision import OpLists, Precision
from mpframe.precision.storage.storage import formats_of
from mpframe.precision.undisturbed import State
from mpframe.training.named_objective import NamedObjective
from mpframe.tree import HALF, device_of


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
            stack.enter_context(precision.attached(case.model))
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
    formats = formats_of(case.model, precision.policy, case.precision.reads(case.model))
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
        with State.of(model), case.precision.undisturbed():
            yield
    finally:
        before.restore(device)
        _restore(gradients, modes)


def _restore(gradients: dict[nn.Parameter, Tensor | None], modes: dict[nn.Module, bool]) -> None:
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
    for module, training in modes.items():
        module.training = training
