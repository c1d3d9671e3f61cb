"""The start scale taken from one backward pass, and the exact powers of two behind it."""

import math

import pytest
import torch

from mpframe.core.loss_scaling import Backoff, LogMax
from mpframe.core.loss_scaling.scaler import exponent_of, largest_power_below, power_of_two
from mpframe.training.probe import safe_scale

ADAPTIVE = pytest.mark.parametrize("kind", [Backoff, LogMax])
WIDE = {"min_scale": 2.0**-60, "max_scale": 2.0**100}


def probed(kind, amax: float, **options) -> float:
    scaler = kind(init_scale="probe", **options)
    scaler.start_from(torch.tensor(amax, dtype=torch.float32))
    return scaler.scale.item()


@ADAPTIVE
@pytest.mark.parametrize("log2_amax", range(-40, 40, 7))
@pytest.mark.parametrize("mantissa", [1.0, 1.3, 1.999, 1.9995])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_it_is_the_largest_power_of_two_that_is_safe(kind, log2_amax, mantissa, half) -> None:
    amax = torch.tensor(mantissa * 2.0**log2_amax).item()
    limit = torch.finfo(half).max / 2
    scale = probed(kind, amax, half=half, **WIDE)
    assert scale * amax <= limit
    assert 2 * scale * amax > limit or scale == WIDE["max_scale"]
    assert math.frexp(scale)[0] == 0.5


@ADAPTIVE
def test_the_limit_itself_still_fits_and_the_next_number_does_not(kind) -> None:
    above = torch.nextafter(torch.tensor(32752.0), torch.tensor(math.inf)).item()
    assert probed(kind, 32752.0, **WIDE) == 1.0
    assert probed(kind, above, **WIDE) == 0.5


@ADAPTIVE
@pytest.mark.parametrize(
    ("amax", "scale"),
    [(2.0**-149, 2.0**24), (2.0**-30, 2.0**24), (2.0**20, 1.0), (3.4e38, 1.0), (1.0, 2.0**14)],
)
def test_it_is_clamped(kind, amax, scale) -> None:
    assert probed(kind, amax) == scale


@ADAPTIVE
@pytest.mark.parametrize("amax", [0.0, math.inf, math.nan])
@pytest.mark.parametrize(
    ("options", "default"),
    [({}, 2.0**16), ({"max_scale": 2.0**10}, 2.0**10), ({"min_scale": 2.0**20}, 2.0**20)],
)
def test_a_probe_that_says_nothing_leaves_the_default(kind, amax, options, default) -> None:
    assert kind(init_scale="probe", **options).scale == default
    assert probed(kind, amax, **options) == default


@ADAPTIVE
def test_only_a_scaler_told_to_waits_for_a_probe_and_only_until_it_starts(kind) -> None:
    assert not kind().wants_probe
    for start in (kind.start_from, kind.update):
        scaler = kind(init_scale="probe")
        assert scaler.wants_probe
        start(scaler, torch.tensor(1.0))
        assert not scaler.wants_probe


@ADAPTIVE
@pytest.mark.parametrize("waiting", [True, False])
def test_a_resumed_run_probes_only_if_it_had_not(kind, waiting) -> None:
    saved, loaded = kind(init_scale="probe"), kind(init_scale="probe" if not waiting else 1.0)
    if not waiting:
        saved.start_from(torch.tensor(1.0))
    loaded.load_state_dict(saved.state_dict())
    assert loaded.wants_probe is waiting


@ADAPTIVE
def test_a_probe_starts_anew(kind) -> None:
    used, fresh = kind(), kind()
    for amax in (1.0, 4.0, math.inf, 2.0):
        used.update(torch.tensor(amax))
    for scaler in (used, fresh):
        scaler.start_from(torch.tensor(0.25))
    for name, value in fresh.state_dict().items():
        assert used.state_dict()[name] == value


def test_powers_of_two_are_exact_over_all_of_float32() -> None:
    exponents = torch.arange(-126, 128)
    powers = power_of_two(exponents)
    assert powers.tolist() == [2.0**e for e in range(-126, 128)]
    assert torch.equal(exponent_of(powers), exponents.int())


def test_the_largest_power_is_exact_where_logarithms_round() -> None:
    just_above_one = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    assert largest_power_below(2.0**15, torch.tensor(1.0)) == 15
    assert largest_power_below(2.0**15, just_above_one) == 14


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("octaves", [0, 1, 3])
@pytest.mark.parametrize("amax", [2.0**-149, 1e-9, 0.3, 1.0, 65504.0, 3e38])
def test_a_safe_scale_leaves_the_octaves_free_and_no_more(
    half: torch.dtype, octaves: int, amax: float
) -> None:
    scale, limit = safe_scale(amax, half, octaves), torch.finfo(half).max / 2.0**octaves
    assert scale is not None
    assert math.frexp(scale)[0] == 0.5
    assert scale * amax <= limit < 2 * scale * amax


@pytest.mark.parametrize("amax", [0.0, math.inf, math.nan])
def test_what_tells_nothing_has_no_safe_scale(amax: float) -> None:
    assert safe_scale(amax, torch.float16) is None
