"""Optimizers that evaluate the loss themselves, such as LBFGS: they are given a closure.

torch's other optimizers only run a closure before they step, and so does `MasterWeights` for them.

LBFGS and its like try points and go back, so their step cannot be taken or skipped as a whole. The
losses that they compare must not be rounded: fp32 weights, no loss scaling, no clipping.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mpframe.errors import ConfigError
from mpframe.optim.gradients import measured
from mpframe.optim.step_result import StepResult
from mpframe.optim.verdict import Verdict


def needs_closure(optimizer: Optimizer) -> bool:
    """True if `optimizer.step` cannot be called without a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def runs_closure_first(optimizer: Optimizer) -> bool:
    """Whether an optimizer that needs no closure only runs one before it steps: torch's own do."""
    return type(optimizer).__module__.startswith("torch.optim.")


def step_with_closure(optimizer: Optimizer, closure: Callable[[], Any]) -> StepResult:
    """One step; the amax and norm are those of the last evaluation's gradients."""
    loss = evaluate(lambda: optimizer.step(closure))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    device = parameters[0].device
    last = measured([(p, p.grad) for p in parameters if p.grad is not None], 1.0, device)
    applied = Verdict(skipped=False, dropped=0)
    never, one = torch.zeros((), dtype=torch.bool, device=device), torch.ones((), device=device)
    norm = last.norm()
    return StepResult(never, last.amax, norm, one, loss=loss, verdict=applied)


def take_closure(scaler: Any, closure: Any = None) -> tuple[Any, Any]:
    """The scaler and the closure: torch's callers give the closure first, where a scaler stands."""
    first = callable(scaler) and not hasattr(scaler, "scale")
    return (None, scaler) if first else (scaler, closure)


def evaluate(closure: Callable[[], Any]) -> Tensor | None:
    """Run a closure once, as torch's optimizers do before they step; its loss, detached."""
    with torch.enable_grad():
        loss = closure()
    return None if loss is None else torch.as_tensor(loss).detach()


def missing_closure(optimizer: Optimizer) -> ConfigError:
    """The error of a step without the closure it needs."""
    return ConfigError(
        f"optimizer={type(optimizer).__name__}: evaluates the loss itself; give "
        "step(closure=...) a function that does, or use an optimizer without a closure"
    )


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
    """Refuse what does not go with a closure.

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
        (masked, "skipping", "trainer.on_loss_spike=warn"),
    ):
        if present:
            raise ConfigError(
                f"optimizer={name}: a closure goes without {what}; use {way} or "
                "an optimizer that takes no closure"
            )
