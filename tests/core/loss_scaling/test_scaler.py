"""What holds for every scaler, whatever the gradients, and which arguments it refuses."""

import math

import pytest
import torch
from fixtures import refused
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from vocabulary import differing

from mpframe.core.errors import CheckpointError, ConfigError
from mpframe.core.loss_scaling import Backoff, LogMax, NoScaling, Scaler, Static
from mpframe.core.loss_scaling.scaler import name_of
from mpframe.training.probe import auto

KINDS = (Static, Backoff, LogMax)
ODD_VALUES = torch.tensor(
    [0.0, math.inf, math.nan, torch.finfo(torch.float32).max, 2.0**-126, 2.0**-149, 1.0, 65504.0]
)


def gradients(seed, steps, streams=100):
    """Log-normal largest gradients that wander, with odd values among them."""
    chance = torch.Generator().manual_seed(seed)
    noise = torch.randn(steps, streams, generator=chance)
    amax = (noise.cumsum(0) + 8 * torch.randn(streams, generator=chance)).exp2()
    odd = ODD_VALUES[torch.randint(len(ODD_VALUES), amax.shape, generator=chance)]
    share = torch.rand(streams, generator=chance).square()  # some streams are odd all through
    return torch.where(torch.rand(amax.shape, generator=chance) < share, odd, amax)


exponents, decays = st.integers(-20, 30), st.floats(0, 0.9999)


@settings(max_examples=20, derandomize=True, deadline=None, database=None)
@example([0, 0, 8], True, 0.25, 0.0, 0.0, "float16", 900, 36)  # It restarts at an overflow.
@given(
    *(st.tuples(*[exponents] * 3).map(sorted), st.booleans(), st.floats(1e-9, 0.49)),
    *(decays, decays, st.sampled_from(["float16", "bfloat16"])),
    *(st.integers(0, 2**32 - 1), st.integers(1, 40)),
)
def test_logmax_stays_in_bounds_and_on_powers_of_two(
    octaves, probed, probability, mean_decay, variance_decay, half, seed, steps
) -> None:
    low, first, high = (2.0**octave for octave in octaves)
    first = "probe" if probed else first
    scaler = LogMax(first, probability, mean_decay, variance_decay, low, high, half)
    for amax in gradients(seed, steps):
        before = scaler.scale.expand(len(amax))
        scaler.update(amax)
        assert ((low <= scaler.scale) & (scaler.scale <= high)).all()
        assert (torch.frexp(scaler.scale).mantissa == 0.5).all()
        halved = scaler.scale <= (before / 2).clamp(min=low)
        assert (halved | (amax < math.inf)).all()
        assert scaler.log2_mean.isfinite().all()
        assert scaler.log2_std.isfinite().all()


@pytest.mark.parametrize("kind", [Backoff, LogMax])
def test_a_loaded_scaler_continues_bit_for_bit(kind) -> None:
    for stop in (1, 7, 20):
        first, second, rows = kind(), kind(), gradients(stop, 30)[:, 0]
        second.update(rows[-1])  # another state of the same shape, which the load must replace
        for amax in rows[:stop]:
            first.update(amax)
        second.load_state_dict(first.state_dict())
        for amax in rows[stop:]:
            first.update(amax)
            second.update(amax)
            assert differing(first.state_dict(), second.state_dict()) == []


def test_a_saved_state_and_a_kept_scale_stay_what_they_were() -> None:
    for scaler in (kind() for kind in KINDS):
        kept, first = scaler.scale, scaler.scale.item()
        scaler.state_dict()["scale"].fill_(3.0)
        for amax in (0.0, math.inf, math.nan):
            scaler.update(torch.tensor(amax))
        assert kept.item() == first
        assert (scaler.scale == first) == isinstance(scaler, Static)


class OnDevice(TorchDispatchMode):
    """Refuses every op that takes a number or a tensor to another device."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        assert (kwargs or {}).get("device") is None
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [Backoff, LogMax])
def test_everything_stays_on_a_device_whose_values_nobody_can_read(kind) -> None:
    with FakeTensorMode():
        scaler = kind(init_scale="probe").to("cuda")
        amax = torch.ones((), device="cuda")
        scaler.start_from(amax)
        with OnDevice():
            scaler.update(amax)
        tensors = [value for value in scaler.state_dict().values() if isinstance(value, Tensor)]
        assert len(tensors) >= 3
        assert {(tensor.device.type, tensor.shape) for tensor in tensors} == {("cuda", ())}
        assert scaler.scale.dtype == torch.float32


def test_the_users_default_dtype_does_not_matter(request) -> None:
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(torch.float64)
    for scaler in (kind() for kind in KINDS):
        scaler.update(torch.tensor(1.0, dtype=torch.float32))
        assert scaler.scale.dtype == torch.float32


DAMAGED = "loss_scaling: the saved state is damaged, {}: resume from another checkpoint"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"clean_steps": None}, DAMAGED.format("clean_steps is missing")),
        ({"scale": torch.ones(2)}, DAMAGED.format("scale is torch.float32 of shape (2,)")),
        ({"overflows": torch.ones(())}, DAMAGED.format("overflows is torch.float32 of shape ()")),
        ({"scale": torch.tensor(math.nan)}, DAMAGED.format("scale is not finite")),
        ({"scale": torch.tensor(0.0)}, DAMAGED.format("scale is not positive")),
        (LogMax().state_dict(), "loss_scaling=Backoff cannot continue the saved state of LogMax: "
         "use loss_scaling=LogMax, or start a new run from the saved weights"),
    ],
)  # fmt: skip
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(change, said) -> None:
    scaler, saved = Backoff(), Backoff(init_scale=8.0).state_dict()
    assert refused(CheckpointError, scaler.load_state_dict, {**saved, **change}) == said
    assert scaler.scale == 2.0**16


def test_it_is_called_by_its_kind_or_class() -> None:
    mine = type("Mine", (Backoff,), {})  # A user's, derived from one of ours.
    scalers = (Static(), Backoff(), LogMax(), NoScaling(), mine(), Scaler({}), object())
    names = "static Backoff LogMax none Mine Scaler object"
    assert [name_of(scaler) for scaler in scalers] == names.split()
    float16, bfloat16, fp32 = ("amp", "float16"), ("mixed", "bfloat16"), ("fp32", "float16")
    ways = (("mixed", "float16"), float16, bfloat16, fp32)
    assert [name_of(auto(*way)) for way in ways] == ["Backoff", "Backoff", "none", "none"]


REFUSED = {
    Static: {"scale": [math.nan, math.inf, True, "2", None, [2.0], 0, -1.0, 1e-46, 1e39, 10**400]},
    Backoff: {
        "min_scale": [math.nan, 0.0, 1e39],
        "max_scale": [math.inf, 0, "2"],
        "init_scale": [math.nan, None, 0.5, 2.0**25, "Probe"],
        "growth_factor": [math.inf, True, 1.0, -2.0, 1e39],
        "backoff_factor": [math.nan, "2", 0.0, 1.0, -0.5],
        "growth_interval": [math.nan, True, 0, -1, 2000.0, 2**31],
        "hysteresis": [None, 0, 1.0, 2**31],
        "half": [torch.float32, "float64", "fp16", None],
    },
    LogMax: {
        "min_scale": [math.inf, 0.0, 1.5],
        "max_scale": [None, -1.0, 65537.0],
        "init_scale": [math.nan, 0.5, 2.0**25, 1000.0, "Probe"],
        "overflow_probability": [math.nan, 0.0, 0.5, -0.001],
        "mean_decay": [True, 1.0, -0.1],
        "variance_decay": ["2", 1.0, -0.1],
        "half": [torch.int16, "float", None],
    },
}


def test_what_is_refused_and_the_way_out_stand_in_one_line() -> None:
    for kind, arguments in REFUSED.items():
        for argument, value in ((a, value) for a, values in arguments.items() for value in values):
            text = refused(ConfigError, kind, **{argument: value})
            assert text.startswith(f"loss_scaling.{argument}={value}: must be ")
            assert text.count("; ") == 1  # what is allowed; the way out


DEFAULT = "leave it out for the default"


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (Static, {"scale": 0}, f"a number >= 1.175494351e-38 and <= 3.402823466e+38; {DEFAULT}"),
        (Backoff, {"backoff_factor": 1.0}, f"a number > 0 and < 1; {DEFAULT}"),
        (Backoff, {"growth_interval": 0}, f"a whole number >= 1 and <= 2147483647; {DEFAULT}"),
        (Backoff, {"min_scale": 8.0, "max_scale": 4.0},
         "at most max_scale, which is 4; lower it, or raise max_scale"),
        (Backoff, {"init_scale": 65536.0, "max_scale": 2.0**10},
         "probe or a number >= 1 and <= 1024; set it, or move min_scale and max_scale"),
        (LogMax, {"mean_decay": 1.0}, f"a number >= 0 and < 1; {DEFAULT}"),
        (LogMax, {"max_scale": 100_000.0}, "a power of two; use 2**16 or 2**17"),
        (LogMax, {"half": torch.float32}, f"float16 or bfloat16; {DEFAULT}"),
    ],
)  # fmt: skip
def test_the_error_says_what_is_allowed_and_the_way_out(kind, options, said) -> None:
    name, value = next(iter(options.items()))
    assert refused(ConfigError, kind, **options) == f"loss_scaling.{name}={value}: must be {said}"


def test_the_ends_of_the_ranges_are_allowed() -> None:
    largest = torch.finfo(torch.float32).max
    for scaler in (
        Static(0.1),
        Backoff(min_scale=2.0**-126, max_scale=largest, half="float16"),
        Backoff(init_scale=3, min_scale=3, max_scale=3, growth_interval=1, hysteresis=9),
        Backoff(growth_factor=1.0001, backoff_factor=0.999),
        LogMax(min_scale=2.0**-126, max_scale=2.0**127, half="bfloat16"),
        LogMax(overflow_probability=1e-300, mean_decay=0, variance_decay=0.0),
        LogMax(init_scale=1, max_scale=1, overflow_probability=0.4999),
    ):
        assert scaler.scale > 0
