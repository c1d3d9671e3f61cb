"""Products below 16 bits in tests: operands, recipes, and what notes the products that run."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mpframe import Precision
from mpframe.precision.lowbit.formats import FORMATS, Draw
from mpframe.precision.lowbit.recipe import Recipe
from mpframe.precision.lowbit.scaling import Axes, Quantization

ROWS, COLUMNS = Axes((1,), 0), Axes((0,), 1)
ML_DTYPES = {
    "e4m3fn": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2,
    "e2m3": ml_dtypes.float6_e2m3fn, "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}  # fmt: skip
# In 4 bits every scale is seen; most values of an MX block of e4m3 are the same under any.
MX = Quantization(FORMATS["e2m1"], per="block", block=32, scale="e8m0")
MX4 = Recipe.from_mapping("mx4", {"every": {"format": "e2m1", "per": "block", "scale": "e8m0"}})


def made(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_ml_dtypes(values: Tensor, name: str) -> Tensor:
    """Rounded by ml_dtypes; inf and nan, which it drops where a format has none, as they were."""
    held = values.clamp(-FORMATS[name].max, FORMATS[name].max).nan_to_num(0.0)
    rounded = held.numpy().astype(ML_DTYPES[name]).astype(np.float32)
    return torch.where(values.isfinite(), torch.from_numpy(rounded), values)


def uniform() -> Draw:
    """The same random numbers from the start."""
    generator = torch.Generator().manual_seed(1)
    return lambda like: torch.rand(like.shape, generator=generator)


def half(values: Tensor) -> Tensor:
    return values.to(torch.bfloat16).float()


def run(
    op: Callable[..., Tensor], *tensors: Tensor, products: Any = MX4, **rest: Any
) -> list[Tensor]:
    """The result of an op and the gradients of its tensors, for dy = made(..., seed=9)."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    with Precision("amp", half="bfloat16", products=products, **rest).cast():
        y = op(*leaves)
    y.backward(half(made(*y.shape, seed=9)).to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def prepared(model: nn.Module, products: Any = "mxfp8", **rest: Any) -> Precision:
    precision = Precision(**{"mode": "mixed", "half": "bfloat16", "products": products, **rest})
    precision.prepare(model, torch.optim.SGD(model.parameters()))
    return precision


TF32 = Recipe.from_mapping("all", {"every": {"format": "tf32", "scale": "none"}, "attention": True})
A, B, V = made(64, 32), made(32, 96, seed=1), made(32, seed=2)
A3, B3, C = made(4, 64, 32), made(4, 32, 96, seed=1), made(64, 96, seed=3)


class Note(TorchDispatchMode):
    refused: tuple[str, ...] = ()

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op = func._schema.name.partition("::")[2]
        if func.namespace == "mpframe" and "convert" not in op:
            self.seen.append(op)
        else:
            assert not op.startswith(self.refused)
        return func(*args, **(kwargs or {}))


class See(Note):
    """Refuses any product of torch's that runs beside them, of operands that nobody quantised."""

    refused = "_grouped_mm", "mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "convolution"
