"""Backoff, what holds for every scaler, a user's too, and which arguments are refused."""

import math
import random

import pytest
import torch
from fixtures import refused
from in_process import assert_same_run, composed, cut, scalars, train
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from vocabulary import differing

from mpframe.config.command_line import check_config
from mpframe.core.errors import CheckpointError, ConfigError
from mpframe.core.loss_scaling import Backoff, LogMax, NoScaling, Scaler, Static
from mpframe.core.loss_scaling.scaler import name_of
from mpframe.run.parts import build_scaler
from mpframe.training.probe import auto

LARGEST = torch.finfo(torch.float32).max
KINDS = (Static, Backoff, LogMax)
ODD_VALUES = torch.tensor([0.0, math.inf, math.nan, LARGEST, 2.0**-126, 2.0**-149, 1.0, 65504.0])


def gradients(seed, steps, streams=100):
    """Log-normal largest gradients that wander, with odd values among them."""
    chance = torch.Generator().manual_seed(seed)
    noise = torch.randn(steps, streams, generator=chance)
    amax = (noise.cumsum(0) + 8 * torch.randn(streams, generator=chance)).exp2()
    odd = ODD_VALUES[torch.randint(len(ODD_VALUES), amax.shape, generator=chance)]
    share = torch.rand(streams, generator=chance).square()  # some streams are odd all through
    return torch.where(torch.rand(amax.shape, generator=chance) < share, odd, amax)


@pytest.mark.parametrize("seed", range(30))
def test_logmax_stays_in_bounds_and_on_powers_of_two(seed) -> None:
    chance = random.Random(seed)
    low, first, high = (2.0**octave for octave in sorted(chance.choices(range(-20, 31), k=3)))
    decays, half = chance.choices([0.0, 0.5, 0.9999], k=2), chance.choice(["float16", "bfloat16"])
    first, probability = chance.choice([first, "probe"]), chance.uniform(1e-9, 0.49)
    scaler = LogMax(first, probability, *decays, low, high, half)
    for amax in gradients(seed, 40):
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


def test_a_saved_state_and_a_kept_scale_stay_what_they_were(request) -> None:
    """Whatever the user's default dtype is."""
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(torch.float64)
    for scaler in (kind() for kind in KINDS):
        kept, first = scaler.scale, scaler.scale.item()
        scaler.state_dict()["scale"].fill_(3.0)
        for amax in (0.0, math.inf, math.nan):
            scaler.update(torch.tensor(amax, dtype=torch.float32))
        assert (kept.item(), scaler.scale.dtype) == (first, torch.float32)
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


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    scaler, saved = Backoff(), Backoff(init_scale=8.0).state_dict()
    for name, value, said in (
        ("clean_steps", None, "is missing"),
        ("scale", torch.ones(2), "is torch.float32 of shape (2,)"),
        ("overflows", torch.ones(()), "is torch.float32 of shape ()"),
        ("scale", torch.tensor(math.nan), "is not finite"),
        ("scale", torch.tensor(0.0), "is not positive"),
    ):
        text = f"the saved state is damaged, {name} {said}: resume from another checkpoint"
        given = {**saved, name: value}
        assert refused(CheckpointError, scaler.load_state_dict, given) == f"loss_scaling: {text}"
    assert refused(CheckpointError, scaler.load_state_dict, LogMax().state_dict()) == (
        "loss_scaling=Backoff cannot continue the saved state of LogMax: use loss_scaling=LogMax, "
        "or start a new run from the saved weights"
    )
    text = refused(CheckpointError, scaler.load_state_dict, NoScaling().state_dict())
    assert "the saved state of none: use loss_scaling=none" in text
    assert scaler.scale == 2.0**16


def test_it_is_called_by_its_kind_or_class() -> None:
    mine = type("Mine", (Backoff,), {})  # A user's, derived from one of ours.
    scalers = (Static(), Backoff(), LogMax(), NoScaling(), mine(), Scaler({}), object())
    names = "static Backoff LogMax none Mine Scaler object"
    assert [name_of(scaler) for scaler in scalers] == names.split()
    ways = (("mixed", "float16"), ("amp", "float16"), ("mixed", "bfloat16"), ("fp32", "float16"))
    assert [name_of(auto(*way)) for way in ways] == ["Backoff", "Backoff", "none", "none"]


DEFAULT = "; leave it out for the default"
NORMAL = f"a number >= 1.175494351e-38 and <= 3.402823466e+38{DEFAULT}"
WHOLE = f"a whole number >= 1 and <= 2147483647{DEFAULT}"
DECAY, POWER = f"a number >= 0 and < 1{DEFAULT}", "a power of two; use 2**{} or 2**{}".format
WITHIN = "probe or a number >= 1 and <= 16777216; set it, or move min_scale and max_scale"
REFUSED = [
    (Static, "scale", [math.nan, math.inf, True, "2", None, [2.0], 0, 1e-46, 10**400], NORMAL),
    (Backoff, "min_scale", [0.0], NORMAL),
    (Backoff, "min_scale", [2.0**25],
     "at most max_scale, which is 16777216; lower it, or raise max_scale"),
    (Backoff, "max_scale", [math.inf], NORMAL),
    (Backoff, "init_scale", [math.nan, None, 0.5, 2.0**25, "Probe"], WITHIN),
    (Backoff, "growth_factor", [1.0, 1e39], f"a number > 1 and <= 3.402823466e+38{DEFAULT}"),
    (Backoff, "backoff_factor", [0.0, 1.0], f"a number > 0 and < 1{DEFAULT}"),
    (Backoff, "growth_interval", [math.nan, True, 0, 2000.0, 2**31], WHOLE),
    (Backoff, "hysteresis", [0, 2**31], WHOLE),
    (Backoff, "half", [torch.float32, "fp16", None], f"float16 or bfloat16{DEFAULT}"),
    (LogMax, "min_scale", [1.5], POWER(0, 1)),
    (LogMax, "max_scale", [65537.0], POWER(16, 17)),
    (LogMax, "init_scale", [1000.0], POWER(9, 10)),
    (LogMax, "overflow_probability", [0.0, 0.5], f"a number > 0 and < 0.5{DEFAULT}"),
    (LogMax, "mean_decay", [-0.1, 1.0], DECAY),
    (LogMax, "variance_decay", [-0.1, 1.0], DECAY),
]  # fmt: skip


def test_what_is_refused_with_what_is_allowed_and_the_way_out() -> None:
    for kind, name, values, said in REFUSED:
        for value in values:
            text = f"loss_scaling.{name}={value}: must be {said}"
            assert refused(ConfigError, kind, **{name: value}) == text


def test_the_ends_of_the_ranges_are_allowed() -> None:
    for scaler in (
        Static(0.1),
        Backoff(min_scale=2.0**-126, max_scale=LARGEST, half="float16"),
        Backoff(init_scale=3, min_scale=3, max_scale=3, growth_interval=1, hysteresis=9),
        Backoff(growth_factor=1.0001, backoff_factor=0.999),
        LogMax(min_scale=2.0**-126, max_scale=2.0**127, half="bfloat16"),
        LogMax(overflow_probability=1e-300, mean_decay=0, variance_decay=0.0),
        LogMax(init_scale=1, max_scale=1, overflow_probability=0.4999),
    ):
        assert scaler.scale > 0


class Number(Static):
    """Its scale is a number, which cannot change without the host."""

    scale = 8.0


def test_a_users_without_update_or_tensor_is_refused() -> None:
    for name, said in (
        ("torch.nn.Identity", "has no update"),
        ("test_scaler.Number", "its scale is a float; must be a 0-d float32 tensor"),
    ):
        config = check_config(composed(option := f"loss_scaling._target_={name}"))
        said = f"{option}: {said}; see docs/loss_scaling.md"
        assert refused(ConfigError, build_scaler, config) == said


def test_a_users_module_scales_and_resumes_bit_for_bit(tmp_path) -> None:
    options = ["model=mlp", "model.hidden=8", "trainer.max_steps=8", "trainer.checkpoint_every=4"]
    options += ["trainer.keep_last=10", "trainer.log_every=1", "dtype=mixed"]
    options += ["loss_scaling._target_=own_parts.Module"]
    done = train(whole := tmp_path / "whole", *options)
    assert (done.status, done.loss_scaling) == ("finished", "Module")
    scales = [scale for _, scale in scalars(whole)["loss_scale/scale"]]
    assert scales[:4] == [256, 384, 576, 864]
    train(resumed := cut(whole, tmp_path / "resumed"), *options, "resume=auto")
    assert_same_run(whole, resumed)


AMAX = {".": 1.0, "0": 0.0, "x": math.inf, "n": math.nan}


def scales(scaler, steps):
    """The scale after each step, by the signs of `AMAX`."""
    return [scaler.update(torch.tensor(AMAX[step])) or scaler.scale.item() for step in steps]


@pytest.mark.parametrize(
    ("options", "steps", "expected"),
    [
        # The interval ends in growth; an overflow halves and starts the count anew.
        ((16, 3), "........x...xx.", [16, 16, 32, 32, 32, 64, 64, 64, 32, 32, 32, 64, 32, 16, 16]),
        ((16, 2), "n00", [8, 8, 16]),
        ((4, 1, 1, 3, 10), "..xxx..", [8, 10, 5, 3, 3, 6, 10]),
        ((2**126, 1, 1, 1, LARGEST), "...", [2.0**127] * 3),
        # The first overflow is forgiven, the second is not, nor a third after two clean steps;
        # after three clean steps the scale grows and the next overflow is forgiven again.
        ((16, 3, 2), "xx..x...xx", [16, 8, 8, 8, 4, 4, 4, 8, 8, 4]),
        ((8, 2, 2, 1, 8), "x..xx", [8, 8, 8, 8, 4]),
    ],
    ids=["growth", "nan and 0", "clamped", "largest", "hysteresis", "hysteresis at the ceiling"],
)
def test_backoff_makes_the_sequence(options, steps, expected) -> None:
    names = ("init_scale", "growth_interval", "hysteresis", "min_scale", "max_scale")
    assert scales(Backoff(**dict(zip(names, options, strict=False))), steps) == expected


def grad_scaler(overflows, interval, _):
    """The kernel of `torch.amp.GradScaler`."""
    scale, tracker = torch.tensor(2.0**16), torch.tensor(0, dtype=torch.int32)
    for overflow in overflows:
        found_inf = torch.tensor(float(overflow))
        yield torch._amp_update_scale_(scale, tracker, found_inf, 2.0, 0.5, interval).item()


def megatron(overflows, interval, hysteresis):
    """The rule of Megatron's dynamic scaler, from its equations."""
    scale, growth, left = 2.0**16, 0, hysteresis
    for overflow in overflows:
        growth, left = (0, left - 1) if overflow else (growth + 1, left)
        if overflow and left <= 0:
            scale = max(scale * 0.5, 1.0)
        elif growth == interval:
            scale, growth, left = scale * 2.0, 0, hysteresis
        yield scale


@pytest.mark.parametrize(("rule", "floor", "most"), [(grad_scaler, 2.0**-126, 1), (megatron, 1, 5)])
def test_backoff_equals_the_rules_of_others(rule, floor, most) -> None:
    """Over 200 streams, each with its own share of overflows."""
    chance = random.Random(0)
    for _ in range(200):
        share, interval, hysteresis = (
            chance.random(),
            chance.randint(1, 10),
            chance.randint(1, most),
        )
        overflows = [chance.random() < share for _ in range(40)]
        scaler = Backoff(2**16, 2, 0.5, interval, hysteresis, min_scale=floor, max_scale=2.0**127)
        ours = scales(scaler, ["x" if overflow else "." for overflow in overflows])
        assert ours == [*rule(overflows, interval, hysteresis)]


def test_backoff_continues_wider_counts_and_more_than_a_shorter_interval() -> None:
    """Counts were saved as int64 once. Those beyond a new interval grow the scale at once."""
    for interval, steps, expected in ((4, ".x..", [16, 8, 8, 8]), (2, "..x", [32, 32, 32])):
        saved = Backoff(16, growth_interval=9, hysteresis=2)
        scales(saved, "x..")
        wide = {n: v.long() if n.endswith("s") else v for n, v in saved.state_dict().items()}
        resumed = Backoff(growth_interval=interval, hysteresis=2)
        resumed.load_state_dict(wide)
        assert scales(resumed, steps) == expected
