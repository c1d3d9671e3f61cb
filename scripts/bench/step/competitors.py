"""A train step as written by hand, and as mpframe takes it: fused AdamW, gradients clipped, or SGD.

Both train the same model on the same batch, and tell their laps to the same watch.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from bench.step.laps import Laps
from bench.step.workloads import Workload
from mpframe.core.comm import SINGLE_PROCESS, Comm
from mpframe.core.loss_scaling import Backoff
from mpframe.core.objective import StepOutput, supervised
from mpframe.precision.precision import Precision
from mpframe.training.plan import Plan
from mpframe.training.trainer import Trainer

MAX_NORM = 1.0
LR = 1e-4

Step = Callable[[], Any]


def by_hand(
    work: Workload,
    laps: Laps,
    half: torch.dtype | None = None,
    parallel: Callable[[nn.Module], nn.Module] | None = None,
    sgd: bool = False,
) -> Step:
    """A step in plain torch, under torch.autocast if `half` is given, wrapped in `parallel`."""
    model, optimizer = work.model, _optimizer(work.model, sgd)
    if parallel is not None:
        model = parallel(model)

    def step() -> None:
        laps.start()
        optimizer.zero_grad()
        with torch.autocast("cpu", half) if half else nullcontext():
            outputs = model(work.batch[0])
        loss = work.loss(outputs.float(), work.batch[1])
        laps.end("forward")
        loss.backward()  # type: ignore[no-untyped-call]
        laps.end("backward")
        if not sgd:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        laps.end("step")

    return step


def by_trainer(
    work: Workload,
    laps: Laps,
    mode: str,
    half: str = "float16",
    products: str = "none",
    comm: Comm = SINGLE_PROCESS,
    reduce: str = "in_backward",
    sgd: bool = False,
    torchs_casts: bool = False,
) -> Step:
    """A step of the trainer, float16 with loss scaling, perhaps under torch.autocast."""
    precision: Any = Precision(mode, half, products=products)
    if torchs_casts:
        precision.cast = partial(torch.autocast, "cpu", getattr(torch, half))
    model, optimizer = precision.prepare(work.model, _optimizer(work.model, sgd))
    inner, update = supervised(work.loss), optimizer.step

    def objective(model: nn.Module, batch: Any) -> StepOutput:
        output = inner(model, batch)
        laps.end("forward")
        return output

    def timed_update(*args: Any, **kwargs: Any) -> Any:
        laps.end("backward")
        return update(*args, **kwargs)

    optimizer.step = timed_update
    scaler = Backoff() if mode != "fp32" and half == "float16" else None
    plan = Plan(clip_norm=None if sgd else MAX_NORM, reduce=reduce)
    trainer = Trainer(model, optimizer, objective, precision, scaler=scaler, plan=plan, comm=comm)

    def step() -> None:
        laps.start()
        trainer.train_step(work.batch)
        laps.end("step")

    return step


def by_torchao(work: Workload, laps: Laps) -> Step:
    """A step in plain torch with torchao's emulation of MXFP8 in linear layers."""
    config = import_module("torchao.prototype.moe_training.config")
    emulated = config.MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL
    import_module("torchao.quantization").quantize_(
        work.model,
        config.MXFP8TrainingOpConfig.from_recipe(emulated),
        filter_fn=lambda module, name: isinstance(module, nn.Linear),
    )
    return by_hand(work, laps)


STEPS: dict[str, Callable[[Workload, Laps], Step]] = {
    "torch fp32": by_hand,
    "torch.autocast bfloat16": partial(by_hand, half=torch.bfloat16),
    "mpframe fp32": partial(by_trainer, mode="fp32"),
    "mpframe amp bfloat16": partial(by_trainer, mode="amp", half="bfloat16"),
    "mpframe mixed bfloat16": partial(by_trainer, mode="mixed", half="bfloat16"),
    "mpframe amp float16": partial(by_trainer, mode="amp", half="float16"),
    "mpframe mixed float16": partial(by_trainer, mode="mixed", half="float16"),
}
"""Who takes part in the dtype modes, by the name in the tables."""

RECIPE_STEPS: dict[str, Callable[[Workload, Laps], Step]] = {
    **{
        f"mpframe {recipe}": partial(by_trainer, mode="mixed", products=recipe)
        for recipe in ("fp8_tensorwise", "mxfp8", "nvfp4")
    },
    "torchao mxfp8": by_torchao,
}
"""Who takes part below 16 bits, all of mpframe's in `mixed` and float16."""


_AUTOCAST_FLOAT16 = partial(by_hand, half=torch.float16)
_STEPS: dict[str, Callable[..., Step]] = {**STEPS, "torch.autocast float16": _AUTOCAST_FLOAT16}
SGD_STEPS: dict[str, Callable[[Workload, Laps], Step]] = {
    f"{name}, SGD": partial(step, sgd=True) for name, step in _STEPS.items()
}
"""The same with SGD and momentum, and gradients that are not clipped."""

PROFILE_STEPS: dict[str, Callable[[Workload, Laps], Step]] = {
    f"{name}, torch's casts": partial(_STEPS[name], torchs_casts=True)
    for name in ("mpframe amp bfloat16",)
}
"""A step without a part of it, which shows what the part costs."""


def _optimizer(model: nn.Module, sgd: bool) -> Optimizer:
    if sgd:
        weights = model.parameters()
        return torch.optim.SGD(weights, lr=1e-3, momentum=0.9, weight_decay=5e-4, fused=True)
    return torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
