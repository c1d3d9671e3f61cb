"""Half-precision products on a CPU that has no instructions for them.

A tensor core takes half inputs, multiplies and accumulates in fp32, and rounds the result once:

    y = round_to_half(op(fp32(x_half), fp32(w_half)))

Here the same is done in three steps, each of which autograd differentiates: inputs are rounded to
half and widened (`half_values`), the op runs in fp32, its result is rounded (`rounded`). The
backward pass is then emulated as well: the incoming gradient is half, the op's gradients are
computed in fp32, and each is rounded once on its way out. A device adds the gradients of a weight's
uses in half, so each use rounds its own, and half tensors are added (`used_again`).

It runs at about the speed of fp32; torch's own float16 kernels on a CPU are 40 to 160 times
slower than that.
"""

from typing import Any

import torch
from torch import Tensor

# Ops that follow their inputs and have no half kernel in torch's CPU build: emulated there, always.
WITHOUT_HALF_KERNEL = frozenset({"avg_pool3d", "rrelu"})
# Ops whose bfloat16 kernel on a CPU is wrong for the shapes that `is_faulty` tells; and the newest
# torch in which that was seen. With `compute=auto` they are emulated there.
FAULTY = frozenset(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3))
FAULTY_IN = "2.15.0"


def half_values(tensor: Tensor, half: torch.dtype) -> Tensor:
    """The values of `tensor` rounded to `half`, as float32 (any shape, kept)."""
    return _convert(_convert(tensor, half), torch.float32)


def rounded(tensor: Tensor, half: torch.dtype) -> Tensor:
    """A float32 result rounded once to `half`; other formats are returned as they are."""
    return _convert(tensor, half) if tensor.dtype == torch.float32 else tensor


def is_faulty(
    op: str,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    *rest: Any,
    **named: Any,
) -> bool:
    """Whether torch computes this call of one of `FAULTY` wrongly.

    If along some axis the kernel lies wholly inside nowhere, oneDNN leaves a part of the weight's
    gradient unwritten, and writes beyond its end. Arguments are those of the op.
    """
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu":
        return False
    transposed, count = "transpose" in op, weight.dim() - 2
    order = ("output_padding", "groups", "dilation") if transposed else ("dilation", "groups")
    more = {"output_padding": 0, "dilation": 1, **dict(zip(order, rest, strict=False)), **named}
    padding = 0 if isinstance(padding, str) else padding
    settings = (stride, padding, more["dilation"], more["output_padding"])
    numbers = (each_axis(value, count) for value in settings)
    return any(
        -p % s > ((n - 1) * s - 2 * p + o if transposed else n - d * (k - 1) - 1)
        for n, k, s, p, d, o in zip(input.shape[-count:], weight.shape[2:], *numbers, strict=True)
    )


def each_axis(value: Any, count: int) -> list[int]:
    """Return a convolution's setting for each axis; one number, or one in a list, is for all."""
    values = [value] if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


def used_again(half: Tensor, operand: Tensor) -> Tensor:
    """Return the operand of one more use of a weight, whose gradients then add in half.

    Args:
        half: the weight in half, in which the gradients of its uses meet.
        operand: what its first use was given: `half` itself, or its values in float32.

    Returns:
        `operand` itself where it is half or has no gradient; else float32 values that share its
        memory and pass their gradient on to `half`, rounded.
    """
    if operand is half or not operand.requires_grad:
        return operand
    return _UsedAgain.apply(half, operand)  # type: ignore[no-any-return]


class _UsedAgain(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(half: Tensor, operand: Tensor) -> Tensor:
        return operand.view_as(operand)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.half = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.half), None

    @staticmethod
    def jvp(ctx: Any, half: Tensor, operand: Tensor) -> Tensor:
        return operand.view_as(operand)


def _convert(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype == dtype:
        return tensor
    if torch.compiler.is_compiling():
        return _opaque_convert(tensor, dtype)  # type: ignore[no-any-return]
    return tensor.to(dtype)


@torch.library.custom_op("mpframe::convert", mutates_args=())
def _opaque_convert(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor.to(dtype)`, which the compiler cannot look into.

    Inductor drops a pair of casts to half and back, because the result without it is more exact.
    But the rounding is what is emulated here. The result is always a new tensor, because an op of
    this kind must not return its input, and a compiled graph may meet tensors that are rounded
    already.
    """
    return tensor.to(dtype, copy=True)


@_opaque_convert.register_fake
def _(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(tensor, dtype=dtype)


def _remember_format(ctx: Any, inputs: tuple[Tensor, torch.dtype], output: Tensor) -> None:
    ctx.dtype = inputs[0].dtype


def _convert_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return _convert(gradient, ctx.dtype), None


_opaque_convert.register_autograd(_convert_gradient, setup_context=_remember_format)
