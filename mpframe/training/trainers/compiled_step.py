"""`trainer.compile=step`: forward, backward, check, clipping, update and scaler as one graph.

The step is not written again. The trainer's own step is recorded while it runs, with all decisions
on the device as on an accelerator, and the record is compiled (step_record.py). Every kind of step
has its record: a shape of batch, a state of the optimizer, the attributes of modules, and so on.

    the first step of a kind    is recorded on its batch, undone, compiled, and runs compiled
    the second                  is recorded as well, and must give the same record
    all others                  run compiled

A step that makes state of the optimizer, as the first one of a run, is not recorded: it runs op by
op. A recorded step updates even if its gradients are not finite, and at its end each tensor gets
its old value back if the step is to be skipped: w <- where(skipped, old, new).

What follows a step runs outside of the graph, as always: averages, schedules, callbacks.
"""

import logging
import random
import sys
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from mpframe.checkpoint.state import RandomState
from mpframe.core.buffers import ModuleState
from mpframe.core.callback import Batch
from mpframe.core.loss_scaling.scaler import Scaler
from mpframe.core.optim.master_weights import MasterWeights
from mpframe.core.optim.masters import Master, mark_known, master_behind, sync_from_weights
from mpframe.core.optim.widening import frozen_beside, widen_written
from mpframe.core.step_result import StepResult, read_verdicts
from mpframe.core.tree import HALF, fields_of, host_waits_for, tensors_in, widest
from mpframe.core.user_code import describe_error, name_of
from mpframe.training.callbacks.guards import spikes_of
from mpframe.training.callbacks.schedules import Schedules
from mpframe.training.trainer import Trainer
from mpframe.training.trainers.step_record import (
    Recorder,
    RefuseReads,
    StepRecord,
    Watcher,
    refused,
)

log = logging.getLogger(__name__)

_MOST = 8  # kinds of step that are compiled: each takes seconds, and a large model minutes


class CompiledTrainer(Trainer):
    """A `Trainer` whose steps are compiled as a whole.

    ConfigError, also from `train_step`: something cannot be in one graph.
    """

    compiles_steps = True
    optimizer: Any  # a `MasterWeights`, else it is refused
    scaler: Any

    def __post_init__(self) -> None:
        super().__post_init__()
        self._wrapped = self.optimizer.optimizer  # It steps the masters.
        self.compiled_model = self.model  # Validation runs it as it is.
        self._records: dict[Any, StepRecord] = {}  # by kind of step
        self._confirmed: set[Any] = set()  # kinds of which two records were equal
        self._begun = False  # whether a step was applied op by op
        self._recording = self._warned = False
        self._homes: list[Any] = [
            home for m in self.model.modules() for home in (m._parameters, m._buffers) if home
        ]
        self._watcher = Watcher(self.model, self.objective)
        self._rates: list[Tensor] = []  # 0-d, the learning rates of the groups
        self._frozen = frozen_beside(self.model.parameters())

    def train_step(self, *micro_batches: Batch) -> StepResult:
        """Make one optimizer step, compiled unless it makes state of the optimizer."""
        if any(isinstance(algorithm, Schedules) for algorithm in self.algorithms.values()):
            self.read_verdicts()  # This step needs the rate that follows them.
        batches = [self.on_device(batch) for batch in micro_batches]
        # What other code has written into half weights, as every step looks.
        for frozen in self._frozen:
            widen_written(frozen, self.progress.global_step)
        sync_from_weights(self._pairs())
        tensors = [*self._state(), *tensors_in(tuple(batches)), *self._present_rates()]
        inputs, kind = list(dict.fromkeys(tensors)), self._kind_of(batches, tensors)
        if kind not in self._confirmed and not self._prepare(kind, batches, inputs):
            result = super().train_step(*batches)
            self._begun = self._begun or not bool(result.skipped)
            return result
        result, self.scaler.state = self._records[kind](inputs)
        self._note_writes()
        for name, algorithm in self.algorithms.items():
            if algorithm.before_update(self, [result.loss]) is not None:
                raise refused(_decides(name))
        if not host_waits_for(self.device):
            verdict = read_verdicts([(result.found_inf, result.dropped)])[0]
            result = replace(result, verdict=verdict)
        return self.finish_step(result)

    def finish_step(self, result: StepResult) -> StepResult:
        """Do all that follows a step, but not in a record."""
        return result if self._recording else super().finish_step(result)

    def check_fit(self) -> None:
        """Raise ConfigError for what cannot be in one graph."""
        super().check_fit()
        spikes, scaler = spikes_of(self), self.scaler
        if self.comm.size > 1:
            raise refused(f"{self.comm.size} ranks average their gradients within a step")
        if not isinstance(self.optimizer, MasterWeights):
            raise refused("several optimizers share a step")
        if self.precision.op_handlers:
            products = self.precision.policy.products
            raise refused(f"dtype.products={products} runs ops by a handler, which may keep state")
        if scaler is not None and not isinstance(scaler, Scaler):
            raise refused(f"loss_scaling={name_of(scaler)} is not derived from mpframe's Scaler")
        if spikes is not None and spikes.policy != "warn":
            raise refused(_decides("loss_spikes"))

    def _prepare(self, kind: Any, batches: Sequence[Batch], inputs: list[Tensor]) -> bool:
        """Record and compile a kind of step, or confirm its record. False: it runs op by op."""
        if not self._wrapped.state and not self._begun:
            return False
        known = self._records.get(kind)
        if known is None and len(self._records) == _MOST:
            if not self._warned:
                log.warning(
                    "warning: trainer.compile=step: %d kinds of step are compiled, and all others "
                    "run op by op: batches differ in shape, or settings of model or optimizer "
                    "change",
                    _MOST,
                )
            self._warned = True
            return False
        record = self._record(batches, inputs)
        if record is None:
            return False
        if known is not None:
            known.refuse_unless_equal(record)
            self._confirmed.add(kind)
            return True
        try:
            record.compile(inputs)
        except Exception as error:
            raise refused(f"torch's compiler raised {describe_error(error)}") from error
        self._records[kind] = record
        return True

    def _record(self, batches: Sequence[Batch], inputs: list[Tensor]) -> StepRecord | None:
        """Record a step and undo it. None: it made state of the optimizer, which a graph cannot."""
        _refuse_hooks(self._wrapped)
        modules, drawn = ModuleState.of(self.model), _python_random()
        places, held = [tensor.data_ptr() for tensor in inputs], self._undone()
        with self._undoing(batches), self._on_device():
            counts = self._python_values()
            recorder = Recorder(inputs)
            with RefuseReads(), recorder, torch.no_grad():
                undone = [(tensor, tensor.clone()) for tensor in held]
                with torch.enable_grad():
                    result = super().train_step(*batches)
                skipped = result.skipped
                for tensor, old in undone:
                    tensor.copy_(torch.where(skipped, old, tensor))
            record = recorder.finish((result, self.scaler.state))
            now_held, now_counts = self._undone(), self._python_values()
        if len(now_held) > len(held):
            return None
        if any(now is not was for now, was in zip(now_held, held, strict=True)):
            raise refused("the optimizer replaces tensors of its state")
        _refuse_counts(counts, now_counts)
        if drawn != _python_random():
            raise refused("a step draws random numbers of Python or numpy")
        for _, name, value, _ in modules.find_replaced():
            raise refused(f"a step sets the attribute {name} of a module to {value!r:.40}")
        if places != [tensor.data_ptr() for tensor in inputs]:
            raise refused("a step moves weights to other memory")
        return record

    @contextmanager
    def _undoing(self, batches: Sequence[Batch]) -> Iterator[None]:
        """Context manager that puts everything back that a step changes, its batches as well."""
        before = [(tensor, tensor.detach().clone()) for tensor in self._state()]
        given = [(t, t.detach().clone(), t._version) for t in tensors_in(tuple(batches))]
        optimizer, random_state = self._wrapped, RandomState.now(self.device)
        of_scaler = dict(self.scaler.state)
        of_optimizer = {parameter: dict(held) for parameter, held in optimizer.state.items()}
        try:
            yield
        finally:
            optimizer.state.clear()
            optimizer.state.update(of_optimizer)
            self.scaler.state = of_scaler
            with torch.no_grad():
                # An expanded tensor cannot be written at all.
                before += [(t, old) for t, old, version in given if t._version != version]
                for tensor, old in before:
                    tensor.copy_(old)
            random_state.restore(self.device)
            self._note_writes()

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Context manager in which the step reads nothing, and the optimizer takes tensors."""
        optimizer = self.optimizer
        settings = [dict(group) for group in self._wrapped.param_groups]
        before = optimizer.skips_on_device, torch.compiler._is_compiling_flag, self.algorithms
        self._recording = torch.compiler._is_compiling_flag = optimizer.skips_on_device = True
        optimizer.stepped_once.update(self._undone())  # What is recorded makes no state.
        self.algorithms = {}  # They look at the step when it is over.
        try:
            for group, rate in zip(self._wrapped.param_groups, self._rates, strict=True):
                if group.get("capturable") is False:
                    group["capturable"] = True  # Counts its steps on the device.
                if group.get("foreach", False) is None and not group.get("fused"):
                    group["foreach"] = True  # Only these kernels take the rate as a tensor.
                group["lr"] = rate
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            self._recording = False
            optimizer.skips_on_device, torch.compiler._is_compiling_flag, self.algorithms = before
            for group, kept in zip(self._wrapped.param_groups, settings, strict=True):
                group.update(kept)

    def _python_values(self) -> list[tuple[str, Any]]:
        """Return what the optimizer keeps beside tensors, by its names."""
        kept = [*self._wrapped.param_groups, *self._wrapped.state.values()]
        entries = [entry for held in kept for entry in held.items()]
        return [(n, v) for n, v in entries if n != "params" and not isinstance(v, Tensor)]

    def _kind_of(self, batches: Sequence[Batch], tensors: Sequence[Tensor]) -> Any:
        """Return all that a record depends on, except the values of `tensors`."""
        first: dict[Tensor, int] = {}  # A batch may hold a tensor twice.
        settings = [
            {name: value for name, value in group.items() if name not in ("params", "lr")}
            for group in self._wrapped.param_groups
        ]
        return (
            tuple(map(_form, batches)),
            tuple([first.setdefault(tensor, len(first)) for tensor in tensors]),
            tuple([(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors]),
            self._watcher.look(self.plan),
            repr(settings),
        )

    def _state(self) -> list[Tensor]:
        """Return every tensor that a step takes from the step before."""
        model = [tensor for home in self._homes for tensor in home.values() if tensor is not None]
        return list(dict.fromkeys([*model, *self._undone(), *self.scaler.state.values()]))

    def _undone(self) -> list[Tensor]:
        """Return what an update changes. Buffers are restored by the step itself."""
        half = [weight for weight, _ in self._pairs()]
        stepped = [t for group in self._wrapped.param_groups for t in group["params"]]
        kept = self._wrapped.state.values()
        state = [value for held in kept for value in held.values() if isinstance(value, Tensor)]
        return [*half, *stepped, *state]

    def _present_rates(self) -> list[Tensor]:
        """Return the groups' learning rates as tensors, which keep their places."""
        groups = self._wrapped.param_groups
        while len(self._rates) < len(groups):
            self._rates.append(torch.zeros((), dtype=widest(self.device)))
        for rate, group in zip(self._rates, groups, strict=True):
            rate.fill_(group["lr"])
        return self._rates

    def _note_writes(self) -> None:
        """Note what a graph has written, because that raises no version."""
        torch.autograd.graph.increment_version(self._undone())
        mark_known(self._pairs())

    def _pairs(self) -> list[tuple[Tensor, Master]]:
        """Return the optimizer's half weights with their masters, frozen ones as well."""
        weights = [p for group in self.optimizer.param_groups for p in group["params"]]
        pairs = [(weight, master_behind(weight)) for weight in weights if weight.dtype in HALF]
        return [(weight, master) for weight, master in pairs if master is not None]


def _refuse_hooks(optimizer: Any) -> None:
    hooks = {**optimizer._optimizer_step_pre_hooks, **optimizer._optimizer_step_post_hooks}
    for hook in hooks.values():
        raise refused(f"{name_of(hook)} hooks into the optimizer's step, which no graph calls")


def _refuse_counts(before: list[tuple[str, Any]], after: list[tuple[str, Any]]) -> None:
    for (name, was), (_, now) in zip(before, after, strict=True):
        if now is not was and now != was:
            raise refused(f"the optimizer keeps {name}, which changes, outside of tensors")


def _decides(callback: str) -> str:
    return f"callbacks.{callback} decides within a step whether it is skipped"


def _form(node: Any) -> Any:
    """Return a batch without its tensors, whose strides it keeps."""
    if isinstance(node, Tensor):
        return node.stride()
    if isinstance(node, PackedSequence):
        return tuple(node.batch_sizes.tolist()), _form(node.data)
    inner = dict(enumerate(node)) if type(node) in (tuple, list) else fields_of(node)
    if inner:
        return type(node), tuple((name, _form(value)) for name, value in inner.items())
    return node if isinstance(node, Hashable) else repr(node)


def _python_random() -> Any:
    """Return the states of Python's and numpy's generators, comparable by ==."""
    numpy = sys.modules.get("numpy")
    state = numpy and numpy.random.get_state()
    return random.getstate(), state and (state[1].tobytes(), *state[2:])
