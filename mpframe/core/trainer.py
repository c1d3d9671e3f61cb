"""The step: one path, whatever the mode, the micro-batches, the scaler and the ranks are.

`StepTrainer.train_step` is the whole of it, in two halves. `accumulate_losses` runs the
micro-batches forward and backward. `update` steps the optimizer, or skips. If the gradients are not
finite, only the loss scale has changed at the end: not the weights, the optimizer's state, the
buffers, the average, the schedule or the step count.

Trainers in training/ are composed of the two halves: for several losses, for LBFGS, and
`mpframe.Trainer`, which adds the loop over epochs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from mpframe.core.buffers import NO_BUFFERS, Buffers
from mpframe.core.callback import Algorithm, Batch
from mpframe.core.casts import ForwardCasts, NoCasts
from mpframe.core.comm import SINGLE_PROCESS, Comm, Count, Loss
from mpframe.core.errors import ConfigError
from mpframe.core.loss_scaling.scaler import NoScaling, Scaling, scale_of
from mpframe.core.objective import NamedObjective, Objective, require_objective
from mpframe.core.optim.gradients import check_clipping
from mpframe.core.step_result import StepResult
from mpframe.core.tree import device_of, map_tensors
from mpframe.core.user_code import blame


class StepOptimizer(Protocol):
    """An optimizer as a trainer sees it: `MasterWeights`, which explains these, or several."""

    needs_closure: bool

    @property
    def param_groups(self) -> list[Any]: ...
    @property
    def parameters(self) -> list[Tensor]: ...
    def set_comm(self, comm: Comm) -> None: ...
    def zero_grad(self) -> None: ...
    def accumulate(self, scale: Any, count: Any) -> Tensor: ...
    def step(self, *args: Any, **kwargs: Any) -> StepResult: ...
    def master_of(self, parameter: Tensor) -> Tensor: ...
    def inner_state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None: ...
    def masters_by_name(self, model: nn.Module) -> dict[str, Tensor]: ...
    def load_masters(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The options of a step; ConfigError if both bounds are given, or one is out of range."""

    clip_norm: float | None = None  #: of all unscaled gradients together, > 0 and finite
    clip_value: float | None = None  #: instead, of each value of them, > 0 and finite
    compile: bool | str = False  #: the forward pass and its casts into one graph, or the `step`
    reduce: str = "in_backward"  #: when ranks average gradients: this, or "after_backward"

    def __post_init__(self) -> None:
        bounds = {"trainer.clip_norm": self.clip_norm, "trainer.clip_value": self.clip_value}
        check_clipping(**bounds)


@dataclass
class StepTrainer:
    """Makes training steps of a model in a dtype mode.

    Attributes:
        model: prepared by `precision`, on the `device` it is trained on.
        optimizer: what `precision.prepare` returned, or several as a `MultiOptimizer`.
        objective: objective(model, batch) -> StepOutput, its loss the mean over `count` samples of
            a micro-batch. The loss of a step is the mean over the samples of all its micro-batches
            and ranks.
        precision: the dtype mode, a `Precision`; nothing is cast by default.
        scaler: on the model's device. Without one an overflow still skips the step.
        algorithms: by name and in order, callbacks that change the training: a schedule, an average
            of the weights, a rule that skips steps.
        plan: how to clip and compile, and when ranks average gradients.
        comm: the ranks that train together, each on its part of every batch.

    Raises:
        ConfigError: the optimizer evaluates the loss itself, or there is a scaler for each of
            several losses.
        UserCodeError: `objective` is not an objective.
    """

    model: nn.Module
    optimizer: StepOptimizer
    objective: Objective
    precision: ForwardCasts = field(default_factory=NoCasts)
    scaler: Scaling = None
    algorithms: Mapping[str, Algorithm] = field(default_factory=dict)
    plan: StepOptions = field(default_factory=StepOptions)
    comm: Comm = SINGLE_PROCESS

    def __post_init__(self) -> None:
        self.check_fit()
        self.optimizer.set_comm(self.comm)
        self._buffers, self._micro_buffers = Buffers(self.model), Buffers(self.model)
        self.device = device_of(self.model)
        if self.scaler is None:
            self.scaler = NoScaling().to(self.device)
        # The objective is called with this.
        self.compiled_model: Any = torch.compile(self.model) if self.plan.compile else self.model

    def train_step(self, *micro_batches: Batch) -> StepResult:
        """Make one optimizer step on one batch, or on the micro-batches of an accumulation window.

        All are scaled by the same loss scale. The values of the result stay on the device.
        """
        reduce = self.plan.reduce if len(micro_batches) == 1 else "after_backward"
        self.comm.begin_step(self.optimizer, reduce)
        losses = self.accumulate_losses(self.optimizer, self.objectives, micro_batches)
        result = self.update(self.optimizer, self.scaler, losses)
        return self.finish_step(replace(result, loss=losses[0]))

    def accumulate_losses(
        self,
        optimizer: StepOptimizer,
        objectives: Sequence[NamedObjective],
        micro_batches: Sequence[Batch],
    ) -> list[Tensor]:
        """Run the micro-batches forward and backward, and leave `optimizer` their gradients.

        A micro-batch whose gradients are not finite is dropped, and leaves no trace in the buffers.
        Return the mean of each loss over the good micro-batches of all ranks, 0-d.
        """
        if not micro_batches:
            raise ConfigError("train_step: there is no batch; give it one, or several")
        # Not after the step: a CPU's allocator would give the memory back and ask for it again.
        optimizer.zero_grad()
        self._buffers.save()
        done = []
        # A single micro-batch is undone with its step.
        buffers = self._micro_buffers if len(micro_batches) > 1 else NO_BUFFERS
        for batch in map(self.on_device, micro_batches):
            buffers.save()
            losses = [self.forward_backward(objective, batch) for objective in objectives]
            amax = self.comm.accumulate(optimizer, losses)
            buffers.restore_unless_good(amax, losses)
            done.append((losses, amax))
        return self.comm.reduce(optimizer, done, self._buffers)

    def forward_backward(self, part: NamedObjective, batch: Batch) -> Loss:
        """Run forward under the casts, the loss in fp32 or wider, and backward from the scale."""
        output = part(self.compiled_model, batch, self.precision.cast())
        scale, count = scale_of(part.scaler), cast(Count, output.count)
        try:
            self.comm.backward(output.loss, scale, count, part.parameters)
        except BaseException:
            blame("model: the backward pass of", self.model)
        return Loss(part.name, output.loss.detach(), scale, count)

    def update(self, optimizer: StepOptimizer, scaler: Scaling, losses: list[Tensor]) -> StepResult:
        """Step with the gradients that `accumulate_losses` left, or skip and undo the buffers."""
        skip = None
        for algorithm in self.algorithms.values():
            mask = algorithm.before_update(self, losses)
            if mask is not None:
                skip = mask if skip is None else skip | mask
        try:
            # Check, clip, update or skip, tell the scaler.
            result = optimizer.step(
                scaler,
                max_norm=self.plan.clip_norm,
                max_value=self.plan.clip_value,
                skip_mask=skip,
            )
        except BaseException:
            blame("optimizer:", getattr(optimizer, "optimizer", optimizer))
        self._buffers.restore_if_skipped(result)
        return result

    def finish_step(self, result: StepResult) -> StepResult:
        """Run all that follows a step. The host may not know yet whether it was skipped."""
        for algorithm in self.algorithms.values():
            algorithm.after_update(self, result)
        return result

    def on_device(self, batch: Batch) -> Batch:
        """Return a batch on the model's device."""
        if self.device.type == "cpu":
            return batch
        return map_tensors(lambda t: t.to(self.device, non_blocking=True), batch)

    @property
    def objectives(self) -> list[NamedObjective]:
        """A step's losses, in order, each with its scaler and the parameters it trains."""
        scaler: Any = self.scaler  # One loss has one scaler.
        return [NamedObjective("", self.objective, scaler)]

    def check_fit(self) -> None:
        """Raise ConfigError or UserCodeError if the parts do not fit together."""
        require_objective("objective", self.objective)
        if self.optimizer.needs_closure:
            optimizer = type(getattr(self.optimizer, "optimizer", self.optimizer)).__name__
            raise ConfigError(
                f"optimizer={optimizer}: evaluates the loss itself; use ClosureTrainer, or an "
                "optimizer that takes no closure"
            )
        if isinstance(self.scaler, Mapping):
            raise ConfigError(
                "optimizer.scalers=each: there is one loss, and one backward pass has one scale; "
                "use optimizer.scalers=shared"
            )
