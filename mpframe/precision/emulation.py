"""Half-precision products on a CPU that has no instructions for them.

A tensor core takes half inputs, multiplies and accumulates in fp32, and rounds the result once:

    y = round_to_half(op(fp32(x_half), fp32(w_half)))

`half_values` prepares an input and `round_to` the result, and the op runs in fp32 between them.
Autograd differentiates each step: the incoming gradient is half, the op's gradients are fp32, and
each is rounded once. A GPU adds the gradients of a weight's uses in half, so each use rounds its
gradient before they are added (`reuse_operand`).
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

# Ops of `infer` that have no half kernel in torch's CPU build: always emulated there.
WITHOUT_HALF_KERNEL = frozenset({"avg_pool3d", "rrelu"})
# Ops whose half kernel on a CPU is wrong for some sizes: their arguments after the bias.
FAULTY = {
    **{f"conv{n}d": "stride padding dilation groups" for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": "stride padding output_padding groups dilation" for n in (1, 2, 3)},
}


def half_values(tensor: Tensor, half: torch.dtype) -> Tensor:
    """Return the values of `tensor` rounded to `half`, as float32."""
    return _convert(_convert(tensor, half), torch.float32)


def round_to(tensor: Tensor, half: torch.dtype) -> Tensor:
    """Round a float32 result once to `half`, and return any other format as it is."""
    return _convert(tensor, half) if tensor.dtype == torch.float32 else tensor


def is_faulty(
    op: str, input: Tensor, weight: Tensor, bias: Any = None, *rest: Any, **named: Any
) -> bool:
    """Return whether torch computes an op in `FAULTY` wrongly for these sizes, on a CPU in half."""
    is_key = not torch.compiler.is_compiling() and list not in map(type, (*rest, *named.values()))
    find = _never_inside if is_key else _never_inside.__wrapped__
    return find(op, input.shape, weight.shape, *rest, **named)


@lru_cache(2**12)
def _never_inside(op: str, size: torch.Size, kernel: torch.Size, *rest: Any, **named: Any) -> bool:
    """Return whether along some axis no position of the window lies wholly inside the input.

    Then oneDNN leaves part of the weight's gradient unwritten, and writes beyond its end.
    """
    defaults = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1}
    given = named | dict(zip(FAULTY[op].split(), rest, strict=False))
    if isinstance(given.get("padding"), str):
        del given["padding"]
    numbers = [each_axis(given.get(n, value), len(kernel) - 2) for n, value in defaults.items()]
    sizes = zip(size[2 - len(kernel) :], kernel[2:], *numbers, strict=True)
    if "transpose" in op:
        return any(-p % s > (n - 1) * s - 2 * p + more for n, _, s, p, more, _ in sizes)
    return any(-p % s > n - d * (k - 1) - 1 for n, k, s, p, _, d in sizes)


def each_axis(value: Any, count: int) -> list[int]:
    """Return a convolution's setting for each of `count` axes, for which one number may do."""
    values = [value] if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


def reuse_operand(half: Tensor, operand: Tensor) -> Tensor:
    """Return `operand`, the fp32 values of `half`, for a use that rounds its own gradient."""
    if operand is half or not operand.requires_grad:
        return operand
    return _FurtherUse.apply(half, operand)  # type: ignore[no-any-return]


def _keep_format(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.dtype = inputs[0].dtype


class _FurtherUse(torch.autograd.Function):
    generate_vmap_rule = True
    setup_context = staticmethod(_keep_format)

    @staticmethod
    def forward(half: Tensor, operand: Tensor) -> Tensor:
        return operand.view_as(operand)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None

    @staticmethod
    def jvp(ctx: Any, half: Tensor, operand: Tensor) -> Tensor:
        return operand.view_as(operand)


def _convert(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if torch.compiler.is_compiling() and tensor.dtype != dtype:
        return _opaque_convert(tensor, dtype)  # type: ignore[no-any-return]
    return tensor.to(dtype)


@torch.library.custom_op("mpframe::convert", mutates_args=())
def _opaque_convert(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert by an op that Inductor, which drops casts to half and back, cannot look into.

    A custom op must not return its input, so it copies.
    """
    return tensor.to(dtype, copy=True)


def _convert_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return _opaque_convert(gradient, ctx.dtype), None


_opaque_convert.register_fake(lambda tensor, dtype: torch.empty_like(tensor, dtype=dtype))
_opaque_convert.register_autograd(_convert_gradient, setup_context=_keep_format)
