"""How loss scaling begins: `auto`, and one backward pass before step 1 that measures gradients.

Finding a first scale by trial costs a skipped step for every octave that it is too high. The probe
runs the first batch once in fp32, which does not overflow, and measures

    a = max |dL/dy|, |dL/dw|      over the outputs y of all modules and all weights w

The gradients of the activations, often the larger ones, must also fit into half as s dL/dy.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from mpframe.core.comm import SINGLE_PROCESS, Comm
from mpframe.core.loss_scaling.backoff import Backoff, largest_power_below
from mpframe.core.loss_scaling.scaler import NoScaling
from mpframe.core.objective import NamedObjective, Objective
from mpframe.core.tree import HALF, tensors_in
from mpframe.core.user_code import user_code
from mpframe.precision.op_lists import OpLists
from mpframe.precision.precision import Precision
from mpframe.precision.trace import preserve_state


def auto(mode: str, half: str) -> Backoff | NoScaling:
    """Return `Backoff` if dtype mode and half format use float16, else `NoScaling`.

    bfloat16 has the range of fp32, so its gradients need no scale.
    """
    return Backoff(half=half) if (mode != "fp32" and half == "float16") else NoScaling()


def wants_probe(scaler: object) -> TypeGuard[Any]:
    """Return whether `start_from(amax)` is to choose the scaler's first scale."""
    return bool(getattr(scaler, "wants_probe", False))


def safe_scale(amax: float, half: torch.dtype, octaves: int = 1) -> float | None:
    """Return the largest power of two that leaves octaves (>= 0) free above such a gradient.

    None if `amax` is 0, inf or nan.
    """
    if not 0.0 < amax < math.inf:
        return None
    limit = torch.finfo(half).max / 2.0**octaves
    return 2.0 ** int(largest_power_below(limit, torch.tensor(amax, dtype=torch.float64)))


def probe_amax(
    model: nn.Module,
    objective: Objective,
    precision: Precision,
    batch: Any,
    comm: Comm = SINGLE_PROCESS,
) -> Tensor:
    """Return the largest gradient of the unscaled loss on a batch, 0-d float32, inf or nan.

    The model's buffers and plain attributes and the random generators are put back. Each rank of
    `comm` measures its gradients before they are summed.
    """
    amaxes: list[Tensor] = []

    def see(gradient: Tensor) -> None:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        if values.numel():
            amaxes.append(values.detach().abs().max().float())

    ops = precision.policy.ops  # Nothing stays allowed in half: every listed op widens its inputs.
    wide = OpLists(deny=ops.allow | ops.deny | OpLists.named().allow, infer=ops.infer - ops.allow)
    casts = Precision("amp", precision.policy.half, ops=wide).cast()
    with preserve_state(model), _wide_weights(model):
        with casts, _watch_outputs(model, see) as stack:
            loss = NamedObjective("", objective)(model, batch).loss
            # A divided weight's gradient is this rank's, in the format in which it is gathered.
            if comm.sharding is not None:
                stack.enter_context(comm.sharding.usage.watch(lambda _, weight: see(weight.grad)))
            with user_code("model: the backward pass of", model):
                comm.backward(loss, 1.0, 1, None)
        for parameter in model.parameters():
            if parameter.grad is not None:
                if comm.sharding is None:
                    see(parameter.grad)
                parameter.grad = None
    return torch.stack(amaxes).max() if amaxes else torch.zeros(())


@contextmanager
def _wide_weights(model: nn.Module) -> Iterator[None]:
    """Make half weights and buffers fp32 within the block, and so the weights' gradients.

    An op in no list, such as a batch norm beside half weights, would mix formats.
    """
    half = [t for t in (*model.parameters(), *model.buffers()) if t.dtype in HALF]
    stored = [tensor.data for tensor in half]
    for tensor in half:
        tensor.data = tensor.data.float()
    try:
        yield
    finally:
        for tensor, narrow in zip(half, stored, strict=True):
            tensor.data = narrow


def _watch_outputs(model: nn.Module, see: Callable[[Tensor], None]) -> ExitStack:
    """Make every module's output report its gradient, until the stack is closed."""

    def watch(_: nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(see)  # type: ignore[no-untyped-call]

    stack = ExitStack()
    for module in model.modules():
        stack.enter_context(module.register_forward_hook(watch))
    return stack
