"""torch's optimizer database: every optimizer, in every configuration torch tests it with.

The masters are, bit for bit, what the plain optimizer makes of the same gradients in fp32, and half
weights are their rounding.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

from mpframe import Precision, Static
from mpframe.core.errors import ConfigError
from mpframe.training.optimizers.lbfgs import step_with_closure

STEPS = 4
SCALE = 2.0**10  # a power of two: scaling and unscaling take no bit
FORMATS = ("fp32", "float16", "bfloat16")
PRECISIONS = {"fp32": Precision("fp32"), **{h: Precision("mixed", h) for h in FORMATS[1:]}}


def configurations(*, closures: bool) -> Iterator[Any]:
    """(optimizer, keyword arguments): torch's, in every implementation that runs on a CPU.

    `capturable` is for CUDA graphs; `differentiable` keeps a graph that no master has.
    """
    for info in (i for i in optim_db if i.step_requires_closure == closures):
        without = {"differentiable"} | ({"fused"} if "cpu" not in info.supports_fused_on else set())
        ways = [way for way in info.supported_impls if way not in without]
        for given in info.optim_inputs_func(device="cpu"):
            for way in ("", *ways) if not given.kwargs.get("capturable") else ():
                name = f"{info.optim_cls.__name__}-{given.desc}-{way or 'default'}"
                own = {**given.kwargs, **({way: True} if way else {})}
                yield pytest.param(info, own, id=name.replace(" ", "_"))


def layer(info: OptimizerInfo) -> nn.Linear:
    """A matrix and a vector; a matrix alone for Muon, which takes no vector."""
    torch.manual_seed(0)
    return nn.Linear(3, 5, bias=info.optim_cls is not torch.optim.Muon)


def gradient_of(parameter: nn.Parameter, generator: torch.Generator, sparse: bool) -> Tensor:
    """In fp32; a sparse one touches every other row."""
    dense, rows = torch.randn(parameter.shape, generator=generator), torch.arange(0, 5, 2)
    if not sparse:
        return dense
    chosen = torch.sparse_coo_tensor(rows[None], dense[rows], dense.shape, check_invariants=False)
    return chosen.coalesce()


def state_of(optimizer: Optimizer) -> list[Any]:
    """The state's values in the order of the parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [value for p in parameters for _, value in sorted(optimizer.state[p].items())]


def distance_to_one(model: nn.Linear) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        model.zero_grad()
        loss = torch.stack([(p - 1).square().sum() for p in model.parameters()]).sum()
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("kept", FORMATS)
@pytest.mark.parametrize(("info", "kwargs"), list(configurations(closures=False)))
def test_the_wrapper_is_the_optimizer(info: OptimizerInfo, kwargs: Any, kept: str) -> None:
    model, twin = layer(info), layer(info)
    plain = list(twin.parameters())
    reference = info.optim_cls(plain, **copy.deepcopy(kwargs))
    optimizer = info.optim_cls(model.parameters(), **copy.deepcopy(kwargs))
    _, wrapped = PRECISIONS[kept].prepare(model, optimizer)
    stored = list(model.parameters())
    generator = torch.Generator().manual_seed(100)
    for _ in range(STEPS):
        for p, s in zip(plain, stored, strict=True):
            gradient = gradient_of(p, generator, info.only_supports_sparse_grads)
            s.grad = (gradient * SCALE).to(s.dtype)
            p.grad = s.grad.float() / SCALE
        reference.step()
        assert not wrapped.step(Static(SCALE)).skipped
    masters = [wrapped.master_of(s) for s in stored]
    assert all(map(torch.equal, masters, plain))
    assert all(torch.equal(s, m.to(s.dtype)) for s, m in zip(stored, masters, strict=True))
    states = zip(state_of(optimizer), state_of(reference), strict=True)
    assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in states)


@pytest.mark.parametrize(("info", "kwargs"), list(configurations(closures=True)))
def test_closures(info: OptimizerInfo, kwargs: dict[str, Any]) -> None:
    """LBFGS evaluates the loss itself. In fp32 it is the same."""
    model, twin = layer(info), layer(info)
    reference, optimizer = (
        info.optim_cls(own.parameters(), **copy.deepcopy(kwargs)) for own in (twin, model)
    )
    _, wrapped = PRECISIONS["fp32"].prepare(model, optimizer)
    for _ in range(STEPS):
        reference.step(distance_to_one(twin))
        step_with_closure(wrapped, distance_to_one(model))
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


REFUSED = "LBFGS over half weights is refused: it compares points that rounding would move"


@pytest.mark.differs(REFUSED)
@pytest.mark.parametrize("kept", FORMATS[1:])
def test_closures_over_half_weights(kept: str) -> None:
    model = nn.Linear(3, 5)
    _, wrapped = PRECISIONS[kept].prepare(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ConfigError, match="half weights"):
        step_with_closure(wrapped, distance_to_one(model))
