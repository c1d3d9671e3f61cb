"""What quantisation takes from an operand: counted, and counted again by hand in float64."""

import csv
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mpframe import Precision
from mpframe.lab.product_noise import (
    COLUMNS,
    NAMES,
    WITHOUT_WEIGHT,
    Noise,
    ProductProbe,
    merge,
    rows_of,
)
from mpframe.lowbit.formats import FORMATS
from mpframe.lowbit.recipe import Recipe
from mpframe.lowbit.scaling import Axes, Quantization, count_noise, quantize
from mpframe.tracking.metrics_csv import MetricsCsv

ROWS = Axes((1,), 0)
E2M1, E4M3 = FORMATS["e2m1"], FORMATS["e4m3fn"]
HOWS = {
    "tensor": Quantization(E4M3),
    "row": Quantization(E4M3, per="row"),
    "mxfp8": Quantization(E4M3, per="block", scale="e8m0"),
    "mxfp4, floor": Quantization(E2M1, per="block", scale="e8m0", rule="floor"),
    "nvfp4": Quantization(E2M1, per="block", block=16, across=16, scale="e4m3"),
    "no scale": Quantization(E4M3, scale="none"),
}


def of(values: Tensor, how: Quantization, known: Tensor | None = None) -> tuple[Noise, Tensor]:
    quantized = quantize(values, ROWS, how, known_amax=known)
    return Noise.of(count_noise(values, quantized, ROWS, how, known).tolist()), quantized


@pytest.mark.parametrize("name", HOWS)
def test_the_noise_is_that_of_a_recount(name: str) -> None:
    torch.manual_seed(0)
    values = torch.randn(32, 64) * 2.0 ** torch.randint(-12, 4, (32, 64))
    values[3] = 0
    noise, quantized = of(values, HOWS[name])
    exact, rounded = values.double(), quantized.double()
    decibels = 10 * math.log10(exact.square().sum() / (rounded - exact).square().sum())
    assert noise.values == 2048
    # The squares are rounded to float32 once, their sum is float64: 2^-23, in decibels 1e-6.
    assert noise.snr_db == pytest.approx(decibels, abs=2e-6)
    assert noise.lost == float(((rounded == 0) & (exact != 0)).sum()) / 2048
    assert 0 < noise.lost < 1


def test_saturated_values_are_counted() -> None:
    values = torch.tensor([[448.0, 449.0, -500.0, 1.0]])
    assert of(values, HOWS["no scale"])[0].saturated == 0.5
    # The amax of steps before was half of today's: all above it saturate.
    assert of(values, HOWS["tensor"], torch.tensor(250.0))[0].saturated == 0.75
    assert of(values, HOWS["tensor"])[0].saturated == 0
    # floor: 449 has the exponent 8, as 256 = 4 * 64; above 6 * 64 = 384 all saturates.
    block = torch.zeros(1, 32)
    block[0, :4] = values
    assert of(block, HOWS["mxfp4, floor"])[0].saturated == 3 / 32


def test_the_spread_of_the_scales_is_in_octaves() -> None:
    values = torch.ones(4, 32) * torch.tensor([[1.0], [2.0**-5], [0.0], [2.0**3]])
    assert of(values, HOWS["mxfp8"])[0].scale_spread == 8
    assert of(values, HOWS["row"])[0].scale_spread == 8
    assert of(values, HOWS["tensor"])[0].scale_spread == 0
    assert of(values, HOWS["no scale"])[0].scale_spread == 0


def test_exact_values_have_no_noise_and_an_overflow_no_ratio() -> None:
    assert of(torch.ones(2, 32), HOWS["mxfp8"])[0].snr_db == math.inf
    assert of(torch.zeros(2, 32), HOWS["mxfp8"])[0].snr_db == math.inf
    assert math.isnan(of(torch.full((2, 32), math.inf), HOWS["mxfp8"])[0].snr_db)


def test_a_transform_is_part_of_the_signal() -> None:
    """The noise is counted where the rounding is: the transform alone is none."""
    torch.manual_seed(0)
    values = torch.randn(32, 64)
    plain = of(values, HOWS["mxfp8"])[0].snr_db
    mixed = of(values, Quantization(E4M3, per="block", scale="e8m0", hadamard=32))[0].snr_db
    assert mixed == pytest.approx(plain, abs=1)  # decibel: e4m3 of normal numbers in both


def test_rows_of_two_parts_are_that_of_the_whole() -> None:
    torch.manual_seed(0)
    values, how = torch.randn(8, 64), HOWS["mxfp8"]
    rows = [
        count_noise(part, quantize(part, ROWS, how), ROWS, how)
        for part in (values, values[:3], values[3:])
    ]
    torch.testing.assert_close(merge(*rows[1:]), rows[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("recipe", ["tf32", "fp8_delayed", "mxfp4", "nvfp4"])
def test_every_operand_of_a_layer_is_counted(recipe: str) -> None:
    """Once for each product that is quantised, and nothing after the step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
    precision = Precision("mixed", half="bfloat16", products=recipe)
    precision.prepare(model, torch.optim.SGD(model.parameters()))

    def step() -> None:
        with precision.cast():
            model(torch.randn(128, 128, requires_grad=True)).float().square().sum().backward()

    probe = ProductProbe(precision)
    step()
    noises = probe.noises()
    products = Recipe.named(recipe).products
    expected = {f"{product}.{operand}" for product in products for operand in products[product]}
    layers = ["0", "2"] if recipe not in HEADS_IN_HALF else ["0"]
    assert set(noises) >= {(layer, operand) for layer in layers for operand in expected}
    assert {operand for _, operand in noises} <= set(NAMES)
    assert {noise.values for noise in noises.values()} == {128**2}
    # tf32 holds every number of bfloat16; the least is that of 2 bits: 6 dB a bit, and some more.
    assert min(noise.snr_db for noise in noises.values()) > (100 if recipe == "tf32" else 12)
    step()
    assert probe.noises() == noises


HEADS_IN_HALF = ("fp8_tensorwise", "fp8_delayed", "nvfp4")


def test_a_product_without_a_weight_has_a_row_of_its_own() -> None:
    precision = Precision("mixed", half="bfloat16", products="mxfp8")
    model = nn.Linear(32, 32)
    precision.prepare(model, torch.optim.SGD(model.parameters()))
    probe = ProductProbe(precision)
    with precision.cast():
        model(torch.randn(32, 32)) @ torch.randn(32, 32)
    assert set(probe.noises()) == {
        (layer, f"forward.{operand}") for layer in ("model", WITHOUT_WEIGHT) for operand in "xw"
    }


def test_the_record_drops_what_a_resumed_run_repeats(tmp_path: Path) -> None:
    path, noise = tmp_path / "products.csv", Noise(10, 31.5, 0.1, 0.2, 3.0)
    noises = {("head", "dw.x"): noise, ("a,b", "dx.w"): noise}
    record = MetricsCsv(tmp_path, COLUMNS, name=path.name)
    for step in (5, 10, 15):
        record.add(*rows_of(step, noises))
    whole = path.read_text()
    path.write_text(whole + "20,head,dw")
    MetricsCsv(tmp_path, COLUMNS, before=11, name=path.name).add(*rows_of(15, noises))
    assert path.read_text() == whole
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["5", "5", "10", "10", "15", "15"]
    assert rows[1] == {
        "step": "5", "layer": "a,b", "operand": "dx.w", "values": "10", "snr_db": "31.5",
        "saturated": "0.1", "lost": "0.2", "scale_spread": "3",
    }  # fmt: skip
