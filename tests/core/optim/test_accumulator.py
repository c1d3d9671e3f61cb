"""Sums over micro-batches: exact whatever the gradients' formats and layouts are."""

import pytest
import torch
from torch import Tensor, nn

from mpframe.core.optim import gradients
from mpframe.core.optim.master_weights import MasterWeights

WEIGHTS = (1, 3, 2)  # samples of each micro-batch; the second one's gradients are bad


def in_rows(value: Tensor) -> Tensor:
    return value.contiguous()


def in_columns(value: Tensor) -> Tensor:
    return value.t().contiguous().t()


def repeated(value: Tensor) -> Tensor:
    return value[:1].expand(value.shape)


@pytest.mark.parametrize("small_chunks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_window_is_the_mean_of_its_good_micro_batches(
    dtype: torch.dtype, small_chunks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients lie in another order in each micro-batch, and one weight misses the first."""
    if small_chunks:
        monkeypatch.setattr(gradients, "_SIZE_ON_CPU", 1)
    weights = [nn.Parameter(torch.zeros(3, 5, dtype=dtype)) for _ in range(2)]
    wrapped = MasterWeights(torch.optim.SGD(weights, lr=1.0))
    torch.manual_seed(0)
    given = [torch.randint(-8, 8, (3, 5)).to(dtype) for _ in WEIGHTS]
    given[1][2, 4] = torch.nan
    given[2] = repeated(given[2])
    for lay, count, value in zip((in_rows, in_columns, repeated), WEIGHTS, given, strict=True):
        weights[0].grad = lay(value)
        weights[1].grad = None if lay is in_rows else lay(value)
        wrapped.accumulate(1.0, count)
    assert wrapped.step().dropped == 1
    wide = torch.promote_types(dtype, torch.float32)  # A sum of whole numbers is exact in it.
    first, last = given[0].to(wide), given[2].to(wide)
    assert torch.equal(wrapped.master_of(weights[0]), -(first + 2 * last) / 3)
    assert torch.equal(wrapped.master_of(weights[1]), -(2 * last) / 3)
