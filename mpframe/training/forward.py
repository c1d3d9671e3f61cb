"""A forward pass and its loss, whosever fault it is where they fail."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mpframe.errors import UserCodeError
from mpframe.tree import tensors_in, widened
from mpframe.user_code import UserCode, described, name_of


def outputs_and_loss(
    model: nn.Module,
    forward: Callable[..., Any],
    loss: Callable[[Any, Any], Any],
    arguments: tuple[Any, ...],
    targets: Any,
) -> tuple[Any, Tensor]:
    """The model's outputs, in fp32 or wider so that losses and metrics are computed there, and the
    loss, 0-d.

    Args:
        model: whose forward pass it is.
        forward: called with `arguments`: the model, with whatever is around it.
        loss: loss(outputs, targets), a single floating-point number.
        arguments: the inputs first.
        targets: for the loss.

    Raises:
        UserCodeError: model or loss raised, or the loss is no such number, or (where gradients are
            wanted) has no gradient.
    """
    with UserCode("model:", model, inputs=arguments[0]):
        outputs = widened(forward(*arguments))
    with UserCode("dataset: the loss", loss, outputs=outputs, targets=targets):
        value = loss(outputs, targets)
    return outputs, checked_loss(value, model, loss, outputs)


def checked_loss(value: Any, model: nn.Module, loss: Callable[..., Any], outputs: Any) -> Tensor:
    """What a loss gave, 0-d.

    Raises:
        UserCodeError: it is not one floating-point number, or (where gradients are wanted) has no
            gradient.
    """
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        raise UserCodeError(
            f"dataset: the loss {name_of(loss)} gave {described(value)}; it must give one "
            "floating-point number as a tensor, the mean over the batch"
        )
    if torch.is_grad_enabled() and not value.requires_grad:
        raise UserCodeError(_without_gradient(model, loss, outputs))
    return value.reshape(())


def _without_gradient(model: nn.Module, loss: Callable[..., Any], outputs: Any) -> str:
    whose = f"dataset: the loss {name_of(loss)} gave a number"
    if not any(tensor.requires_grad for tensor in tensors_in(outputs)):
        whose = f"model: {name_of(model)} gave outputs"
    return (
        f"{whose} without a gradient; compute it from the weights by PyTorch's operations, without "
        "detach(), item(), numpy() or no_grad()"
    )
