"""Runs an objective and checks what it returns, so that a mistake in it becomes one line."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mpframe.errors import UserCodeError
from mpframe.objectives.step_output import Objective, StepOutput
from mpframe.tree import HALF, tensors_in
from mpframe.user_code import blame, described, name_of

_AS_IT_IS = nullcontext()


def compute(
    objective: Objective,
    model: nn.Module,
    batch: Any,
    casts: AbstractContextManager[None] = _AS_IT_IS,
) -> StepOutput:
    """The loss of `model` on `batch`, 0-d, in fp32 or wider, and what the metrics are given.

    Args:
        objective: called here.
        model: for the objective.
        batch: for the objective, on the model's device.
        casts: the cast block that the objective runs in, if this call is not in it already. The
            checks of the loss stay outside, where reading a tensor's format costs nothing.

    Raises:
        UserCodeError: the objective raised, gave no `StepOutput`, a loss that is not one
            floating-point number or (if gradients are on) has no gradient, or no valid count.
    """
    try:
        with casts:
            output = objective(model, batch)
    except BaseException:
        blame("objective:", objective, batch=batch)
    if not isinstance(output, StepOutput):
        raise UserCodeError(
            f"{_source(objective)} gave {described(output)}; it must give a StepOutput, as in "
            "StepOutput(loss, outputs, targets)"
        )
    loss = output.loss
    if not isinstance(loss, Tensor) or loss.dim() or loss.dtype != torch.float32:
        loss = _one_number(loss, objective)
    if not loss.requires_grad and torch.is_grad_enabled():
        raise UserCodeError(_without_gradient(objective, model, output))
    if output.count is not None:
        _require_count(output.count, objective)
    return output if loss is output.loss else replace(output, loss=loss)


def count_of(count: Tensor | int | None, batch: Any) -> Tensor | int:
    """A `StepOutput.count`; of None the samples of its batch."""
    return samples_in(batch) if count is None else count


def samples_in(batch: Any) -> int:
    """How many samples a batch holds: the size of its first tensor along dimension 0, else 1."""
    return next((len(tensor) for tensor in tensors_in(batch) if tensor.dim()), 1)


def require_objective(path: str, objective: Any) -> None:
    """Refuse what is no objective, such as a loss that was given instead of one.

    Raises:
        UserCodeError: naming `path` and the way out.
    """
    if isinstance(objective, nn.modules.loss._Loss):
        name = name_of(objective)
        raise UserCodeError(
            f"{path}={name}: a loss, and an objective is called with the model and a batch; use "
            f"supervised({name}())"
        )
    if not callable(objective):
        raise UserCodeError(
            f"{path}: must be a function objective(model, batch) that returns a StepOutput, not "
            f"{described(objective)}"
        )


def _one_number(loss: Any, objective: Objective) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise UserCodeError(
            f"{_source(objective)} gave {described(loss)}; it must give one floating-point number "
            "as a tensor, the mean over the batch"
        )
    wide: Tensor = loss.float() if loss.dtype in HALF else loss
    return wide.reshape(()) if wide.dim() else wide


def _require_count(count: Any, objective: Objective) -> None:
    known = count.dim() == 0 if isinstance(count, Tensor) else type(count) is int and count >= 0
    if not known:
        raise UserCodeError(
            f"{_source(objective)} gave {count!r:.40} as its count; it must be a whole number >= 0 "
            "or a 0-d tensor, or None for the batch's samples"
        )


def _without_gradient(objective: Objective, model: nn.Module, output: StepOutput) -> str:
    whose = f"{_source(objective)} gave a number"
    outputs = list(tensors_in(output.outputs))
    if outputs and not any(tensor.requires_grad for tensor in outputs):
        whose = f"model: {name_of(model)} gave outputs"
    return (
        f"{whose} without a gradient; compute it from the weights by PyTorch's operations, without "
        "detach(), item(), numpy() or no_grad()"
    )


def _source(objective: Objective) -> str:
    """Whose loss it is, as an error names it; `supervised` names the loss within it."""
    return str(getattr(objective, "source", f"objective: {name_of(objective)}"))
