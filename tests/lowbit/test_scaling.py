"""Scaled formats, beside torchao and a slow reference in NumPy."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from mpframe.lowbit import scaling
from mpframe.lowbit.formats import FORMATS, Draw, matrix
from mpframe.lowbit.scaling import (
    RULES,
    Axes,
    Quantization,
    apply_hadamard,
    find_scales,
    quantize,
)

ROWS = Axes(contracted=(1,), free=0)
COLUMNS = Axes(contracted=(0,), free=1)
NAN = math.nan


def scales(x: torch.Tensor, axes: Axes, how: Quantization) -> torch.Tensor:
    """One for each block, row or tensor."""
    return find_scales(x, axes, how).scale.squeeze()


def values(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers over 20 octaves, with a row and a column of zeros."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(shape, generator=generator)
    made *= torch.exp2(20 * torch.rand(shape, generator=generator) - 12)
    made[0], made[:, 0] = 0.0, 0.0
    return made


def mx(name: str, rule: str = "rceil", block: int = 32) -> Quantization:
    return Quantization(FORMATS[name], per="block", block=block, scale="e8m0", rule=rule)


NVFP4 = Quantization(FORMATS["e2m1"], per="block", block=16, scale="e4m3")


def nearest(x: np.ndarray, name: str) -> np.ndarray:
    """By search among all numbers of the format, each found from its definition."""
    f = FORMATS[name]
    m = f.mantissa_bits
    codes = [
        (k / 2**m if e == 0 else 1 + k / 2**m) * 2.0 ** (max(e, 1) - 1 + f.min_exponent)
        for e, k in product(range(2**f.exponent_bits), range(2**m))
    ]
    positive = np.array([code for code in codes if code <= f.max])
    held = np.minimum(np.abs(x), f.max)
    above = np.searchsorted(positive, held).clip(1, len(positive) - 1)
    low, high = positive[above - 1], positive[above]
    # The code of an even number is even, and codes alternate.
    tie_up = above % 2 == 0
    up = (held - low > high - held) | ((held - low == high - held) & tie_up)
    return np.copysign(np.where(up, high, low), x)


def slow_mx(x: Tensor, name: str, rule: str) -> Tensor:
    """Row by row, block by block, in float64 and by the words of the rules."""
    f = FORMATS[name]
    out = np.zeros(x.shape)
    for row, start in product(range(x.shape[0]), range(0, x.shape[1], 32)):
        block = x[row, start : start + 32].double().numpy()
        amax = np.abs(block).max()
        if amax == 0:
            continue
        exact = {
            "floor": math.floor(math.log2(amax)) - f.max_exponent,
            "ceil": math.ceil(math.log2(amax)) - f.max_exponent,
            "rceil": math.ceil(math.log2(amax / f.max)),
            "even": math.floor(
                math.log2(amax + 2.0 ** (math.floor(math.log2(amax)) - f.mantissa_bits - 1))
            )
            - f.max_exponent,
        }
        scale = 2.0 ** exact[rule]
        out[row, start : start + 32] = nearest(block / scale, name) * scale
    return torch.from_numpy(out).float()


# Each format, and each rule, of which e8m0 scales of blocks have four.
RULED = [("e4m3fn", "floor"), ("e5m2", "ceil"), ("e2m3", "rceil"), ("e3m2", "even"),
         ("e2m1", "floor"), ("e2m1", "ceil"), ("e2m1", "rceil"), ("e2m1", "even")]  # fmt: skip


@pytest.mark.parametrize(("name", "rule"), RULED)
def test_mx_equals_the_slow_reference_along_both_axes(name: str, rule: str) -> None:
    x = values(8, 64)
    assert torch.equal(quantize(x, ROWS, mx(name, rule)), slow_mx(x, name, rule))
    assert torch.equal(quantize(x.t(), COLUMNS, mx(name, rule)), slow_mx(x, name, rule).t())


def test_mx_and_nvfp4_equal_torchao() -> None:
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    theirs = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    theirs["e2m1"] = torch.float4_e2m1fn_x2
    x = values(64, 128, seed=1)
    x[5, 40] = NAN
    for name, rule in RULED:
        element = theirs.get(name, f"fp6_{name}")
        mode = mx_tensor.ScaleCalculationMode[rule.upper()]
        scale, data = mx_tensor.to_mx(x, element, 32, mode)
        expected = mx_tensor.to_dtype(data, scale, element, 32, torch.float32)
        ours = quantize(x, ROWS, mx(name, rule))
        assert torch.equal(ours.isnan(), expected.isnan())
        assert torch.equal(ours.nan_to_num(0.0), expected.nan_to_num(0.0))
    x = values(32, 64, seed=2)
    whole = nvfp4.per_tensor_amax_to_scale(x.abs().max())
    scale, packed = nvfp4.nvfp4_quantize(x, 16, whole)
    elements = nvfp4.f4_unpacked_to_f32(nvfp4.unpack_uint4(packed)).view(32, 4, 16)
    expected = (elements * (scale.float() * whole).unsqueeze(-1)).view(32, 64)
    assert torch.equal(quantize(x, ROWS, NVFP4), expected)


def test_nvfp4_by_its_words() -> None:
    x = values(8, 32)
    g = x.abs().max() / np.float32(448 * 6)
    for row, start in product(range(8), (0, 16)):
        block = x[row, start : start + 16]
        wanted = (block.abs().max() / 6 / g).clamp(2.0**-6, 448)
        b = torch.from_numpy(nearest(wanted[None].numpy(), "e4m3fn")).float()
        expected = torch.from_numpy(nearest((block * ((1 / g) / b)).numpy(), "e2m1")).float() * (
            b * g
        )
        assert torch.equal(quantize(x, ROWS, NVFP4)[row, start : start + 16], expected)


def test_squares_are_the_same_for_a_weight_and_its_transpose() -> None:
    square = Quantization(FORMATS["e2m1"], per="block", block=16, across=16, scale="e4m3")
    x = values(32, 48)
    assert torch.equal(quantize(x, ROWS, square), quantize(x, COLUMNS, square))
    assert not torch.equal(quantize(x, ROWS, NVFP4), quantize(x, COLUMNS, NVFP4))
    assert scales(x, ROWS, square).shape == (2, 3)
    assert scales(x, COLUMNS, NVFP4).shape == (2, 48)


FP32 = Quantization(FORMATS["e4m3fn"])


class TestFp32Scales:
    def test_of_the_tensor(self) -> None:
        x = values(4, 8)
        scale = scales(x, ROWS, FP32)
        assert scale == x.abs().max() * (1 / 448)
        expected = torch.from_numpy(nearest((x * (1 / scale)).numpy(), "e4m3fn")).float() * scale
        assert torch.equal(quantize(x, ROWS, FP32), expected)

    def test_of_rows_columns_and_rectangles(self) -> None:
        x, row = values(4, 8), replace(FP32, per="row")
        block = replace(FP32, per="block", block=4, across=2)
        for axes, how, amax in (
            (ROWS, row, x.abs().amax(1)),
            (COLUMNS, row, x.abs().amax(0)),
            (ROWS, block, x.view(2, 2, 2, 4).abs().amax((1, 3))),
        ):
            assert torch.equal(scales(x, axes, how), (amax * (1 / 448)).clamp(min=2**-126))

    def test_of_a_known_amax_with_a_margin_in_octaves(self) -> None:
        """What lies beyond is saturated."""
        x, known = torch.tensor([[1.0, 2.0, 7.0, -100.0]]), torch.tensor(7.0)
        for margin, largest in ((0, 7.0), (1, 14.0)):
            how = replace(FP32, history=4, margin=margin)
            kept = quantize(x, ROWS, how, known_amax=known)
            assert torch.equal(kept, torch.tensor([[1.0, 2.0, 7.0, -largest]]))


EVERY = [
    Quantization(FORMATS["e4m3fn"]),
    Quantization(FORMATS["e5m2"], per="row"),
    Quantization(FORMATS["e4m3fn"], per="block", block=16),
    *(mx("e2m1", rule, block=16) for rule in RULES),
    NVFP4,
    Quantization(FORMATS["tf32"], scale="none"),
]


@pytest.mark.parametrize("how", EVERY, ids=lambda how: f"{how.per} {how.scale} {how.rule}")
class TestAll:
    def test_what_is_not_finite_stays_visible(self, how: Quantization) -> None:
        for bad, known in product((math.inf, -math.inf, NAN), (None, torch.tensor(1.0))):
            x = values(4, 32)
            x[2, 3] = bad
            assert not quantize(x, ROWS, how, known_amax=known)[2, 3].isfinite()

    def test_zeros_and_the_ends_of_fp32(self, how: Quantization) -> None:
        assert torch.equal(quantize(torch.zeros(4, 32), ROWS, how), torch.zeros(4, 32))
        for exponent in (-149, -130, 126):
            x = values(4, 32) * 2.0**-40
            x[2, 3] = 2.0**exponent
            assert quantize(x, ROWS, how).isfinite().all()

    def test_what_is_held_is_held(self, how: Quantization) -> None:
        """A power of two as scale: what it holds it holds again. Others move with the scale."""
        x = quantize(values(4, 32), ROWS, how)
        if how.scale in ("e8m0", "none"):
            assert torch.equal(quantize(x, ROWS, how), x)

    def test_whole_blocks_only(self, how: Quantization) -> None:
        wrong = "20 is no multiple of 16" if how.per == "block" else ""
        assert ROWS.misfit(torch.Size([3, 20]), how) == wrong
        assert ROWS.misfit(torch.Size([20, 32]), how) == ""


class TestHadamard:
    @pytest.mark.parametrize("size", [2, 32])
    def test_is_orthogonal_and_has_signs(self, size: int) -> None:
        own = matrix(size, torch.device("cpu"))
        # Sums of `size` products of 1 / size, each with an fp32 error of 2^-24 relative.
        assert torch.allclose(own @ own.T, torch.eye(size), rtol=0, atol=size * 2**-24)
        assert 0 < int((own[:, 0] < 0).sum()) < size

    def test_cancels_in_a_product(self) -> None:
        """Exactly so for size 16, whose entries are 1/4, and small whole numbers."""
        generator = torch.Generator().manual_seed(0)
        a = torch.randint(-8, 9, (5, 32), generator=generator).float()
        b = torch.randint(-8, 9, (32, 3), generator=generator).float()
        how = Quantization(FORMATS["tf32"], scale="none", hadamard=16)
        assert torch.equal(apply_hadamard(a, ROWS, how) @ apply_hadamard(b, COLUMNS, how), a @ b)
        assert not torch.equal(apply_hadamard(a, ROWS, how), a)

    def test_spreads_an_outlier(self) -> None:
        how = Quantization(FORMATS["e2m1"], per="block", block=16, scale="e4m3", hadamard=16)
        x = torch.zeros(1, 16)
        x[0, 3] = 100.0
        assert torch.equal(quantize(x, ROWS, how).abs(), torch.full((1, 16), 25.0))
        assert ROWS.misfit(torch.Size([1, 8]), how) == "8 is no multiple of 16"


HOWS = {
    "rows": Quantization(FORMATS["e4m3fn"], per="row"),
    "blocks that saturate": mx("e4m3fn", "floor"),
    "rectangles": replace(mx("e4m3fn"), across=48),
    "squares": replace(NVFP4, across=16),
    "short blocks": NVFP4,
    "blocks of 12": mx("e2m1", block=12),
    "Hadamard": replace(NVFP4, hadamard=16),
    "no scale": Quantization(FORMATS["tf32"], scale="none"),
}


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
class TestHowItIsComputed:
    """In which order memory is gone through, and in how many pieces, changes no number."""

    def test_any_layout_gives_the_same_numbers(self, how: Quantization) -> None:
        x = values(96, 96, 2, 3)
        axes = Axes((1, 2, 3), 0)
        expected = quantize(x, axes, how)
        last = x.contiguous(memory_format=torch.channels_last)
        turned = x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
        for other in (last, turned):
            assert other.stride() != x.stride()
            assert torch.equal(quantize(other, axes, how), expected)

    def test_any_number_of_pieces_gives_the_same_numbers(
        self, how: Quantization, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        x = values(96, 192)
        for rounding, axes in product(("nearest", "stochastic"), (ROWS, COLUMNS)):
            own = replace(how, rounding=rounding)
            whole = quantize(x, axes, own, uniform())
            with monkeypatch.context() as patched:
                patched.setattr(scaling, "_PIECE", 1000)
                assert torch.equal(quantize(x, axes, own, uniform()), whole)


def uniform() -> Draw:
    """The same random numbers from the start."""
    generator = torch.Generator().manual_seed(1)
    return lambda like: torch.rand(like.shape, generator=generator)


@pytest.mark.parametrize("size", [1, 10, 16, 17])
def test_the_largest_of_short_rows(size: int) -> None:
    x = values(4, 3, size)
    expected = x.abs().amax(2, keepdim=True)
    assert torch.equal(scaling._amax(x, (2,)), expected)
    x[1, 1, size // 2] = NAN
    assert scaling._amax(x, (2,)).isnan().sum() == 1
