"""Products by `scaled_mm`: a CPU's kernels of fp8, and the exact codes of MX and NVFP4."""

import math
from collections import OrderedDict
from dataclasses import replace
from itertools import cycle, product
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fixtures import Patch, has_torch, needs_torch, refused
from low_bits import COLUMNS, ML_DTYPES, ROWS, prepared, uniform
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mpframe import OpLists, Precision
from mpframe.core.errors import ConfigError
from mpframe.precision.lowbit import native
from mpframe.precision.lowbit.formats import FORMATS
from mpframe.precision.lowbit.native import (
    codes_of,
    kind_of,
    multiply,
    refusal,
    scales_of,
    take_apart,
)
from mpframe.precision.lowbit.recipe import Recipe
from mpframe.precision.lowbit.scaling import Quantization, quantize
from mpframe.tracking.dtype_map import dtype_map

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
E4M3, E5M2, E2M1 = (FORMATS[name] for name in ("e4m3fn", "e5m2", "e2m1"))
TENSOR = Quantization(E4M3)
ROW = Quantization(E4M3, per="row")
MX = Quantization(E4M3, per="block", block=32, scale="e8m0")
MXFP4 = replace(MX, format=E2M1, hadamard=32, rounding="stochastic")
NVFP4 = Quantization(E2M1, per="block", block=16, scale="e4m3")
KINDS = {
    "tensor": TENSOR, "tensor e5m2": replace(TENSOR, format=E5M2),
    "tensor e8m0": replace(TENSOR, scale="e8m0"), "row": ROW, "mx": MX,
    "mx e5m2": replace(MX, format=E5M2, rule="floor"), "mx across": replace(MX, across=32),
    "mx 128": replace(MX, block=128, across=16), "nvfp4": NVFP4,
    "nvfp4 weight": replace(NVFP4, across=16),
    "nvfp4 dw": replace(NVFP4, block=32, hadamard=16, rounding="stochastic"),
}  # fmt: skip
UNIT = 2.0**-24  # of fp32: half a unit in the last place, relative
# As in `apart`, for 40 addends, whose magnitudes have a sum of less than twice the largest result.
NEAR = 2 * 43 * UNIT * 2
NONE = "scaled_mm has none with an fp32 result for "
PER_TENSOR, PER_ROW = "fp32 scale per tensor", "fp32 scale per row"
OLDER = "Could not run 'aten::_scaled_mm_v2' with arguments from the 'CPU' backend"
OF_CPU, SWIZZLE = ("", "CPU does not support swizzle") if has_torch("2.15") else (OLDER, OLDER)
on_cpus = needs_torch("2.15", "multiplies fp8 on CPUs")


def made(*shape: int, seed: int = 0, device: torch.device = CPU) -> Tensor:
    """Normal numbers over 16 octaves; another row, another magnitude."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator)
    octaves = torch.randint(-8, 8, (shape[0], *[1] * len(shape[1:])), generator=generator)
    return (numbers * torch.exp2(octaves.float())).to(device)


def apart(result: Tensor, left: Tensor, right: Tensor) -> float:
    """The distance from the emulated product, in the largest that any order may give.

    An addend has at most 3 roundings and goes through at most k - 1 sums: (k + 2) units of the sum
    of magnitudes, and one more for terms of second order.
    """
    bound = 2 * (left.shape[1] + 3) * UNIT * (left.double().abs() @ right.double().abs())
    distance = (result.double() - (left @ right).double()).abs()
    return float((distance / bound).nan_to_num(0.0).max())


@pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)
def test_parts_are_what_quantize_gives(how: Quantization) -> None:
    """An overflow shows in the same places, too."""
    for x, axes in product((made(128, 256), made(256, 128).t()), (ROWS, COLUMNS)):
        for beyond in (1.0, math.inf, math.nan):
            x[3, 40] = beyond
            joined = take_apart(x, axes, how, uniform()).values(axes.free)
            expected = quantize(x, axes, how, uniform())
            assert torch.equal(joined.isnan(), expected.isnan())
            assert torch.equal(joined.nan_to_num(0.0), expected.nan_to_num(0.0))
            assert expected.isnan().any() == (beyond != 1.0)


def of_elements(codes: Tensor, shape: tuple[int, int], blocks: int) -> Tensor:
    """The scale of each element, from the place where cuBLAS documents it."""
    across = -(-blocks // 4)
    places = [
        (r // 128 * across + b // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + b % 4
        for r, b in product(range(shape[0]), range(blocks))
    ]
    return codes[places].view(-1, blocks).float().repeat_interleave(shape[1] // blocks, 1)


def decoded(codes: Tensor) -> Tensor:
    """Of stored elements, float32: those of two in a byte by ml_dtypes, the low half first."""
    if codes.dtype != torch.float4_e2m1fn_x2:
        return codes.float()
    stored = codes.view(torch.uint8).numpy()
    halves = np.stack([stored & 15, stored >> 4], -1).reshape(len(stored), -1)
    return torch.from_numpy(halves.view(ML_DTYPES["e2m1"]).astype(np.float32))


@pytest.mark.parametrize(
    ("name", "shape"),
    [*((name, (160, 256)) for name in KINDS), ("mx", (32, 1152)), ("nvfp4", (32, 1152))],
)
def test_codes_decode_to_the_very_numbers(name: str, shape: tuple[int, int]) -> None:
    """e2m1 has no nan, so the scale alone shows one."""
    how = KINDS[name]
    kind: Any = kind_of(how)
    x = made(*shape)
    parts, expected = take_apart(x, ROWS, how, uniform()), quantize(x, ROWS, how, uniform())
    scale, *whole = scales_of(parts, kind)
    if kind in (native.MX, native.NVFP4):
        assert scale.dtype == (torch.float8_e4m3fn if whole else torch.float8_e8m0fnu)
        blocks = shape[1] // (16 if whole else 32)
        # The padding of a tile is not empty: cuBLAS reads whole ones.
        assert scale.numel() == -(-shape[0] // 128) * 128 * -(-blocks // 4) * 4
        scale = of_elements(scale, shape, blocks) * (whole[0] if whole else 1)
        x[3, 40] = math.nan
        bad = of_elements(scales_of(take_apart(x, ROWS, how, uniform()), kind)[0], shape, blocks)
        assert torch.equal(bad.isnan(), quantize(x, ROWS, how, uniform()).isnan())
    assert torch.equal(decoded(codes_of(parts)) * scale, expected)


@on_cpus
@pytest.mark.parametrize(
    "case",
    [("tensor", "tensor", (64, 96, 32), False), ("tensor", "tensor e5m2", (33, 47, 5), True),
     ("tensor e5m2", "tensor e8m0", (3, 4096, 17), False), ("row", "row", (1, 16, 10), False),
     ("row", "row", (64, 96, 32), True)],
)  # fmt: skip
def test_a_cpu_equals_the_emulation_but_for_the_order(case: Any) -> None:
    """It shows an overflow, too."""
    left, right, (m, k, n), turned = case
    x, w = made(m, k), made(k, n, seed=1)
    if turned:  # Both lie in memory as the other one did.
        x, w = x.t().contiguous().t(), w.t().contiguous().t()
    for value in (1.0, math.inf):
        x[0, 5] = value
        y = multiply(take_apart(x, ROWS, KINDS[left]), take_apart(w, COLUMNS, KINDS[right]))
        operands = quantize(x, ROWS, KINDS[left]), quantize(w, COLUMNS, KINDS[right])
        assert (y.dtype, y.shape, y.is_contiguous()) == (torch.float32, (m, n), True)
        assert torch.equal(y.isnan(), (operands[0] @ operands[1]).isnan())
        assert apart(y, *operands) <= 1
    assert y[0].isnan().all()


def trained(compute: str, products: Any) -> dict[str, Any]:
    """y and all gradients of a layer in fp32, whose products alone are rounded."""
    torch.manual_seed(0)
    layer, x = nn.Linear(40, 20), made(24, 40).requires_grad_()
    precision = prepared(layer, products, mode="fp32", compute=compute)
    with precision.cast():
        y = layer(x)
        # Inside the block, where a product by a kernel could be taken for one by the lists.
        y.backward(made(24, 20, seed=9))
    return {"y": y.detach(), "x": x.grad, "w": layer.weight.grad, "b": layer.bias.grad}


@on_cpus
def test_a_cpu_emulates_unless_told_and_then_runs_every_product_of_a_layer(
    monkeypatch: Patch,
) -> None:
    for name in ("fp8_tensorwise", "fp8_rows"):  # Tried before: it is not watched.
        native.refusals(Recipe.named(name), CPU)
    watched = Mock(side_effect=F.scaled_mm)
    monkeypatch.setattr(F, "scaled_mm", watched)
    trained("auto", "fp8_rows")
    every = {"format": "e4m3fn", "per": "row", "hadamard": 16}  # Of which 40 is no multiple.
    trained("native", Recipe.from_mapping("mine", {"every": every, "dw": None}))
    assert not watched.called
    wanted = [native.is_wanted(own, CUDA) for own in ("auto", "native", "emulated")]
    assert [*wanted, native.is_wanted("auto", CPU)] == [True, True, False, False]
    for products in ("fp8_rows", "fp8_tensorwise"):
        watched.reset_mock()
        ours, emulated = trained("native", products), trained("emulated", products)
        # y = x w', dx = dy w and the transpose of dw = dy' x, of lengths that are padded to 16.
        shapes = [(*call.args[0].shape, call.args[1].shape[1]) for call in watched.mock_calls]
        assert sorted(shapes) == sorted([(32, 48, 32), (32, 32, 48), (48, 32, 32)])
        for name, own in ours.items():
            assert (own - emulated[name]).abs().max() <= NEAR * emulated[name].abs().max(), name
        assert torch.equal(ours["b"], emulated["b"])


@on_cpus
def test_the_map_says_what_is_native() -> None:
    """In an own loop, where `prepare` has refused nothing."""
    rows = {"every": {"format": "e4m3fn"}, "dx": {"w": {"per": "row"}}}
    for layer, products, compute, said in (
        (nn.Linear(32, 16), "fp8_rows", "native", "fp8_rows, native"),
        (nn.Linear(32, 16), "fp8_rows", "auto", "fp8_rows"),
        (nn.Conv1d(32, 16, 1), "fp8_rows", "native", "fp8_rows, emulated"),
        (nn.Linear(32, 32), "mxfp8", "native", f"mxfp8, emulated: {SWIZZLE}"),
        (nn.Linear(32, 16), Recipe.from_mapping("mine", rows), "native", "mine, native but for dx"),
    ):
        precision = Precision("mixed", products=products, compute=compute)
        assert dtype_map(precision, layer)[0].products == said


def test_a_refusal_says_which_instruction_there_is_not() -> None:
    for left, right, device, said in (
        (TENSOR, ROW, CUDA, f"{NONE}e4m3fn / {PER_TENSOR} by e4m3fn / {PER_ROW}"),
        (replace(TENSOR, scale="none"), TENSOR, CPU, f"{NONE}e4m3fn by e4m3fn / {PER_TENSOR}"),
        (MXFP4, MXFP4, CPU, f"{NONE}{MXFP4}"),
        (TENSOR, TENSOR, torch.device("meta"), "scaled_mm is not used on meta here"),
        (NVFP4, replace(NVFP4, across=16), CPU, SWIZZLE),
        (TENSOR, replace(TENSOR, format=E5M2), CPU, OF_CPU),
    ):
        assert refusal(left, right, device) == said


def test_a_refusal_by_an_older_torch_or_an_older_gpu(monkeypatch: Patch) -> None:
    """A torch that has the op for CUDA only. Its own text names 50 backends."""
    said = NotImplementedError(f"{OLDER}. 'aten::_scaled_mm_v2' is only available for [CUDA, Meta")
    monkeypatch.setattr(F, "scaled_mm", Mock(side_effect=said))
    monkeypatch.setattr(native, "_try", native._try.__wrapped__)
    assert refusal(ROW, ROW, CPU) == OLDER
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(native, "_try", lambda *_: "")
    needs = "it needs compute capability "
    for how, capability, said in (
        (ROW, (8, 6), f"{needs}8.9, and this is 8.6"),
        (ROW, (8, 9), ""),
        (NVFP4, (8, 9), f"{needs}10.0, and this is 8.9"),
        (NVFP4, (10, 0), ""),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", Mock(return_value=capability))
        assert refusal(how, how, CUDA) == said


@on_cpus
def test_a_refusal_of_wrong_numbers(monkeypatch: Patch) -> None:
    scaled_mm: Any = F.scaled_mm
    monkeypatch.setattr(F, "scaled_mm", lambda *a, **k: scaled_mm(*a, **k).flip(0))
    monkeypatch.setattr(native, "_try", native._try.__wrapped__)
    assert refusal(ROW, ROW, CPU) == "torch's scaled_mm gives wrong numbers for it"


@pytest.mark.parametrize(
    ("products", "pins"),
    [("mxfp8", {}), pytest.param("fp8_rows", {"head": "nvfp4"}, marks=on_cpus)],
)
def test_a_refusal_where_native_was_asked_for(products: str, pins: dict[str, str]) -> None:
    lists = replace(OpLists.named(), modules=pins)
    precision = Precision("mixed", products=products, compute="native", ops=lists)
    model = nn.Sequential(OrderedDict(head=nn.Linear(32, 32)))
    precision.prepare(model, torch.optim.SGD(model.parameters()))
    with precision.cast():
        said = refused(ConfigError, model, made(32, 32))
    assert said == (
        f"dtype.compute=native: dtype.products={pins.get('head', products)} has no native "
        f"forward product on cpu: {SWIZZLE}; choose dtype.compute=auto, which emulates it"
    )


def test_a_refusal_of_other_than_two_matrices() -> None:
    said = "fp8_rows has no native forward product on cpu: it is a convolution or a batch, and"
    precision = Precision("fp32", products="fp8_rows", compute="native")
    ops: list[tuple[Any, Tensor]] = [(F.conv1d, made(8, 8, 1)), (torch.bmm, made(2, 4, 8))]
    for op, right in ops:
        with precision.cast(), pytest.raises(ConfigError, match=f"{said} scaled_mm takes two "):
            op(made(2, 8, 4), right)


def test_operands_of_cuda_have_the_forms_that_kernels_demand() -> None:
    """As torch checks them without a GPU, without numbers."""
    shapes = cycle([(128, 128, 128), (48, 384, 80), (1, 128, 10), (160, 640, 3)])
    for how, (m, k, n) in zip(KINDS.values(), shapes, strict=False):
        how = replace(how, across=1)
        kind: Any = kind_of(how)
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
            operands = codes_of(left), codes_of(right).t(), scale, other
            padded = torch._scaled_mm(*operands, out_dtype=torch.float32)
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
