"""Parameters, gradients and optimizers for tests of single steps."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from vocabulary import same_bits, tensors

from mpframe import MasterWeights

FP32, HALF, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
INF, NAN = float("inf"), float("nan")
SGD, AdamW, SparseAdam = torch.optim.SGD, torch.optim.AdamW, torch.optim.SparseAdam
FOUND = {cls for cls in vars(torch.optim).values() if inspect.isclass(cls)}
STEPPING = sorted(
    (c for c in FOUND if issubclass(c, Optimizer) and c not in (Optimizer, torch.optim.LBFGS)),
    key=lambda cls: cls.__name__,
)
"""Every optimizer of torch that needs no closure."""
assert {SGD, AdamW, torch.optim.Muon} <= {*STEPPING}
assert len(STEPPING) >= 14


def parameters(dtype: torch.dtype = FP32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(3, 4, generator=generator).to(dtype)) for _ in range(3)]


def gradients(step: int, cls: type[Optimizer]) -> list[Tensor]:
    """Random gradients of one step; sparse ones for the optimizer that takes no others."""
    generator = torch.Generator().manual_seed(100 + step)
    dense = [torch.randn(3, 4, generator=generator) for _ in range(3)]
    return [g.to_sparse(1) for g in dense] if cls is SparseAdam else dense


def sparse(rows: list[int], values: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, shape, check_invariants=True)


def set_gradients(params: list[Any], grads: list[Tensor], scale: float = 1.0) -> None:
    for parameter, gradient in zip(params, grads, strict=True):
        parameter.grad = (gradient * scale).to(parameter.dtype)


def state_tensors(optimizer: Any) -> list[Tensor]:
    return tensors([list(state.values()) for state in optimizer.state.values()])


def snapshot(wrapped: MasterWeights, params: list[nn.Parameter]) -> Any:
    masters = [wrapped.master_of(p) for p in params]
    return copy.deepcopy(
        (
            [p.detach() for p in params],
            [m.detach() for m in masters],
            wrapped.optimizer.state_dict(),
        )
    )


def unchanged(before: Any, wrapped: MasterWeights, params: list[nn.Parameter]) -> bool:
    after = snapshot(wrapped, params)
    plain = before[2]["param_groups"] == after[2]["param_groups"]
    return plain and same_bits(tensors(before), tensors(after))


def quadratic(params: list[nn.Parameter]) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        for parameter in params:
            parameter.grad = None
        loss = torch.stack([(p - 1).square().sum() for p in params]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return closure
