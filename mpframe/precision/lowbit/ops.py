"""PyTorch's ops as products: each op of `OPS` by matrix products or one convolution (kernels.py).

Other ops stay in half: recurrent layers and cells, which torch computes in one kernel, outer
products, which sum over nothing, chains of matrices, whose order a kernel chooses, `einsum`,
`addbmm`, `vecdot`, `conv_tbc`, and forms that write in place or into `out=`.
"""

import functools
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function

from mpframe.core.tree import HALF, map_tensors, tensors_in
from mpframe.precision.emulation import each_axis, half_values, round_to
from mpframe.precision.handlers import HANDS_OFF, Args, Kwargs, dtypes_in
from mpframe.precision.lowbit.kernels import Quantizer, convolution, matmul
from mpframe.precision.lowbit.recipe import Recipe
from mpframe.precision.policy import CASTABLE, Policy

ATTENTION = "scaled_dot_product_attention"
_broadcast: Any = torch.broadcast_shapes


def quantises(recipe: Recipe, op: str, policy: Policy) -> bool:
    """Whether a recipe quantises the products of `op`, which the lists must run in half."""
    listed = op in OPS and policy.ops.list_of(op) == "allow"
    return listed and (op != ATTENTION or recipe.attention)


class Call(NamedTuple):
    """What kernels.py is told of one call of an op besides its tensors."""

    roles: str
    quantizer: str
    site: str

    def matmul(self, left: Tensor, right: Tensor) -> Tensor:
        """Return left @ right, both of 2 axes or both of 3."""
        y: Tensor = matmul(left, right, "forward", *self)
        return y


def linear(call: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = _matmul(call, input, weight.t())
    return y if bias is None else y + bias


def _matmul(call: Call, input: Tensor, *second: Tensor, **named: Tensor) -> Tensor:
    """Compute matmul, mm, bmm or mv, whose second operand has its own name in each."""
    (other,) = (*second, *named.values())
    left = input[None] if input.dim() == 1 else input
    right = other[:, None] if other.dim() == 1 else other
    if right.dim() == 2:
        y = call.matmul(left.reshape(-1, left.shape[-1]), right)
        y = y.view(*left.shape[:-1], right.shape[-1])
    else:
        batch = _broadcast(left.shape[:-2], right.shape[:-2])
        left, right = (t.expand(*batch, *t.shape[-2:]).flatten(0, -3) for t in (left, right))
        y = call.matmul(left, right).view(*batch, left.shape[-2], right.shape[-1])
    y = y.squeeze(-2) if input.dim() == 1 else y
    return y.squeeze(-1) if other.dim() == 1 else y


def grouped_mm(
    call: Call,
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: None = None,
) -> Tensor:
    """Compute a product for each group (experts). Without `offs` it is bmm."""
    groups = (call, mat_a, mat_b)
    y = _matmul(*groups) if offs is None else _multiply_groups(*groups, offs.tolist())
    return y if bias is None else y + bias


def _multiply_groups(call: Call, left: Tensor, right: Tensor, ends: list[int]) -> Tensor:
    """Multiply groups, for which a matrix is cut and a stack is not, with zeros behind the last."""
    spans = [slice(*span) for span in itertools.pairwise([0, *ends])]
    if left.dim() == right.dim():  # The groups divide what is summed over.
        return torch.stack([call.matmul(left[:, span], right[span]) for span in spans])
    if left.dim() == 2:
        parts = [call.matmul(left[span], expert) for span, expert in zip(spans, right, strict=True)]
        return F.pad(torch.cat(parts), (0, 0, 0, left.shape[0] - ends[-1]))
    parts = [call.matmul(expert, right[:, span]) for span, expert in zip(spans, left, strict=True)]
    return F.pad(torch.cat(parts, 1), (0, right.shape[1] - ends[-1]))


def add_matmul(
    call: Call, input: Tensor, *pair: Tensor, beta: float = 1, alpha: float = 1, **named: Tensor
) -> Tensor:
    """Compute addmm, addmv or baddbmm, whose operands have names in alphabetical order."""
    y = _matmul(call, *pair, *(named[k] for k in sorted(named)))
    y = y if alpha == 1 else alpha * y
    # If beta is 0, the input may be nan.
    return y if beta == 0 else y + (input if beta == 1 else beta * input)


def _convolution(
    call: Call,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Tensor:
    """Convolve like aten, where a number stands for every dimension and the batch may be absent."""
    space = weight.dim() - 2
    batched = input if input.dim() == weight.dim() else input[None]
    numbers = [each_axis(value, space) for value in (stride, padding, dilation, output_padding)]
    geometry = *numbers[:3], transposed, numbers[3], groups
    y: Tensor = convolution(batched, weight, *geometry, call.quantizer, call.site)
    if bias is not None:
        y = y + bias.view(-1, *[1] * space)
    return y if input.dim() == weight.dim() else y[0]


def conv(
    call: Call,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    if padding == "same":
        steps = zip(each_axis(dilation, weight.dim() - 2), weight.shape[2:], strict=True)
        total = [d * (k - 1) for d, k in steps]
        # The odd one of an axis goes to the end, as in PyTorch.
        input = F.pad(input, [side for t in reversed(total) for side in (t // 2, t - t // 2)])
    padding = 0 if isinstance(padding, str) else padding
    return _convolution(call, input, weight, bias, stride, padding, dilation, False, 0, groups)


def conv_transpose(
    call: Call,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    rest = (stride, padding, dilation, True, output_padding, groups)
    return _convolution(call, input, weight, bias, *rest)


def attention(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute scores and softmax in fp32, between two products. A row that sees nothing is 0."""
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(repeats, -3) for t in (key, value))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = _matmul(call, query, key.mT) * factor
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        hidden = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if hidden else scores + attn_mask
    # Only a mask may hide a whole row: without one, scores of -inf are an overflow, and give nan.
    softmax: Any = torch.softmax if attn_mask is None else torch._safe_softmax
    shares = torch.dropout(softmax(scores, -1), dropout_p, dropout_p > 0)
    return _matmul(call, shares, value)


# Each op, and the place of its left operand among its arguments.
OPS: dict[str, tuple[Callable[..., Any], int]] = {
    "linear": (linear, 0),
    **dict.fromkeys(("matmul", "mm", "bmm", "mv"), (_matmul, 0)),
    **dict.fromkeys(("addmm", "addmv", "baddbmm"), (add_matmul, 1)),
    "_grouped_mm": (grouped_mm, 0),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), (conv, 0)),
    **dict.fromkeys((f"conv_transpose{n}d" for n in (1, 2, 3)), (conv_transpose, 0)),
    "convolution": (_convolution, 0),
    ATTENTION: (attention, 0),
}


def run_op(
    op: str, quantizer: Quantizer, half: torch.dtype | None, func: Any, args: Args, kwargs: Kwargs
) -> Any:
    """Run a call of an op of `OPS`, with operands and results rounded to `half`, if given.

    Return NotImplemented if it has no such product in half.
    """
    if not _takes(half, args, kwargs):
        return NotImplemented if half else func(*args, **kwargs)
    compute, place = OPS[op]
    # The weight is the right operand, unless only the left is a parameter.
    operands = [*args, *kwargs.values()][place : place + 2]
    first = [isinstance(operand, nn.Parameter) for operand in operands] == [True, False]
    site = quantizer.state.watched_name(operands[0 if first else -1])
    run: Callable[..., Any] = partial(compute, Call("w x" if first else "x w", quantizer.key, site))
    if not torch.compiler.is_compiling():
        run = show_as(func, run)
    if half is None:
        return run(*args, **kwargs)
    args, kwargs = map_tensors(
        lambda t: half_values(t, half) if t.dtype in CASTABLE else t, (args, kwargs)
    )
    return map_tensors(lambda tensor: round_to(tensor, half), run(*args, **kwargs))


def _takes(half: torch.dtype | None, args: Args, kwargs: Kwargs) -> bool:
    formats = dtypes_in(args, kwargs)
    castable = formats & (CASTABLE if half else {torch.float32})
    wrong = formats & (HANDS_OFF if half else {*HANDS_OFF, *HALF})
    strided = all(tensor.layout == torch.strided for tensor in tensors_in((args, kwargs)))
    return bool(castable) and not wrong and strided


def show_as(func: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """Make other function modes around the cast see `run` as one call of `func`."""

    @functools.wraps(func, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch._C._is_torch_function_mode_enabled():
            return handle_torch_function(call, (), *args, **kwargs)
        return run(*args, **kwargs)

    return call
