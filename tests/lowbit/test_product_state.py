"""The random numbers that products carry from step to step, and what noise products add."""

import copy
import io
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from low_bits import ROWS, prepared
from ranked import assert_same
from torch import Tensor, nn

from mpframe import Precision, Trainer
from mpframe.checkpoint import rng_state
from mpframe.checkpoint.state import Snapshot
from mpframe.core.comm import Comm
from mpframe.core.objective import supervised
from mpframe.lab import product_noise as lab
from mpframe.lab.autopsy.replay import Case, Setting, replay
from mpframe.lab.doctor import Subject, check_products
from mpframe.lab.product_noise import Noise, ProductProbe
from mpframe.precision.lowbit.formats import FORMATS
from mpframe.precision.lowbit.kernels import ProductState
from mpframe.precision.lowbit.recipe import Recipe
from mpframe.precision.lowbit.scaling import Quantization, count_noise, quantize
from mpframe.run.resume import _load

DY = {"dy": {"rounding": "stochastic", "format": "e2m1"}}
NOISY = Recipe.from_mapping("noisy", {"every": {"format": "e4m3fn"}, "dx": DY, "dw": DY})
E2M1, E4M3 = FORMATS["e2m1"], FORMATS["e4m3fn"]
MXFP8, UNSCALED = Quantization(E4M3, per="block", scale="e8m0"), Quantization(E4M3, scale="none")
HOWS = {
    "tensor": Quantization(E4M3), "row": Quantization(E4M3, per="row"), "mxfp8": MXFP8,
    "mxfp4, floor": replace(MXFP8, format=E2M1, rule="floor"), "no scale": UNSCALED,
    "nvfp4": Quantization(E2M1, per="block", block=16, across=16, scale="e4m3"),
}  # fmt: skip


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(16, 32, generator=generator) * 2.0**number
    return x, torch.randint(0, 8, (16,), generator=generator)


def trainer(*rest: nn.Module, after: Sequence[int] = ()) -> Trainer:
    """In its first state, or after these batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), *(rest or (nn.ReLU(), nn.Linear(32, 8))))
    precision = Precision("mixed", half="bfloat16", products=NOISY)
    model, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run = Trainer(model, optimizer, supervised(F.cross_entropy), precision)
    for number in after:
        run.train_step(batch(number))
    return run


def test_a_resumed_run_is_the_same_bit_for_bit() -> None:
    file = io.BytesIO()
    torch.save(trainer(after=range(4)).state_dict(), file)
    file.seek(0)
    other = trainer()
    torch.manual_seed(77)
    other.load_state_dict(torch.load(file, weights_only=True))
    for number in (4, 5, 6):
        other.train_step(batch(number))
    assert_same(other.weights(), trainer(after=range(7)).weights())


def test_a_rank_that_was_not_there_draws_numbers_of_its_own() -> None:
    """A checkpoint of fewer ranks, whose generator is rank 0's."""
    run, other = trainer(after=(0, 1)), trainer()
    snapshot = Snapshot(2, {"trainer": run.state_dict(), "rng": rng_state()})
    other.comm = Comm()
    other.comm.rank = 1
    _load(snapshot, other)
    assert other.precision.state_dict()["generators"] == {}
    other.comm.rank = 0
    _load(snapshot, other)
    assert_same(other.precision.state_dict(), run.precision.state_dict())


def test_what_looks_at_a_run_leaves_no_trace() -> None:
    """A trace; the autopsy and the doctor replay forward and backward passes."""
    run = trainer(after=(0, 1))
    before = copy.deepcopy(run.precision.state_dict())
    case = Case(run.model, run.precision, run.objectives, [batch(2)], {"": 1.0})
    assert replay(case, Setting()).finite
    subject = Subject(run, loader=cast(Any, None))
    subject.batch = batch(3)
    assert list(check_products(subject))
    assert_same(run.precision.state_dict(), before)
    precision = Precision("mixed", half="bfloat16", products=NOISY)
    precision.prepare(model := nn.Linear(32, 32), torch.optim.SGD(model.parameters()), batch(0)[0])
    assert precision.state_dict() == {"generators": {}}


def test_the_runs_seed_seeds_the_rounding() -> None:
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(ProductState().draw(torch.empty(8)))
    assert torch.equal(drawn[0], drawn[1])
    torch.manual_seed(1)
    assert not any(torch.equal(drawn[0], other) for other in (drawn[2], torch.rand(8)))


@pytest.mark.slow
def test_compiled_and_eager_agree() -> None:
    """Forward, gradients, and random numbers, over steps."""
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        layers = nn.Unflatten(1, (32, 1)), nn.Conv1d(32, 32, 1), nn.Flatten(), nn.Linear(32, 8)
        run = trainer(*layers)
        if compiled:
            run.model.compile(backend="aot_eager", fullgraph=True)
        for number in range(3):
            run.train_step(batch(number))
        results.append([run.weights(), run.precision.state_dict()])
    assert_same(*results)


def noise_of(values: Tensor, how: Quantization) -> Noise:
    return Noise.of(count_noise(values, quantize(values, ROWS, how), ROWS, how).tolist())


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_the_noise_is_that_of_a_recount(how: Quantization) -> None:
    """By hand, in float64."""
    torch.manual_seed(0)
    values = torch.randn(32, 64) * 2.0 ** torch.randint(-12, 4, (32, 64))
    values[3] = 0
    noise = noise_of(values, how)
    exact, rounded = values.double(), quantize(values, ROWS, how).double()
    decibels = 10 * math.log10(exact.square().sum() / (rounded - exact).square().sum())
    assert noise.values == 2048
    # The squares are rounded to float32 once, their sum is float64: 2^-23, in decibels 1e-6.
    assert noise.snr_db == pytest.approx(decibels, abs=2e-6)
    assert noise.lost == float(((rounded == 0) & (exact != 0)).sum()) / 2048
    assert 0 < noise.lost < 1


def test_saturated_values_the_spread_of_the_scales_in_octaves_and_exact_values() -> None:
    values = torch.tensor([[448.0, 449.0, -500.0, 1.0, *[0.0] * 28]])
    # floor: 449 has the exponent 8, as 256 = 4 * 64; above 6 * 64 = 384 all saturates.
    for name, count in (("no scale", 2), ("tensor", 0), ("mxfp4, floor", 3)):
        assert noise_of(values, HOWS[name]).saturated == count / 32
    values = torch.ones(4, 32) * torch.tensor([[1.0], [2.0**-5], [0.0], [2.0**3]])
    for name, octaves in (("mxfp8", 8), ("row", 8), ("tensor", 0), ("no scale", 0)):
        assert noise_of(values, HOWS[name]).scale_spread == octaves
    found = [noise_of(torch.full((2, 32), x), MXFP8).snr_db for x in (0.0, 1.0, math.inf)]
    assert str(found) == "[inf, inf, nan]"  # An overflow has no ratio.


def test_a_transform_is_part_of_the_signal() -> None:
    """The noise is counted where the rounding is: the transform alone is none."""
    torch.manual_seed(0)
    values = torch.randn(32, 64)
    plain, mixed = (noise_of(values, own) for own in (MXFP8, replace(MXFP8, hadamard=32)))
    assert mixed.snr_db == pytest.approx(plain.snr_db, abs=1)  # e4m3 of normal numbers in both


@pytest.mark.parametrize("recipe", ["tf32", "fp8_tensorwise", "mxfp4", "nvfp4"])
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
    layers = ["0"] if recipe in ("fp8_tensorwise", "nvfp4") else ["0", "2"]  # Heads are in half.
    assert set(noises) >= {(layer, operand) for layer in layers for operand in expected}
    assert {operand for _, operand in noises} <= set(lab.NAMES)
    assert {noise.values for noise in noises.values()} == {128**2}
    # tf32 holds every number of bfloat16; the least is that of 2 bits: 6 dB a bit, and some more.
    assert min(noise.snr_db for noise in noises.values()) > (100 if recipe == "tf32" else 12)
    step()
    assert probe.noises() == noises


def test_calls_of_a_step_are_added_in_one_row_and_without_a_weight_in_another() -> None:
    precision = prepared(model := nn.Linear(32, 32), "mxfp8")
    x = (torch.randn(64, 32) * torch.logspace(-6, 0, 64, 2.0)[:, None]).bfloat16()
    rows = []
    for parts in (1, 2):
        probe = ProductProbe(precision)
        with precision.cast():
            for part in x.chunk(parts):
                model(part) @ torch.ones(32, 32)
        rows.append(list(lab.rows_of(5, probe.noises())))
    layers = [(layer, f"forward.{o}") for layer in ("model", lab.WITHOUT_WEIGHT) for o in "xw"]
    for row, other, key in zip(*rows, layers, strict=True):
        assert ((row["layer"], row["operand"]), tuple(row)) == (key, lab.COLUMNS)
        again = 2 if key[1] == "forward.w" else 1  # The right operand is quantised in each call.
        assert other["values"] == again * row["values"]
        assert other["scale_spread"] == row["scale_spread"]
        assert other["snr_db"] == pytest.approx(row["snr_db"], rel=1e-12)
