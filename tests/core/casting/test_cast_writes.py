"""What is written into a half tensor, or from one: sources of another format, numbers too large."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vocabulary import HALVES, same_bits

from mpframe import OpLists, Precision

FP32 = torch.float32
ENDS = {torch.float16: 65504.0, torch.bfloat16: torch.finfo(torch.bfloat16).max}
LOWEST = torch.finfo(FP32).min
ROWS = torch.tensor([2, 0])
MASK = torch.eye(4, dtype=torch.bool)
WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "index_add_": lambda x, y: x.index_add_(0, ROWS, y[:2]),
    "index_copy_": lambda x, y: x.index_copy_(0, ROWS, source=y[:2]),
    "index_put_": lambda x, y: x.index_put_((ROWS,), y[:2]),
    "index_reduce_": lambda x, y: x.index_reduce_(0, ROWS, y[:2], "amax"),
    "masked_scatter_": lambda x, y: x.masked_scatter_(MASK, y),
    "put_": lambda x, y: x.put_(ROWS, y[0, :2]),
    "scatter_": lambda x, y: x.scatter_(0, ROWS.expand(4, 2), y),
    "scatter_add_": lambda x, y: x.scatter_add_(0, ROWS.expand(4, 2), y),
    "scatter_reduce_": lambda x, y: x.scatter_reduce_(0, ROWS.expand(4, 2), y, "sum"),
    "x[i] = y": lambda x, y: x.__setitem__(1, y[1]),
    "x[rows] = y": lambda x, y: x.__setitem__(ROWS, y[:2]),
    "x[rows] = 0-d": lambda x, y: x.__setitem__(ROWS, y[0, 0]),
    "x[mask] = y": lambda x, y: x.__setitem__(MASK, y[0]),
}
FILLS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "masked_fill": lambda x, v: x.masked_fill(MASK, v),
    "masked_fill, all by name": lambda x, v: torch.masked_fill(input=x, mask=MASK, value=v),
    "masked_fill_": lambda x, v: x.clone().masked_fill_(MASK, v),
    "masked_fill with 0-d": lambda x, v: x.masked_fill(MASK, torch.tensor(v)),
    "index_fill": lambda x, v: x.index_fill(0, ROWS, v),
    "full_like": torch.full_like,
    "new_full": lambda x, v: x.new_full((4, 4), v),
    "full": lambda x, v: torch.full((4, 4), v, dtype=x.dtype),
    "pad": lambda x, v: F.pad(x, (1, 1), value=v),
    "scatter": lambda x, v: x.scatter(0, ROWS.expand(4, 2), v),
    "scatter_": lambda x, v: x.clone().scatter_(0, ROWS.expand(4, 2), v),
    "fill_": lambda x, v: x.clone().fill_(v),
    "threshold": lambda x, v: F.threshold(x, 2.0, v),
    "x[mask] = v": lambda x, v: _set(x.clone(), MASK, v),
    "x[i] = v": lambda x, v: _set(x.clone(), 1, v),
    "x[i] = 0-d": lambda x, v: _set(x.clone(), ROWS, torch.tensor(v)),
}
BOUNDS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "clamp": lambda x, v: x.clamp(min=v, max=-v),
    "clamp_": lambda x, v: x.clone().clamp_(v, -v),
    "clip": lambda x, v: x.clip(v, -v),
    "clamp_min": torch.clamp_min,
    "hardtanh": lambda x, v: F.hardtanh(x, v, -v),
}


def _set(x: Tensor, key: Any, value: Any) -> Tensor:
    x[key] = value
    return x


def cast(half: torch.dtype) -> Any:
    return Precision("amp", str(half).removeprefix("torch.")).cast()


@pytest.mark.filterwarnings("ignore:index_reduce.* is in beta")
@pytest.mark.parametrize("half", HALVES.values())
@pytest.mark.parametrize("write", WRITES)
def test_a_source_takes_the_format_of_what_it_is_written_into(
    write: str, half: torch.dtype
) -> None:
    x, y = torch.rand(4, 4), torch.rand(4, 4)
    for target, source in ((FP32, half), (half, FP32)):
        expected, written = x.to(target), x.to(target)
        WRITES[write](expected, y.to(source).to(target))
        with cast(half):
            WRITES[write](written, y.to(source))
        assert same_bits([written], [expected])


@pytest.mark.parametrize("half", HALVES.values())
def test_gradients_flow_to_a_source_of_another_format(half: torch.dtype) -> None:
    source = torch.rand(2, 4).to(half).requires_grad_()
    with cast(half):
        torch.zeros(4, 4).index_add_(0, ROWS, source).sum().backward()
    assert source.grad is not None
    assert torch.equal(source.grad, torch.ones(2, 4, dtype=half))


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("half", HALVES.values())
@pytest.mark.parametrize("fill", FILLS)
def test_a_number_beyond_the_range_is_held_at_its_end(
    fill: str, half: torch.dtype, sign: float
) -> None:
    x = torch.rand(4, 4).to(half)
    with cast(half):
        result = FILLS[fill](x, sign * LOWEST)
        assert same_bits([result], [FILLS[fill](x, -sign * ENDS[half])])
    assert result.dtype == half
    assert ENDS[half] in (result.max(), -result.min())


@pytest.mark.parametrize("half", HALVES.values())
@pytest.mark.parametrize("fill", FILLS)
def test_an_infinity_stays_one(fill: str, half: torch.dtype) -> None:
    x = torch.rand(4, 4).to(half)
    with cast(half):
        assert FILLS[fill](x, -math.inf).isinf().any()


@pytest.mark.parametrize("half", HALVES.values())
@pytest.mark.parametrize("bound", BOUNDS)
def test_a_bound_beyond_the_range_bounds_nothing(bound: str, half: torch.dtype) -> None:
    x = (torch.rand(4, 4) - 0.5).to(half)
    with cast(half):
        assert same_bits([BOUNDS[bound](x, LOWEST)], [x])


def test_numbers_for_fp32_and_explicit_formats_are_left_alone() -> None:
    x = torch.zeros(4, 4)
    with cast(torch.float16):
        assert x.masked_fill(MASK, -1e9).min() == -1e9
        assert torch.full_like(x.half(), 1e9, dtype=FP32).max() == 1e9


def test_a_key_is_no_number_to_hold() -> None:
    x = torch.zeros(70_000, dtype=torch.float16)
    with cast(torch.float16):
        x[69_999] = 1e9
    assert x[69_999] == 65504.0


@pytest.mark.parametrize("mode", ["amp", "mixed"])
@pytest.mark.parametrize("half", HALVES)
def test_adaptive_softmax_after_a_half_layer(half: str, mode: str) -> None:
    torch.manual_seed(0)
    body, head = nn.Linear(16, 16), nn.AdaptiveLogSoftmaxWithLoss(16, 100, [10, 50])
    model = nn.ModuleList([body, head])
    precision = Precision(mode, half)
    model, _ = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with precision.cast():
        loss = head(body(torch.rand(8, 16)), torch.tensor([1, 20, 60, 3, 99, 49, 50, 10])).loss
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("half", HALVES.values())
def test_under_a_compiler(half: torch.dtype) -> None:
    precision = Precision("amp", str(half).removeprefix("torch."))

    def write(x: Tensor, y: Tensor) -> Tensor:
        with precision.cast():
            held = x.masked_fill(MASK, LOWEST)
            return torch.zeros(4, 4).index_add_(0, ROWS, held[:2]) + torch.inner(x, y)

    x, y = torch.rand(4, 4).to(half), torch.rand(4, 4)
    compiled = torch.compile(write, backend="aot_eager", fullgraph=True)
    assert same_bits([compiled(x, y)], [write(x, y)])


def test_lists_that_name_an_op_of_a_library_move_it() -> None:
    import torchvision

    boxes = torch.tensor([[0.0, 0.0, 2.0, 2.0]])
    image = torch.rand(1, 1, 4, 4)
    for destination, dtype in (("deny", FP32), ("allow", torch.float16), ("none", FP32)):
        lists = OpLists.named().moved({"torchvision.roi_align": destination})
        with Precision("amp", ops=lists).cast():
            assert torchvision.ops.roi_align(image, [boxes], 2).dtype == dtype
