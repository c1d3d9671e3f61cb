"""Products by `scaled_mm`: a CPU's kernels of fp8, and the exact codes of MX and NVFP4."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle, product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mpframe import OpLists, Precision
from mpframe.core.errors import ConfigError
from mpframe.lowbit import native
from mpframe.lowbit.formats import FORMATS
from mpframe.lowbit.native import codes_of, kind_of, multiply, refusal, scales_of, take_apart
from mpframe.lowbit.recipe import Recipe
from mpframe.lowbit.scaling import Axes, Quantization, quantize
from mpframe.tracking.dtype_map import dtype_map

ROWS, COLUMNS = Axes((1,), 0), Axes((0,), 1)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
E4M3, E5M2, E2M1 = (FORMATS[name] for name in ("e4m3fn", "e5m2", "e2m1"))
TENSOR = Quantization(E4M3)
ROW = Quantization(E4M3, per="row")
MX = Quantization(E4M3, per="block", block=32, scale="e8m0")
MXFP4 = replace(MX, format=E2M1, hadamard=32, rounding="stochastic")
NVFP4 = Quantization(E2M1, per="block", block=16, scale="e4m3")
KINDS = {
    "tensor": TENSOR,
    "tensor e5m2": replace(TENSOR, format=E5M2),
    "tensor e8m0": replace(TENSOR, scale="e8m0"),
    "row": ROW,
    "mx": MX,
    "mx e5m2": replace(MX, format=E5M2, rule="floor"),
    "mx across": replace(MX, across=32),
    "mx 128": replace(MX, block=128, across=16),
    "nvfp4": NVFP4,
    "nvfp4 weight": replace(NVFP4, across=16),
    "nvfp4 dw": replace(NVFP4, block=32, hadamard=16, rounding="stochastic"),
}
UNIT = 2.0**-24  # of fp32: half a unit in the last place, relative
# `bound` for 40 addends, whose magnitudes have a sum of less than twice the largest result.
NEAR = 2 * 43 * UNIT * 2


def made(*shape: int, seed: int = 0, device: torch.device = CPU) -> Tensor:
    """Normal numbers over 16 octaves; another row, another magnitude."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator)
    octaves = torch.randint(-8, 8, (shape[0], *[1] * len(shape[1:])), generator=generator)
    return (numbers * torch.exp2(octaves.float())).to(device)


def draw() -> Callable[[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(5)
    return lambda like: torch.rand(like.shape, generator=generator)


def recipe(**entries: Any) -> Recipe:
    return Recipe.from_mapping("mine", {"every": {"format": "e4m3fn"}, **entries})


def bound(left: Tensor, right: Tensor) -> Tensor:
    """How far two fp32 products of the same operands may be apart, whatever their order.

    A kernel that scales elements first rounds each operand once and their product once; one that
    scales sums rounds the product of both scales, and the sum by it: at most 3 roundings an addend.
    In any order an addend goes through at most k - 1 sums. So each product is off by at most
    (k + 2) units of the sum of magnitudes, and one more covers the terms of second order.
    """
    magnitudes = left.double().abs() @ right.double().abs()
    return 2 * (left.shape[1] + 3) * UNIT * magnitudes


def apart(result: Tensor, left: Tensor, right: Tensor) -> float:
    """The distance from the emulated product, in the largest that `bound` allows."""
    distance = (result.double() - (left @ right).double()).abs()
    return float((distance / bound(left, right)).nan_to_num(0.0).max())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of each product of `scaled_mm`."""
    seen: list[tuple[int, ...]] = []
    scaled_mm: Any = F.scaled_mm

    def watched(left: Tensor, right: Tensor, *rest: Any, **named: Any) -> Tensor:
        seen.append((*left.shape, right.shape[1]))
        y: Tensor = scaled_mm(left, right, *rest, **named)
        return y

    native.refusals(Recipe.named("fp8_tensorwise"), CPU)  # Tried before: it is not counted.
    native.refusals(Recipe.named("fp8_rows"), CPU)
    monkeypatch.setattr(F, "scaled_mm", watched)
    return seen


@pytest.fixture
def tried_anew() -> Iterator[None]:
    native._try.cache_clear()
    yield
    native._try.cache_clear()


@pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)
def test_parts_are_what_quantize_gives(how: Quantization) -> None:
    """An overflow shows in the same places, too."""
    for x, axes in product((made(128, 256), made(256, 128).t()), (ROWS, COLUMNS)):
        for beyond in (1.0, math.inf, math.nan):
            x[3, 40] = beyond
            joined = take_apart(x, axes, how, draw()).values(axes.free)
            expected = quantize(x, axes, how, draw())
            assert torch.equal(joined.isnan(), expected.isnan())
            assert torch.equal(joined.nan_to_num(0.0), expected.nan_to_num(0.0))
            assert expected.isnan().any() == (beyond != 1.0)


def test_parts_with_the_scale_of_a_known_amax() -> None:
    known = torch.tensor(4.0)
    joined = take_apart(x := made(32, 32), ROWS, TENSOR, None, known).values()
    assert torch.equal(joined, quantize(x, ROWS, TENSOR, None, known))
    assert not torch.equal(joined, quantize(x, ROWS, TENSOR))


def unswizzled(codes: Tensor, rows: int, blocks: int) -> Tensor:
    """Each scale from the place where cuBLAS documents it."""
    across = -(-blocks // 4)
    places = [
        (r // 128 * across + b // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + b % 4
        for r in range(rows)
        for b in range(blocks)
    ]
    return codes[places].view(rows, blocks)


def decoded(codes: Tensor) -> Tensor:
    """Of stored elements, float32: those of two in a byte by ml_dtypes, the low half first."""
    if codes.dtype != torch.float4_e2m1fn_x2:
        return codes.float()
    stored = codes.view(torch.uint8).numpy()
    halves = np.stack([stored & 15, stored >> 4], -1).reshape(len(stored), -1)
    return torch.from_numpy(halves.view(ml_dtypes.float4_e2m1fn).astype(np.float32))


class TestCodes:
    @pytest.mark.parametrize(
        ("name", "shape"),
        [*((name, (160, 256)) for name in KINDS), ("mx", (32, 1152)), ("nvfp4", (32, 1152))],
    )
    def test_decode_to_the_very_numbers(self, name: str, shape: tuple[int, int]) -> None:
        how = KINDS[name]
        parts = take_apart(x := made(*shape), ROWS, how, draw())
        kind = kind_of(how)
        assert kind is not None
        scale, *whole = scales_of(parts, kind)
        if kind in (native.MX, native.NVFP4):
            assert scale.dtype == (torch.float8_e4m3fn if whole else torch.float8_e8m0fnu)
            blocks = shape[1] // (16 if whole else 32)
            # The padding of a tile is not empty: cuBLAS reads whole ones.
            assert scale.numel() == -(-shape[0] // 128) * 128 * -(-blocks // 4) * 4
            scale = unswizzled(scale.float(), shape[0], blocks)
            scale = (scale * whole[0] if whole else scale).repeat_interleave(shape[1] // blocks, 1)
        assert torch.equal(decoded(codes_of(parts)) * scale, quantize(x, ROWS, how, draw()))

    @pytest.mark.parametrize("name", ["mx", "nvfp4"])
    def test_of_what_is_not_finite(self, name: str) -> None:
        """e2m1 has no nan, so the scale alone shows it."""
        x = made(32, 64)
        x[3, 40] = math.nan
        parts = take_apart(x, ROWS, KINDS[name])
        kind = kind_of(KINDS[name])
        assert kind is not None
        blocks = parts.scales.shape[1]
        found = unswizzled(scales_of(parts, kind)[0].float(), 32, blocks).isnan()
        assert found[3, 40 * blocks // 64]
        assert torch.equal(found, parts.scales.isnan())


class TestOnCpu:
    @pytest.mark.parametrize(
        ("left", "right", "shape", "turned"),
        [
            ("tensor", "tensor", (64, 96, 32), False),
            ("tensor", "tensor e5m2", (33, 47, 5), True),
            ("tensor e5m2", "tensor e8m0", (3, 4096, 17), False),
            ("row", "row", (1, 16, 10), False),
            ("row", "row", (64, 96, 32), True),
        ],
    )
    def test_equals_the_emulation_but_for_the_order(
        self, left: str, right: str, shape: tuple[int, int, int], turned: bool
    ) -> None:
        m, k, n = shape
        x, w = made(m, k), made(k, n, seed=1)
        if turned:  # Both lie in memory as the other one did.
            x, w = x.t().contiguous().t(), w.t().contiguous().t()
        hows = KINDS[left], KINDS[right]
        y = multiply(take_apart(x, ROWS, hows[0]), take_apart(w, COLUMNS, hows[1]))
        assert (y.dtype, y.shape, y.is_contiguous()) == (torch.float32, (m, n), True)
        assert apart(y, quantize(x, ROWS, hows[0]), quantize(w, COLUMNS, hows[1])) <= 1

    def test_shows_an_overflow(self) -> None:
        for how in (TENSOR, ROW):
            x, w = made(16, 32), made(32, 48, seed=1)
            x[3, 5] = math.inf
            y = multiply(take_apart(x, ROWS, how), take_apart(w, COLUMNS, how))
            emulated = quantize(x, ROWS, how) @ quantize(w, COLUMNS, how)
            assert torch.equal(y.isnan(), emulated.isnan())
            assert y[3].isnan().all()


def trained(compute: str, products: Any, **rest: Any) -> dict[str, Tensor]:
    """y and all gradients of a layer in fp32, whose products alone are rounded."""
    torch.manual_seed(0)
    layer = nn.Linear(40, 20)
    precision = Precision("fp32", products=products, compute=compute, **rest)
    precision.prepare(layer, torch.optim.SGD(layer.parameters()))
    x = made(24, 40).requires_grad_()
    with precision.cast():
        y = layer(x)
        # Inside the block, where a product by a kernel could be taken for one by the lists.
        y.backward(made(24, 20, seed=9))
    found = {"y": y, "x": x.grad, "w": layer.weight.grad, "b": layer.bias.grad}
    return {name: own.detach() for name, own in found.items() if own is not None}


class TestChoice:
    def test_a_cpu_emulates_unless_told(self, calls: list[tuple[int, ...]]) -> None:
        trained("auto", "fp8_rows")
        assert not calls
        computes = ("auto", "native", "emulated")
        assert [native.is_wanted(own, CPU) for own in computes] == [False, True, False]
        assert [native.is_wanted(own, CUDA) for own in computes] == [True, True, False]

    @pytest.mark.parametrize("products", ["fp8_rows", "fp8_tensorwise", "fp8_delayed"])
    def test_every_product_of_a_layer(self, products: str, calls: list[tuple[int, ...]]) -> None:
        both = trained("native", products), trained("emulated", products)
        # y = x w', dx = dy w and the transpose of dw = dy' x, of lengths that are padded to 16.
        assert sorted(calls) == sorted([(32, 48, 32), (32, 32, 48), (48, 32, 32)])
        for name, own in both[0].items():
            assert (own - both[1][name]).abs().max() <= NEAR * both[1][name].abs().max(), name
        assert torch.equal(both[0]["b"], both[1]["b"])

    def test_a_product_in_half_is_none(self, calls: list[tuple[int, ...]]) -> None:
        blocks = {"per": "row", "hadamard": 16}  # 40 inputs are not a multiple, 20 outputs neither.
        trained("native", recipe(every={"format": "e4m3fn", **blocks}, dw=None))
        assert not calls


NONE = "scaled_mm has none with an fp32 result for "
PER_TENSOR, PER_ROW = "fp32 scale per tensor", "fp32 scale per row"


class TestRefusal:
    @pytest.mark.parametrize(
        ("left", "right", "device", "expected"),
        [
            (TENSOR, ROW, CUDA, f"{NONE}e4m3fn / {PER_TENSOR} by e4m3fn / {PER_ROW}"),
            (replace(TENSOR, scale="none"), TENSOR, CPU, f"{NONE}e4m3fn by e4m3fn / {PER_TENSOR}"),
            (MXFP4, MXFP4, CPU, NONE + "e2m1 / e8m0 scale per block of 32 x 1"),
            (TENSOR, TENSOR, torch.device("meta"), "scaled_mm is not used on meta here"),
            (NVFP4, replace(NVFP4, across=16), CPU, "CPU does not support swizzle"),
            (TENSOR, replace(TENSOR, format=E5M2, history=3), CPU, ""),
        ],
    )
    def test_says_which_instruction_there_is_not(
        self, left: Quantization, right: Quantization, device: torch.device, expected: str
    ) -> None:
        assert refusal(left, right, device) == expected

    @pytest.mark.parametrize(
        ("how", "has", "needs"), [(ROW, (8, 6), "8.9"), (NVFP4, (8, 9), "10.0")]
    )
    def test_by_an_older_gpu(
        self, how: Quantization, has: tuple[int, int], needs: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: has)
        monkeypatch.setattr(native, "_try", lambda *_: "")
        reason = f"it needs compute capability {needs}, and this is {has[0]}.{has[1]}"
        assert refusal(how, how, CUDA) == reason
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device: tuple(map(int, needs.split(".")))
        )
        assert refusal(how, how, CUDA) == ""

    @pytest.mark.usefixtures("tried_anew")
    def test_of_wrong_numbers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        scaled_mm: Any = F.scaled_mm
        monkeypatch.setattr(F, "scaled_mm", lambda *a, **k: scaled_mm(*a, **k).flip(0))
        assert refusal(ROW, ROW, CPU) == "torch's scaled_mm gives wrong numbers for it"

    def test_at_once_where_native_was_asked_for(self) -> None:
        layer = nn.Linear(32, 32)
        precision = Precision("mixed", products="mxfp8", compute="native")
        with pytest.raises(ConfigError) as error:
            precision.prepare(layer, torch.optim.SGD(layer.parameters()))
        assert str(error.value) == (
            "dtype.compute=native: dtype.products=mxfp8 has no native forward product on cpu: CPU "
            "does not support swizzle; choose dtype.compute=auto, which emulates it"
        )
        with pytest.raises(ConfigError):
            precision.attach(layer)  # The first refusal has left nothing behind.

    def test_of_a_recipe_in_a_pin(self) -> None:
        lists = replace(OpLists.named(), modules={"head": "nvfp4"})
        precision = Precision("mixed", products="fp8_rows", compute="native", ops=lists)
        with pytest.raises(ConfigError, match=r"dtype\.products=nvfp4 has no native"):
            precision.attach(nn.ModuleDict({"head": nn.Linear(32, 32)}))

    @pytest.mark.parametrize(
        "run",
        [
            lambda: F.conv1d(made(2, 8, 4), made(8, 8, 1)),
            lambda: torch.bmm(made(2, 8, 4), made(2, 4, 8)),
        ],
        ids=["convolution", "batch"],
    )
    def test_of_other_than_two_matrices(self, run: Callable[[], Tensor]) -> None:
        with (
            Precision("fp32", products="fp8_rows", compute="native").cast(),
            pytest.raises(ConfigError) as error,
        ):
            run()
        assert str(error.value) == (
            "dtype.compute=native: dtype.products=fp8_rows has no native forward product on cpu: "
            "it is a convolution or a batch, and scaled_mm takes two matrices; choose "
            "dtype.compute=auto, which emulates it"
        )


class TestMap:
    def products(self, layer: nn.Module, products: Any, compute: str = "native") -> str:
        """In an own loop, where `prepare` has refused nothing."""
        return dtype_map(Precision("mixed", products=products, compute=compute), layer)[0].products

    def test_says_what_is_native(self) -> None:
        assert self.products(nn.Linear(32, 16), "fp8_rows") == "fp8_rows, native"
        assert self.products(nn.LSTM(32, 16), "fp8_rows") == "fp8_rows, native"
        assert self.products(nn.Linear(32, 16), "fp8_rows", "auto") == "fp8_rows"
        assert self.products(nn.Conv1d(32, 16, 1), "fp8_rows") == "fp8_rows, emulated"
        reason = "CPU does not support swizzle"
        assert self.products(nn.Linear(32, 32), "mxfp8") == f"mxfp8, emulated: {reason}"

        mine = recipe(dx={"w": {"per": "row"}})
        assert self.products(nn.Linear(32, 16), mine) == "mine, native but for dx"


SHAPES = [(128, 128, 128), (48, 384, 80), (1, 128, 10), (160, 640, 3)]


def test_operands_of_cuda_have_the_forms_that_kernels_demand() -> None:
    """As torch checks them without a GPU, without numbers."""
    for name, (m, k, n) in zip(KINDS, cycle(SHAPES)):
        how = replace(KINDS[name], across=1)
        kind = kind_of(how)
        assert kind is not None
        with FakeTensorMode():
            x, w = torch.ones(m, k, device="cuda"), torch.ones(n, k, device="cuda").t()
            left = take_apart(x, ROWS, how, torch.rand_like)
            right = take_apart(w, COLUMNS, how, torch.rand_like)
            y = multiply(left, right)
            assert (y.shape, y.dtype, y.device.type) == ((m, n), torch.float32, "cuda")
            assert y.is_contiguous()
            scale, other = scales_of(left, kind)[0], scales_of(right, kind)[0]
            other = other.t() if kind is native.ROW else other
            assert kind is not native.ROW or scale.stride() == other.stride() == (1, 1)
            # The older op looks at strides, alignment and the number of scales.
            padded = torch._scaled_mm(
                codes_of(left), codes_of(right).t(), scale, other, out_dtype=torch.float32
            )
            assert padded.shape == (m + -m % 16, n + -n % 16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", [name for name in KINDS if name != "tensor e5m2"])
def test_equals_the_emulation_on_cuda(name: str) -> None:
    """Some tensor cores keep about 14 bits of a sum of fp8: 2^-13 for each of k additions.

    Small integers are exact: the trial before the first product compares with `torch.equal`.
    """
    how = replace(KINDS[name], rounding="nearest", across=1)
    if torch.cuda.get_device_capability() < native._CAPABILITY[kind_of(how) or native.MX]:
        pytest.skip("an older GPU")
    assert refusal(KINDS[name], KINDS[name], CUDA) == ""
    for m, k, n in [(64, 128, 32), (1, 128, 10), (300, 1024, 528)]:
        x, w = made(m, k, device=CUDA), made(n, k, seed=1, device=CUDA).t()
        y = multiply(take_apart(x, ROWS, how), take_apart(w, COLUMNS, how))
        operands = quantize(x, ROWS, how), quantize(w, COLUMNS, how)
        assert apart(y, *operands) <= 2**-13 / UNIT
        x[0, 5] = math.inf
        y = multiply(take_apart(x, ROWS, how), take_apart(w, COLUMNS, how))
        assert torch.equal(y.isnan(), (quantize(x, ROWS, how) @ operands[1]).isnan())
