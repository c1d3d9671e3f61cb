"""What quantisation takes from an operand: counted, and counted again by hand in float64."""

import math
from dataclasses import replace

import pytest
import torch
from low_bits import ROWS, prepared
from torch import Tensor, nn

from mpframe.lab import product_noise as lab
from mpframe.lab.product_noise import Noise, ProductProbe, merge, rows_of
from mpframe.lowbit.formats import FORMATS
from mpframe.lowbit.recipe import Recipe
from mpframe.lowbit.scaling import Quantization, count_noise, quantize

E2M1, E4M3 = FORMATS["e2m1"], FORMATS["e4m3fn"]
MXFP8 = Quantization(E4M3, per="block", scale="e8m0")
HOWS = {
    "tensor": Quantization(E4M3), "row": Quantization(E4M3, per="row"), "mxfp8": MXFP8,
    "mxfp4, floor": replace(MXFP8, format=E2M1, rule="floor"),
    "nvfp4": Quantization(E2M1, per="block", block=16, across=16, scale="e4m3"),
    "no scale": Quantization(E4M3, scale="none"),
}  # fmt: skip


def noise_of(values: Tensor, how: Quantization | str, known: Tensor | None = None) -> Noise:
    how = HOWS[how] if isinstance(how, str) else how
    quantized = quantize(values, ROWS, how, known_amax=known)
    return Noise.of(count_noise(values, quantized, ROWS, how, known).tolist())


@pytest.mark.parametrize("name", HOWS)
def test_the_noise_is_that_of_a_recount(name: str) -> None:
    torch.manual_seed(0)
    values = torch.randn(32, 64) * 2.0 ** torch.randint(-12, 4, (32, 64))
    values[3] = 0
    noise = noise_of(values, name)
    exact, rounded = values.double(), quantize(values, ROWS, HOWS[name]).double()
    decibels = 10 * math.log10(exact.square().sum() / (rounded - exact).square().sum())
    assert noise.values == 2048
    # The squares are rounded to float32 once, their sum is float64: 2^-23, in decibels 1e-6.
    assert noise.snr_db == pytest.approx(decibels, abs=2e-6)
    assert noise.lost == float(((rounded == 0) & (exact != 0)).sum()) / 2048
    assert 0 < noise.lost < 1


def test_saturated_values_are_counted() -> None:
    values = torch.tensor([[448.0, 449.0, -500.0, 1.0]])
    assert noise_of(values, "no scale").saturated == 0.5
    # The amax of steps before was half of today's: all above it saturate.
    assert noise_of(values, "tensor", torch.tensor(250.0)).saturated == 0.75
    assert noise_of(values, "tensor").saturated == 0
    # floor: 449 has the exponent 8, as 256 = 4 * 64; above 6 * 64 = 384 all saturates.
    block = torch.cat([values, torch.zeros(1, 28)], 1)
    assert noise_of(block, "mxfp4, floor").saturated == 3 / 32


def test_the_spread_of_the_scales_is_in_octaves() -> None:
    values = torch.ones(4, 32) * torch.tensor([[1.0], [2.0**-5], [0.0], [2.0**3]])
    spreads = {name: noise_of(values, name).scale_spread for name in HOWS if "fp4" not in name}
    assert spreads == {"mxfp8": 8, "row": 8, "tensor": 0, "no scale": 0}


def test_exact_values_have_no_noise_and_an_overflow_no_ratio() -> None:
    for value in (0.0, 1.0):
        assert noise_of(torch.full((2, 32), value), MXFP8).snr_db == math.inf
    assert math.isnan(noise_of(torch.full((2, 32), math.inf), MXFP8).snr_db)


def test_a_transform_is_part_of_the_signal_and_rows_of_two_parts_are_that_of_the_whole() -> None:
    """The noise is counted where the rounding is: the transform alone is none."""
    torch.manual_seed(0)
    values = torch.randn(32, 64)
    plain, mixed = (noise_of(values, own) for own in (MXFP8, replace(MXFP8, hadamard=32)))
    assert mixed.snr_db == pytest.approx(plain.snr_db, abs=1)  # e4m3 of normal numbers in both
    whole, *parts = (
        count_noise(part, quantize(part, ROWS, MXFP8), ROWS, MXFP8)
        for part in (values, values[:3], values[3:])
    )
    torch.testing.assert_close(merge(*parts), whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize("recipe", ["tf32", "fp8_delayed", "mxfp4", "nvfp4"])
def test_every_operand_of_a_layer_is_counted(recipe: str) -> None:
    """Once for each product that is quantised, and nothing after the step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
    precision = prepared(model, recipe)

    def step() -> None:
        with precision.cast():
            model(torch.randn(128, 128, requires_grad=True)).float().square().sum().backward()

    probe = ProductProbe(precision)
    step()
    noises = probe.noises()
    products = Recipe.named(recipe).products
    expected = {f"{product}.{operand}" for product in products for operand in products[product]}
    layers = ["0"] if recipe in ("fp8_delayed", "nvfp4") else ["0", "2"]  # Heads are in half.
    assert set(noises) >= {(layer, operand) for layer in layers for operand in expected}
    assert {operand for _, operand in noises} <= set(lab.NAMES)
    assert {noise.values for noise in noises.values()} == {128**2}
    # tf32 holds every number of bfloat16; the least is that of 2 bits: 6 dB a bit, and some more.
    assert min(noise.snr_db for noise in noises.values()) > (100 if recipe == "tf32" else 12)
    step()
    assert probe.noises() == noises


def test_a_product_without_a_weight_has_a_row_of_its_own() -> None:
    precision = prepared(model := nn.Linear(32, 32), "mxfp8")
    probe = ProductProbe(precision)
    with precision.cast():
        model(torch.randn(32, 32)) @ torch.randn(32, 32)
    operands = {(layer, f"forward.{o}") for layer in ("model", lab.WITHOUT_WEIGHT) for o in "xw"}
    assert set(probe.noises()) == operands


def test_a_report_has_a_row_for_each_operand() -> None:
    noise = Noise(10, 31.5, 0.1, 0.2, 3.0)
    head, other = rows_of(5, {("head", "dw.x"): noise, ("a,b", "dx.w"): noise})
    assert head["layer"] == "head"
    assert [other[name] for name in lab.COLUMNS] == [5, "a,b", "dx.w", 10, 31.5, 0.1, 0.2, 3]
