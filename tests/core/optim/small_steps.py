"""Parameters, gradients and optimizers for tests of single steps."""

import copy
import inspect

import torch
from torch import nn
from torch.optim import Optimizer
from vocabulary import same_bits, tensors

from mpframe import MasterWeights

FP32, HALF, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
INF, NAN = torch.inf, torch.nan
SGD, AdamW, SparseAdam = torch.optim.SGD, torch.optim.AdamW, torch.optim.SparseAdam
FOUND = {cls for cls in vars(torch.optim).values() if inspect.isclass(cls)}
STEPPING = sorted(  # Every optimizer of torch that needs no closure.
    (c for c in FOUND if issubclass(c, Optimizer) and c not in (Optimizer, torch.optim.LBFGS)),
    key=lambda cls: cls.__name__,
)
assert {SGD, AdamW, torch.optim.Muon} <= {*STEPPING}


def parameters(dtype=FP32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(3, 4, generator=generator).to(dtype)) for _ in range(3)]


def gradients(step, cls=SGD):
    """Random gradients of one step; sparse ones for the optimizer that takes no others."""
    generator = torch.Generator().manual_seed(100 + step)
    dense = [torch.randn(3, 4, generator=generator) for _ in range(3)]
    return [g.to_sparse(1) for g in dense] if cls is SparseAdam else dense


def sparse(rows, values, shape):
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, shape, check_invariants=True)


def set_gradients(params, grads, scale=1.0) -> None:
    for parameter, gradient in zip(params, grads, strict=True):
        parameter.grad = (gradient * scale).to(parameter.dtype)


def give(params, step, cls=SGD, scale=1.0) -> None:
    set_gradients(params, gradients(step, cls), scale)


def wrapped(dtype=FP32, cls=SGD, keep_masters=True, **options):
    """Three parameters and what steps them."""
    params = parameters(dtype)
    return params, MasterWeights(cls(params, **{"lr": 0.05, **options}), keep_masters=keep_masters)


def one(value, lr=1.0, **options):
    """A weight and SGD, which moves it by its gradient."""
    weight = nn.Parameter(value)
    return weight, MasterWeights(SGD([weight], lr=lr, **options))


def state_tensors(optimizer):
    return tensors([list(state.values()) for state in optimizer.state.values()])


def snapshot(own, params):
    weights = [t.detach() for p in params for t in (p, own.master_of(p))]
    return copy.deepcopy((weights, own.optimizer.state_dict()))


def unchanged(before, own, params):
    after = snapshot(own, params)
    plain = before[1]["param_groups"] == after[1]["param_groups"]
    return plain and same_bits(tensors(before), tensors(after))
