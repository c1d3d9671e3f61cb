"""What holds for every scaler, whatever the gradients: 20 drawn cases of 100 streams each."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from vocabulary import differing

from mpframe.core.errors import CheckpointError
from mpframe.core.loss_scaling import Backoff, LogMax, Scaler, Static, auto, none
from mpframe.core.loss_scaling.scaler import name_of

STREAMS = 100
KINDS = (Static, Backoff, LogMax)
FLOAT32 = torch.finfo(torch.float32)
ODD_VALUES = torch.tensor(
    [0.0, math.inf, math.nan, FLOAT32.max, FLOAT32.tiny, 2.0**-149, 1.0, 65504.0]
)


def gradients(seed, steps, streams=STREAMS):
    """Log-normal largest gradients that wander, with odd values among them."""
    chance = torch.Generator().manual_seed(seed)
    noise = torch.randn(steps, streams, generator=chance)
    amax = (noise.cumsum(0) + 8 * torch.randn(streams, generator=chance)).exp2()
    odd = ODD_VALUES[torch.randint(len(ODD_VALUES), amax.shape, generator=chance)]
    share = torch.rand(streams, generator=chance).square()  # some streams are odd all through
    return torch.where(torch.rand(amax.shape, generator=chance) < share, odd, amax)


@st.composite
def logmaxes(draw):
    exponents = st.integers(-20, 30)
    low, first, high = draw(st.tuples(exponents, exponents, exponents).map(sorted))
    return {
        "init_scale": draw(st.just("probe") | st.just(2.0**first)),
        "overflow_probability": draw(st.floats(1e-9, 0.49)),
        "mean_decay": draw(st.floats(0, 0.9999)),
        "variance_decay": draw(st.floats(0, 0.9999)),
        "min_scale": 2.0**low,
        "max_scale": 2.0**high,
        "half": draw(st.sampled_from([torch.float16, torch.bfloat16])),
    }


RESTART_AT_AN_OVERFLOW = {
    "init_scale": "probe", "min_scale": 1.0, "max_scale": 256.0, "half": torch.float16,
    "overflow_probability": 0.25, "mean_decay": 0.0, "variance_decay": 0.0,
}  # fmt: skip


@settings(max_examples=20, derandomize=True, deadline=None, database=None)
@example(RESTART_AT_AN_OVERFLOW, 900, 36)
@given(logmaxes(), st.integers(0, 2**32 - 1), st.integers(1, 40))
def test_logmax_stays_in_bounds_and_on_powers_of_two(own, seed, steps) -> None:
    scaler = LogMax(**own)
    low, high = own["min_scale"], own["max_scale"]
    for amax in gradients(seed, steps):
        before = scaler.scale.expand(STREAMS)
        scaler.update(amax)
        assert ((low <= scaler.scale) & (scaler.scale <= high)).all()
        assert (torch.frexp(scaler.scale).mantissa == 0.5).all()
        overflow = ~(amax < math.inf)
        halved = scaler.scale <= (before / 2).clamp(min=low)
        assert (halved | ~overflow).all()
        assert scaler.log2_mean.isfinite().all()
        assert scaler.log2_std.isfinite().all()


@pytest.mark.parametrize("kind", [Backoff, LogMax])
def test_a_loaded_scaler_continues_bit_for_bit(kind) -> None:
    for stop in (1, 7, 20):
        first, second, rows = kind(), kind(), gradients(stop, 30)
        second.update(rows[-1])  # another state of the same shape, which the load must replace
        for amax in rows[:stop]:
            first.update(amax)
        second.load_state_dict(first.state_dict())
        for amax in rows[stop:]:
            first.update(amax)
            second.update(amax)
            assert differing(first.state_dict(), second.state_dict()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_state_and_a_kept_scale_stay_what_they_were(kind) -> None:
    scaler = kind()
    state, kept = scaler.state_dict(), scaler.scale
    first = kept.item()
    state["scale"].fill_(3.0)
    for _ in range(3):
        scaler.update(torch.tensor(math.inf))
    assert kept.item() == first


class OnDevice(TorchDispatchMode):
    """Refuses every op that takes a value to the host or a tensor to another device."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(op), "a value was read on the host"
        assert (kwargs or {}).get("device") is None, "a tensor changed its device"
        return op(*args, **(kwargs or {}))


@pytest.mark.usefixtures("waited_for")
@pytest.mark.parametrize("kind", [Backoff, LogMax])
def test_update_never_waits_for_the_device(kind) -> None:
    for amax in map(torch.tensor, (0.5, 0.0, math.nan)):
        scaler = kind()
        with OnDevice():
            scaler.update(amax)
            assert scaler.scale.shape == ()


@pytest.mark.parametrize("kind", [Backoff, LogMax])
def test_everything_stays_on_a_device_whose_values_nobody_can_read(kind) -> None:
    with FakeTensorMode():
        scaler = kind(init_scale="probe").to("cuda")
        amax = torch.ones((), device="cuda")
        scaler.start_from(amax)
        scaler.update(amax)
        tensors = [value for value in scaler.state_dict().values() if isinstance(value, Tensor)]
        assert len(tensors) >= 3
        assert {tensor.device.type for tensor in tensors} == {"cuda"}
        assert scaler.scale.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_the_users_default_dtype_does_not_matter(kind) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        scaler = kind()
        scaler.update(torch.tensor(1.0, dtype=torch.float32))
    finally:
        torch.set_default_dtype(torch.float32)
    assert scaler.scale.dtype == torch.float32


@pytest.mark.parametrize(("kind", "other"), [(Static, LogMax), (LogMax, Backoff)])
def test_the_state_of_another_kind_is_refused(kind, other) -> None:
    expected = (
        f"loss_scaling={kind.kind} cannot continue the saved state of {other.kind}: "
        f"use loss_scaling={other.kind}, or start a new run from the saved weights"
    )
    with pytest.raises(CheckpointError) as caught:
        kind().load_state_dict(other().state_dict())
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("clean_steps", None, "is missing"),
        ("scale", torch.ones(2), "is torch.float32 of shape (2,)"),
        ("overflows", torch.tensor(1.0), "is torch.float32 of shape ()"),
        ("scale", torch.tensor(math.nan), "is not finite"),
        ("scale", torch.tensor(0.0), "is not positive"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(name, value, said) -> None:
    scaler, saved = Backoff(), Backoff(init_scale=8.0).state_dict()
    with pytest.raises(CheckpointError) as caught:
        scaler.load_state_dict({**saved, name: value})
    assert str(caught.value) == (
        f"loss_scaling: the saved state is damaged, {name} {said}: resume from another checkpoint"
    )
    assert scaler.scale == 2.0**16


def test_nothing_moves_a_static_scale() -> None:
    scaler = Static(1000.0)
    for amax in (0.0, math.inf, math.nan):
        scaler.update(torch.tensor(amax))
    assert (scaler.scale, scaler.wants_probe) == (1000.0, False)


class Mine(Backoff):
    """A user's, derived from one of ours."""


class Other:
    """A user's, derived from nothing of ours."""


def test_it_is_called_by_its_kind_or_class() -> None:
    scalers = (Static(), Backoff(), LogMax(), none(), Mine(), Scaler({}), Other())
    names = "static Backoff LogMax none Mine Scaler Other"
    assert [name_of(scaler) for scaler in scalers] == names.split()
    ways = (
        ("mixed", "float16"),
        ("amp", torch.float16),
        ("mixed", "bfloat16"),
        ("fp32", "float16"),
    )
    assert [name_of(auto(*way)) for way in ways] == ["Backoff", "Backoff", "none", "none"]
