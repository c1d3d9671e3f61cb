"""Half-precision products on a CPU that has no instructions for them.

A tensor core takes half inputs, multiplies and accumulates in fp32, and rounds the result once:

    y = round_to_half(op(fp32(x_half), fp32(w_half)))

Here the same is done in three steps, each of which autograd differentiates: inputs are rounded to
half and widened (`half_values`), the op runs in fp32, its result is rounded (`rounded`). The
backward pass is then emulated as well: the incoming gradient is half, the op's gradients are
computed in fp32, and each is rounded once on its way out.

It runs at about the speed of fp32; torch's own float16 kernels on a CPU are 40 to 160 times
slower than that.
"""

import torch
from torch import Tensor


def half_values(tensor: Tensor, half: torch.dtype) -> Tensor:
    """The values of `tensor` rounded to `half`, as float32 (any shape, kept)."""
    return tensor.to(half).to(torch.float32)


def rounded(tensor: Tensor, half: torch.dtype) -> Tensor:
    """A float32 result rounded once to `half`; other formats are returned as they are."""
    return tensor.to(half) if tensor.dtype == torch.float32 else tensor
