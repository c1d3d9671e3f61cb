"""Optimizers that evaluate the loss themselves, such as LBFGS: they are given a closure.

torch's other optimizers only run a closure before they step, and so does `MasterWeights` for them.

LBFGS and its like try points and go back, so their step cannot be taken or skipped as a whole. The
losses that they compare must not be rounded: fp32 weights, no loss scaling, no clipping.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mpframe.core.errors import ConfigError
from mpframe.core.gradients import measure_grads
from mpframe.core.step_result import StepResult, Verdict
from mpframe.core.tree import HALF


def needs_closure(optimizer: Optimizer) -> bool:
    """True if `optimizer.step` cannot be called without a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def runs_closure_first(optimizer: Optimizer) -> bool:
    """Whether an optimizer that needs no closure only runs one before it steps: torch's own do."""
    return type(optimizer).__module__.startswith("torch.optim.")


def is_closure(scaler: Any) -> bool:
    """Whether a closure stands in the scaler's place: torch's callers give it first."""
    return callable(scaler) and not hasattr(scaler, "scale")


def evaluate(closure: Callable[[], Any]) -> Tensor | None:
    """Run a closure once, as torch's optimizers do before they step; return its loss, detached."""
    with torch.enable_grad():
        loss = closure()
    return None if loss is None else torch.as_tensor(loss).detach()


def step_with_closure(
    masters: Any, closure: Callable[[], Any] | None, scaler: Any, **options: Any
) -> StepResult:
    """Make the step of a `MasterWeights` that was given a closure, or needs one.

    Args:
        masters: the `MasterWeights`.
        closure: computes the loss and calls backward.
        scaler: of the loss, or None.
        options: the other arguments of `MasterWeights.step`.

    Raises:
        ConfigError: there is no closure; or the optimizer calls it by itself, and there are half
            weights, a scaler, clipping or a skip_mask.
    """
    optimizer = masters.optimizer
    if is_closure(scaler):
        scaler, closure = None, scaler
    if closure is None:
        raise ConfigError(
            f"optimizer={type(optimizer).__name__}: evaluates the loss itself; give "
            "step(closure=...) a function that does, or use an optimizer without a closure"
        )
    if not masters.needs_closure and runs_closure_first(optimizer):
        loss = evaluate(closure)
        result: StepResult = masters.step(scaler, **options)
        return replace(result, loss=loss)
    parameters = [p for group in masters.param_groups for p in group["params"]]
    refuse_beside_closure(
        optimizer,
        half=any(parameter.dtype in HALF for parameter in parameters),
        scaled=scaler is not None,
        clipped=(options["max_norm"] or options["max_value"]) is not None,
        masked=options["skip_mask"] is not None,
    )
    loss = evaluate(lambda: optimizer.step(closure))
    result = _result(parameters, loss)
    masters.zero_grad()
    return result


def _result(parameters: list[Tensor], loss: Tensor | None) -> StepResult:
    """Describe a step; the amax and norm are those of the last evaluation's gradients."""
    device = parameters[0].device
    last = measure_grads({p: p.grad for p in parameters if p.grad is not None}, 1.0, device)
    applied = Verdict(skipped=False, dropped=0)
    never, one = torch.zeros((), dtype=torch.bool, device=device), torch.ones((), device=device)
    return StepResult(never, last.amax, last.norm(), one, loss=loss, verdict=applied)


def refuse_beside_closure(
    optimizer: Optimizer,
    *,
    half: bool,
    scaled: bool,
    clipped: bool,
    masked: bool,
    cast: bool = False,
    accumulated: bool = False,
) -> None:
    """Check that nothing is used that does not go with a closure.

    Raises:
        ConfigError: half weights, ops cast to half, a scaler, clipping, accumulation or a
            skip_mask are used with it.
    """
    name = type(optimizer).__name__
    for present, what, way in (
        (half, "half weights", "dtype=fp32"),
        (cast, "ops cast to half", "dtype=fp32"),
        (scaled, "loss scaling", "loss_scaling=none"),
        (clipped, "clipping", "trainer.clip_norm=null trainer.clip_value=null"),
        (accumulated, "accumulation", "trainer.accumulate=1"),
        (masked, "skipping", "callbacks.loss_spikes.policy=warn"),
    ):
        if present:
            raise ConfigError(
                f"optimizer={name}: a closure goes without {what}; use {way} or "
                "an optimizer that takes no closure"
            )
