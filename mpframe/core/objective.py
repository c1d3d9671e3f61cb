"""Objectives: they turn a model and a batch into a loss.

    objective(model, batch) -> StepOutput(loss, outputs, targets, count)

`supervised(loss)` is for batches of inputs and targets. The step calls an objective through
`NamedObjective`, which checks the result, so that a mistake in it becomes one line.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mpframe.core.casts import outside_casts
from mpframe.core.errors import UserCodeError
from mpframe.core.loss_scaling.scaler import LossScaler, NoScaling
from mpframe.core.tree import HALF, host_waits_for, tensors_in, to_fp32
from mpframe.core.user_code import blame, describe, name_of


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The result of an objective for one batch.

    Attributes:
        loss: one floating-point number, 0-d, unscaled: the mean over `count` samples or labels.
        outputs: the metrics' inputs, in fp32, if there are any.
        targets: what a metric compares the outputs with.
        count: how many samples (or tokens) the loss is the mean of: a whole number >= 0, or a 0-d
            tensor >= 0 on the device. Means over micro-batches, ranks and the batches of an
            evaluation are weighed by it. None: the size of the batch's first tensor.
    """

    loss: Tensor
    outputs: Any = None
    targets: Any = None
    count: Tensor | int | None = None


class Objective(Protocol):
    """Computes the loss of a model on a batch."""

    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        """Run the forward pass and the loss, inside the cast block of the run's precision.

        It calls `model`, or parts of it, as it likes. `batch` is any pytree of tensors on the
        model's device, as the loader gave it.
        """


@dataclass(frozen=True)
class NamedObjective:
    """A loss of a step, "" if it is the only one, its scaler, and what it trains (None: all)."""

    name: str
    objective: Objective
    scaler: LossScaler = field(default_factory=NoScaling)
    parameters: list[Tensor] | None = None

    def __call__(self, model: nn.Module, batch: Any, casts: Any = None) -> StepOutput:
        """Call the objective in a block of casts, and check its result.

        The loss becomes 0-d and fp32 or wider, and a missing count the size of the batch.

        Raises:
            UserCodeError: the objective raised, gave no `StepOutput`, a loss that is not one
                floating-point number or (if gradients are on) has no gradient, or no valid count.
        """
        objective = self.objective
        try:
            with casts or nullcontext():
                output = objective(model, batch)
        except BaseException:
            blame("objective:", objective, batch=batch)
        if not isinstance(output, StepOutput):
            raise UserCodeError(
                f"{_source(objective)} gave {describe(output)}; it must give a StepOutput, as in "
                "StepOutput(loss, outputs, targets)"
            )
        loss, count = output.loss, output.count
        if not isinstance(loss, Tensor) or loss.dim() or loss.dtype != torch.float32:
            loss = _to_one_number(loss, objective)
        if not loss.requires_grad and torch.is_grad_enabled():
            raise UserCodeError(_explain_no_gradient(objective, model, output))
        if count is None:
            count = samples_in(batch)
        elif type(count) is not int or count < 0:
            _check_count(count, objective)
        return StepOutput(loss, output.outputs, output.targets, count)


def samples_in(batch: Any) -> int:
    """Return the size of a batch's first tensor along dimension 0."""
    return next((len(tensor) for tensor in tensors_in(batch) if tensor.dim()), 1)


def require_objective(path: str, objective: Any) -> None:
    """Raise UserCodeError, naming `path`, if this is not an objective. A loss is not one."""
    if isinstance(objective, nn.modules.loss._Loss):
        name = name_of(objective)
        raise UserCodeError(
            f"{path}={name}: a loss, and an objective is called with the model and a batch; use "
            f"supervised({name}())"
        )
    if not callable(objective):
        raise UserCodeError(
            f"{path}: must be a function objective(model, batch) that returns a StepOutput, not "
            f"{describe(objective)}"
        )


def _to_one_number(loss: Any, objective: Objective) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise UserCodeError(
            f"{_source(objective)} gave {describe(loss)}; it must give one floating-point number "
            "as a tensor, the mean over the batch"
        )
    wide: Tensor = loss.float() if loss.dtype in HALF else loss
    return wide.reshape(())


def _check_count(count: Any, objective: Objective) -> None:
    if not isinstance(count, Tensor) or count.dim():
        raise UserCodeError(
            f"{_source(objective)} gave {count!r:.40} as its count; it must be a whole number >= 0 "
            "or a 0-d tensor, or None for the batch's samples"
        )


def _explain_no_gradient(objective: Objective, model: nn.Module, output: StepOutput) -> str:
    what = f"{_source(objective)} gave a number"
    outputs = list(tensors_in(output.outputs))
    if outputs and not any(tensor.requires_grad for tensor in outputs):
        what = f"model: {name_of(model)} gave outputs"
    return (
        f"{what} without a gradient; compute it from the weights by PyTorch's operations, without "
        "detach(), item(), numpy() or no_grad()"
    )


def _source(objective: Objective) -> str:
    """Return the name of an objective in errors, its `source` if it has one."""
    return str(getattr(objective, "source", f"objective: {name_of(objective)}"))


LossFunction = Callable[[Any, Any], Tensor]


class Supervised:
    """The objective of batches (inputs, targets). Its loss is computed in fp32, outside the casts.

    Args:
        loss: loss(outputs, targets) -> 0-d tensor, the mean over the batch, of outputs in fp32 or
            wider.
        option: the option that chose the loss, for error messages.
    """

    def __init__(self, loss: LossFunction, option: str = "objective") -> None:
        self.loss, self._option = loss, f"{option}: the loss"
        self._labels = _find_labels(loss)
        self.source = f"{self._option} {name_of(loss)}"

    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        """Return the loss, the outputs in fp32, and the targets.

        Raises:
            UserCodeError: the batch is no pair, or the model or the loss raised.
        """
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise UserCodeError(
                "objective: supervised takes batches of (inputs, targets), and the dataset gave "
                f"{describe(batch)}; give it such pairs, use objective=model_loss or write an "
                "objective of your own"
            )
        inputs, targets = batch
        try:
            outputs = model(inputs)
        except BaseException:
            blame("model:", model, inputs=inputs)
        with outside_casts():  # The loss is fp32: none of its ops is cast.
            outputs = to_fp32(outputs)
            try:
                loss = self.loss(outputs, targets)
            except BaseException:
                blame(self._option, self.loss, outputs=outputs, targets=targets)
        return StepOutput(loss, outputs, targets, _count_labels(self._labels, targets))


def _find_labels(loss: Any) -> nn.Module | None:
    """Return torch's loss over classes that counts labels as `loss` does, if `loss` is of one."""
    given = loss.keywords if isinstance(loss, partial) else {}
    if getattr(loss, "func", loss) in (nn.functional.cross_entropy, nn.functional.nll_loss):
        counted = given.keys() & {"weight", "ignore_index", "reduction"}
        return nn.NLLLoss(**{name: given[name] for name in counted})
    return loss if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) else None


def _count_labels(loss: Any, targets: Any) -> Tensor | int | None:
    """Return what torch's mean over classes divides by: the labels, or the sum of their weights."""
    if loss is None or loss.reduction != "mean" or targets.is_floating_point():
        return None  # Probabilities are a mean over samples.
    counts = targets != loss.ignore_index
    if loss.weight is not None:
        return torch.where(counts, loss.weight[torch.where(counts, targets, 0)], 0.0).sum()
    count = counts.sum()
    return int(count) if type(count) is Tensor and not host_waits_for(count.device) else count


def supervised(loss: LossFunction) -> Supervised:
    """Return the objective of a loss such as `nn.CrossEntropyLoss()`."""
    return Supervised(loss)
