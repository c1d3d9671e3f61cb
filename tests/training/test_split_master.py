"""Split masters: the exact fp32 master in the 16 bits that its bfloat16 weight lacks."""

import copy
from typing import Any

import pytest
import torch
from fixtures import Patch
from torch import Tensor, nn
from vocabulary import same_bits, tensors

from mpframe import Backoff, MasterWeights, Precision
from mpframe.core.errors import ConfigError
from mpframe.core.optim import gradients, master_weights
from mpframe.core.optim.masters import set_master
from mpframe.training.callbacks.ema import Ema
from mpframe.training.callbacks.freeze import set_requires_grad
from mpframe.training.optimizers.split_master import SplitMaster

BF16 = torch.bfloat16
END = torch.finfo(BF16).max
OPTIMIZERS = sorted(master_weights._STEPS_BY_PARAMETER, key=lambda cls: cls.__name__)
Wrapped = tuple[list[nn.Parameter], Any]


def wrapped(kind: bool | type[SplitMaster], cls: Any = torch.optim.AdamW) -> Wrapped:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(3, 4, generator=generator).to(BF16)) for _ in range(3)]
    return params, MasterWeights(cls(params, lr=0.05), keep_masters=kind)


def set_gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def stepped(own: Wrapped, *steps: int) -> Wrapped:
    for step in steps:
        set_gradients(own[0], step)
        own[1].step()
    return own


def masters_of(params: list[nn.Parameter], optimizer: MasterWeights) -> list[Tensor]:
    return [optimizer.master_of(p) for p in params]


@pytest.mark.parametrize("low", [0, 0x7FFF, 0x8000, 0x8001])
def test_no_bit_is_lost_and_the_weight_is_the_nearest(low: int) -> None:
    """Over every sign, exponent and upper digit; of two the one away from zero."""
    values = (torch.arange(-(2**15), 2**15) * 2**16 + low).to(torch.int32).view(torch.float32)
    values = values[values.isfinite() & (values.abs() <= END)]
    assert len(values) > 65000
    weight, even = nn.Parameter(values.to(BF16)), values.to(BF16)
    held = SplitMaster(weight, values)
    assert torch.equal(held.current(weight).view(torch.int32), values.view(torch.int32))
    if low == 0x8000:
        off = (weight.double() - values.double()).abs()
        assert torch.equal(off, (even.double() - values.double()).abs())
        assert (weight.double().abs() > values.double().abs()).all()
    else:
        assert torch.equal(weight, even)


def test_float16_is_refused_and_beyond_the_range_of_bfloat16_both_are_held_at_its_end() -> None:
    weight = nn.Parameter(torch.zeros(4, dtype=BF16))
    held = SplitMaster(weight, torch.tensor([3.4e38, -3.4e38, torch.inf, -torch.inf]))
    assert torch.equal(held.current(weight), torch.tensor([END, -END, END, -END]))
    assert torch.equal(weight.float(), held.current(weight))
    line = r"^dtype\.master_weights=split: the weights are float16, and only bfloat16 is a part of "
    with pytest.raises(ConfigError, match=line):
        Precision("mixed", "float16", master_weights=SplitMaster)
    half = torch.optim.SGD([nn.Parameter(torch.ones(2).half())], lr=0.1)
    with pytest.raises(ConfigError, match=line):
        MasterWeights(half, keep_masters=SplitMaster)


@pytest.mark.parametrize(("number", "cls"), list(enumerate(OPTIMIZERS)))
def test_masters_and_state_equal_whole_masters(number: int, cls: Any, monkeypatch: Patch) -> None:
    monkeypatch.setattr(gradients, "_SIZE_ON_CPU", (5, 10**9)[number % 2])
    runs = []
    for kind in (True, SplitMaster):
        params, optimizer = wrapped(kind, cls)
        scaler = Backoff(half="bfloat16", init_scale=1.0)
        for step in range(4):
            set_gradients(params, step)
            if step == 2:
                params[1].grad = torch.full_like(params[1], torch.nan)
            assert bool(optimizer.step(scaler, max_norm=1.0).skipped) == (step == 2)
        state = tensors([list(own.values()) for own in optimizer.optimizer.state.values()])
        runs.append([*masters_of(params, optimizer), *state])
    assert same_bits(*runs)


def test_fp32_masters_have_memory_for_one_bucket_at_a_time(monkeypatch: Patch) -> None:
    monkeypatch.setattr(gradients, "_SIZE_ON_CPU", 12)
    params, optimizer = wrapped(SplitMaster)
    masters = [optimizer.optimizer_param(p) for p in params]
    with_memory, step = [], optimizer.optimizer.step

    def look() -> Any:
        with_memory.append([bool(m.untyped_storage().nbytes()) for m in masters])
        return step()

    monkeypatch.setattr(optimizer.optimizer, "step", look)
    stepped((params, optimizer), 0)
    assert with_memory == [[True, False, False], [False, True, False], [False, False, True]]
    assert not any(m.untyped_storage().nbytes() for m in masters)


WRITES: dict[str, Any] = {
    "fill_": lambda w: w.detach().fill_(3.0),
    "data": lambda w: setattr(w, "data", torch.full_like(w, -2.0)),
    "data.zero_": lambda w: w.data.zero_(),
    "inf": lambda w: w.detach().fill_(torch.inf),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_into_the_weight_reaches_its_master(write: str) -> None:
    """The master rounds to what was written: half a unit in the weight's last place is left."""
    params, optimizer = stepped(wrapped(SplitMaster), 0, 1, 2)  # So that the low bits are not zero.
    before, kept = optimizer.master_of(params[0]), params[0].data
    params[0].data = torch.ones_like(kept)
    params[0].data = kept  # What is replaced and put back keeps its master.
    assert torch.equal(optimizer.master_of(params[0]), before)
    WRITES[write](params[0])
    written, master = params[0].detach().clone(), optimizer.master_of(params[0])
    assert torch.equal(master.to(BF16), written)
    if write in ("data.zero_", "inf"):
        assert torch.equal(master, written.float())
    others = masters_of(params[1:], optimizer)
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(params[0], written.clamp(-END, END))
    assert same_bits(masters_of(params[1:], optimizer), others)


@pytest.mark.parametrize(
    "kinds", [(SplitMaster, SplitMaster), (SplitMaster, True), (True, SplitMaster)]
)
def test_a_state_and_a_copy_go_on_in_either_kind(kinds: tuple[Any, Any]) -> None:
    own, resumed = stepped(wrapped(kinds[0]), 0), wrapped(kinds[1])
    resumed[1].load_state_dict(copy.deepcopy(own[1].state_dict()))
    copied = copy.deepcopy(own)
    for steps in ((), (1, 2)):
        expected = masters_of(*stepped(own, *steps))
        for other in (resumed, copied):
            assert same_bits(masters_of(*stepped(other, *steps)), expected)


def test_a_group_is_frozen_and_thawed_and_channels_last_weights_keep_their_order() -> None:
    params, optimizer = wrapped(SplitMaster)
    set_requires_grad(optimizer, params[:1], requires_grad=False)
    before = optimizer.master_of(params[0])
    stepped((params[1:], optimizer), 0)
    assert torch.equal(optimizer.master_of(params[0]), before)
    set_requires_grad(optimizer, params[:1], requires_grad=True)
    stepped((params, optimizer), 1)
    assert not torch.equal(optimizer.master_of(params[0]), before)
    values = torch.randn(4, 3, 2, 2)
    weight = nn.Parameter(values.to(BF16, memory_format=torch.channels_last))
    fused = torch.optim.AdamW([weight], fused=True)
    set_master(weight, values, SplitMaster)
    optimizer = MasterWeights(fused, keep_masters=SplitMaster)
    assert torch.equal(optimizer.master_of(weight), values)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert optimizer.optimizer_param(weight).stride() == weight.stride()


def test_the_average_follows_split_masters() -> None:
    averages = []
    for own in (wrapped(SplitMaster), wrapped(True)):
        ema = Ema({p: own[1].master_of(p) for p in own[0]}, 0.5)
        for step in range(3):
            stepped(own, step)
            ema.update()
        averages.append(ema._averages)
    assert same_bits(*averages)
