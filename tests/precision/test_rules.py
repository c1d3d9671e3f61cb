"""What a rule casts and what it leaves alone: formats, explicit dtypes, statistics, writes.

And what an OpHandler sees, replaces and remembers.
"""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from vocabulary import HALVES, inside, same_bits

from mpframe import OpLists, Precision
from mpframe.core.errors import ConfigError
from mpframe.precision.handlers import OpHandler

FP32, FP64, HALF = torch.float32, torch.float64, torch.float16
Y = torch.arange(12.0).reshape(3, 4)


def amp(half="float16", compute="auto", **move):
    return Precision("amp", half, compute=compute, ops=OpLists.named().moved(move))


def test_never_cast_are_other_formats_what_is_beside_float64_and_kernels_called_by_hand() -> None:
    calls = [lambda x: torch.cat([x, x]), Tensor.sum, lambda x: x @ x]
    formats = (FP64, 3), (torch.complex64, 3), (torch.int64, 3), (torch.bool, 2)
    for dtype, count in (*formats, (torch.float8_e4m3fn, 1)):
        x = torch.eye(4).to(dtype)
        for call in calls[:count]:
            cast = inside(amp(), call)(x)
            assert (cast.dtype, cast.tolist()) == (call(x).dtype, call(x).tolist())
    # 1 + 2^-12 would be 1 in float16.
    x, half, wide = torch.tensor([1 + 2.0**-12]), torch.ones(1).half(), torch.ones(1).double()
    with amp(mul="allow").cast():
        for beside in (wide, wide.to(torch.complex64)):
            assert (x * beside).real.item() == 1 + 2.0**-12
        assert (half + wide).dtype == F.mse_loss(half, wide).dtype == FP64
        # A list that names `mm` does not mean `torch.ops.aten.mm`.
        for kernel in (torch.ops.aten.mm, torch.ops.aten.mm.default):
            assert kernel(Y, Y.T).dtype == FP32
    assert "mm" in OpLists.named().allow


def test_an_explicit_dtype_wins() -> None:
    for call, given, move in (
        (lambda x: x.softmax(-1, FP64), HALF, "deny"),
        (lambda x: x.sum(dtype=FP64), HALF, "deny"),
        (lambda x: F.softmax(x, dim=-1, dtype=FP32), FP32, "allow"),
        (lambda x: x.softmax(-1, FP32), FP32, "allow"),
        (lambda x: x.sum(dtype=HALF), FP32, "deny"),
    ):
        x = torch.rand(4, 4).to(given)
        assert same_bits([inside(amp(softmax=move), call)(x)], [call(x)])


@pytest.mark.parametrize("dtype", [FP32, HALF])
def test_in_place_and_out_forms_keep_their_tensors_format(dtype) -> None:
    for write in (
        lambda x: x.exp_(),
        lambda x: x.addmm_(x.clone(), x.clone()),
        lambda x: x.__imul__(x.clone()),
        lambda x: x.__ipow__(2),
        lambda x: torch.softmax(x.clone(), 1, out=x),
    ):
        x = torch.rand(4, 4).to(dtype)
        expected = write(x.clone())
        assert inside(amp(), write)(x) is x
        assert same_bits([x], [expected])


def test_a_0d_tensor_is_a_number() -> None:
    half, number = torch.ones(4, dtype=HALF), torch.tensor(2.0)
    with amp().cast():
        assert (half * number).dtype == torch.where(half > 0, half, number).dtype == HALF
        assert (half.sum(dtype=HALF) + number).dtype == FP32  # No larger one is beside them.
        assert (half + half.bfloat16()).dtype == FP32


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("move", ["allow", "deny"])
@pytest.mark.parametrize(("half", "compute"), [("float16", "emulated"), ("bfloat16", "native")])
def test_running_statistics_are_never_cast(half, compute, move, by_name) -> None:
    """A cast copy would be updated in their place, and the statistics would stand still."""
    x, mean, variance = torch.rand(4, 3, 5, 5).to(HALVES[half]), torch.zeros(3), torch.ones(3)
    F.batch_norm(x.float(), expected := mean.clone(), variance.clone(), training=True)
    given = {"running_mean": mean, "running_var": variance, "training": True}
    rest = {"weight": None, "bias": None, "momentum": 0.1, "eps": 0, "cudnn_enabled": False}
    with amp(half, compute, batch_norm=move).cast():
        by_torch = partial(torch.batch_norm, input=x, **given, **rest)
        result = by_torch() if by_name else F.batch_norm(x, **given)
    assert result.dtype == (HALVES[half] if move == "allow" else FP32)
    # Half kernels of torch sum in fp32; their order differs: some roundings of 2^-24 each.
    torch.testing.assert_close(mean, expected, rtol=1e-6, atol=0)


LOWEST = torch.finfo(FP32).min
ROWS, MASK = torch.tensor([2, 0]), torch.eye(4, dtype=torch.bool)


def put(x, key, value):
    x[key] = value
    return x


WRITES = [
    lambda x, y: x.addmm_(y, y),
    lambda x, y: x.index_add_(0, ROWS, y[:2]),
    lambda x, y: x.index_copy_(0, ROWS, source=y[:2]),
    lambda x, y: x.index_put_((ROWS,), y[:2]),
    lambda x, y: x.index_reduce_(0, ROWS, y[:2], "amax"),
    lambda x, y: x.masked_scatter_(MASK, y),
    lambda x, y: x.put_(ROWS, y[0, :2]),
    lambda x, y: x.scatter_(0, ROWS.expand(4, 2), y),
    lambda x, y: x.scatter_reduce_(0, ROWS.expand(4, 2), y, "sum"),
    lambda x, y: put(x, 1, y[1]),
    lambda x, y: put(x, MASK, y[0]),
]
FILLS = [
    lambda x, v: x.masked_fill(MASK, v),
    lambda x, v: torch.masked_fill(input=x, mask=MASK, value=v),
    lambda x, v: x.masked_fill(MASK, torch.tensor(v)),
    lambda x, v: x.index_fill(0, ROWS, v),
    torch.full_like,
    lambda x, v: x.new_full((4, 4), v),
    lambda x, v: torch.full((4, 4), v, dtype=x.dtype),
    lambda x, v: F.pad(x, (1, 1), value=v),
    lambda x, v: x.scatter(0, ROWS.expand(4, 2), v),
    lambda x, v: x.clone().fill_(v),
    lambda x, v: F.threshold(x, 2.0, v),
    lambda x, v: put(x.clone(), MASK, v),
    lambda x, v: put(x.clone(), ROWS, torch.tensor(v)),
]
BOUNDS = [
    lambda x, v: x.clamp(min=v, max=-v),
    lambda x, v: x.clone().clamp_(v, -v),
    torch.clamp_min,
    lambda x, v: F.hardtanh(x, v, -v),
]


@pytest.mark.parametrize("half", HALVES)
class TestWrites:
    @pytest.mark.filterwarnings("ignore:index_reduce.* is in beta")
    def test_a_source_takes_the_format_of_what_it_is_written_into(self, half) -> None:
        x, y = torch.rand(4, 4), torch.rand(4, 4)
        for target, source in ((FP32, HALVES[half]), (HALVES[half], FP32)):
            for write in WRITES:
                expected, written = x.to(target, copy=True), x.to(target, copy=True)
                write(expected, y.to(source).to(target))
                inside(amp(half), write)(written, y.to(source))
                assert same_bits([written], [expected])

    def test_a_number_beyond_the_range_is_held_and_an_infinity_stays_one(self, half) -> None:
        x, end = torch.rand(4, 4).to(HALVES[half]), torch.finfo(HALVES[half]).max
        for fill in FILLS:
            with amp(half).cast():
                low, high = fill(x, LOWEST), fill(x, -LOWEST)
                assert same_bits([low, high], [fill(x, -end), fill(x, end)])
                assert fill(x, -math.inf).isinf().any()
            assert (low.dtype, -low.min(), high.max()) == (HALVES[half], end, end)

    def test_a_bound_beyond_the_range_bounds_nothing(self, half) -> None:
        x = (torch.rand(4, 4) - 0.5).to(HALVES[half])
        with amp(half).cast():
            assert same_bits([bound(x, LOWEST) for bound in BOUNDS], [x] * len(BOUNDS))


def test_numbers_that_are_left_alone() -> None:
    """Those for fp32 and for formats that are asked for, and keys."""
    x, long = torch.zeros(4, 4), torch.zeros(70_000, dtype=HALF)
    with amp().cast():
        long[69_999] = 1e9
        found = [x.masked_fill(MASK, -1e9).min(), torch.full_like(x.half(), 1e9, dtype=FP32).max()]
    assert [*found, long[69_999]] == [-1e9, 1e9, 65504.0]


def test_lists_that_name_an_op_of_a_library_move_it() -> None:
    boxes, image = torch.tensor([[0.0, 0.0, 2.0, 2.0]]), torch.rand(1, 1, 4, 4)
    for destination, dtype in (("deny", FP32), ("allow", HALF), ("none", FP32)):
        with amp(**{"torchvision.roi_align": destination}).cast():
            assert torchvision.ops.roi_align(image, [boxes], 2).dtype == dtype


class Count(OpHandler):
    def __init__(self) -> None:
        self.asked, self.seen = set(), 0

    def handler_of(self, op, recipe):
        self.asked.add((op, recipe))
        return self.count if op == "linear" else None

    def count(self, func, args, kwargs):
        self.seen += 1
        return NotImplemented

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state) -> None:
        self.seen = state.get("seen", 0)


@pytest.mark.parametrize("mode", ["fp32", "mixed", "amp"])
def test_a_handler_sees_its_ops_and_leaves_them_to_the_lists(mode) -> None:
    count, model = Count(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    precision = Precision(mode, op_handlers=[count])
    precision.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    expected, y = inside(Precision(mode), model)(Y), inside(precision, model)(Y)
    assert precision.state_dict() == {"seen": 2}
    assert same_bits([y], [expected])
    with precision.preserve_state(), precision.cast():
        model(Y)
    assert count.seen == 2
    precision.load_state_dict({"seen": 7})
    assert count.seen == 7


def test_handlers_are_asked_in_turn_and_may_replace_an_op() -> None:
    hard, replacement = OpHandler(), lambda func, args, kwargs: nn.functional.hardsigmoid(*args)
    hard.handler_of = lambda op, recipe: replacement if op == "sigmoid" else None
    precision = Precision("amp", op_handlers=[Count(), hard])
    run = inside(precision, Tensor.sigmoid)
    for call in (run, torch.compile(run, fullgraph=True, backend="eager")):
        assert torch.equal(call(Y), nn.functional.hardsigmoid(Y))


def test_a_model_that_a_handler_refuses_is_refused_again() -> None:
    class Needs(OpHandler):
        def attach(self, model):
            raise ConfigError("needs another device")

    precision, model = Precision("amp", op_handlers=[Needs()]), nn.Linear(2, 2)
    for _ in range(2):
        with pytest.raises(ConfigError, match="needs another device"):
            precision.attach(model)


@pytest.mark.parametrize(  # for all, or for a module
    ("products", "pin"), [("fp8_tensorwise", "none"), ("none", "fp8_tensorwise")]
)
def test_a_handler_comes_before_a_recipe_whose_name_it_is_told(products, pin) -> None:
    def naming(count):
        ops = OpLists.from_mapping({"allow": ["linear"], "modules": {"0": pin}})
        return Precision("amp", ops=ops, products=products, op_handlers=[count])

    count, model = Count(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    precision = naming(count)
    precision.attach(model)
    inside(precision, model)(Y)
    assert count.seen == 2
    assert {recipe for op, recipe in count.asked if op == "linear"} == {"fp8_tensorwise", None}
