"""One master for one weight: writes by others are adopted, optimizers share it, frozen ones too."""

import gc
from itertools import cycle

import pytest
import torch
from torch import nn
from vocabulary import HALVES, same_bits

from mpframe import MasterWeights, Precision, Static
from mpframe.core.optim import masters as core_masters

LARGE, HALF = core_masters._SUMMED, torch.float16


def linear(half="float16", size=4, fused=False):
    """A linear layer, its optimizer, and a copy of the master of its weight."""
    torch.manual_seed(0)
    model = nn.Linear(size, size)
    plain = torch.optim.SGD(model.parameters(), lr=0.5, fused=fused)
    model, optimizer = Precision("mixed", half).prepare(model, plain)
    return model, optimizer, optimizer.master_of(model.weight).detach().clone()


def again(model, mode="mixed"):
    """Another optimizer over the same model."""
    plain = torch.optim.SGD(model.parameters(), lr=0.5)
    return Precision(mode, "float16").prepare(model, plain)[1]


def step(optimizer, weight, value=0.25) -> None:
    """One step on a gradient of `value` everywhere: SGD at lr 0.5 moves by half of it."""
    weight.grad = torch.full_like(weight, value)
    optimizer.step()


def test_a_weight_may_have_any_layout_and_begin_anywhere_in_its_memory() -> None:
    """Words of 64 bits begin at every fourth value."""
    flat, large = torch.arange(16.0).half(), torch.zeros(8 * LARGE + 1, dtype=HALF)
    transposed, shifted = large[:-1].view(64, -1).t(), large[1:].view(-1, 2)
    for values in (flat[:8], flat[1:9], flat[4:12], transposed, shifted, flat[:0]):
        weight, expected = nn.Parameter(values), values - 0.5
        optimizer = MasterWeights(torch.optim.SGD([weight], lr=0.5))
        step(optimizer, weight, 1.0)
        assert same_bits([weight], [expected])
        weight.data.fill_(1.0)
        step(optimizer, weight, 0.25)
        assert torch.equal(weight, torch.full_like(weight, 0.875))


@pytest.mark.parametrize("half", HALVES)
def test_a_model_turns_channels_last_after_it_was_prepared(half) -> None:
    """Fused kernels take master and gradient as they lie in memory."""
    masters = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Conv2d(8, 4, 3)
        plain = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        model, optimizer = Precision("mixed", half).prepare(model, plain)
        model.to(memory_format=layout)
        for _ in range(2):
            model.weight.grad = torch.arange(288).view(4, 8, 3, 3).to(model.weight)
            model.weight.grad = model.weight.grad.contiguous(memory_format=layout)
            optimizer.step()
        masters.append(optimizer.master_of(model.weight))
    assert torch.equal(*masters)


def full(value, dtype=torch.float32):
    return torch.full((4, 4), value, dtype=dtype)


WRITES = {
    "load_state_dict": lambda m: m.load_state_dict(nn.Linear(*m.weight.shape).state_dict()),
    "copy_": lambda model: model.weight.detach().copy_(torch.ones_like(model.weight)),
    "data =": lambda m: setattr(m.weight, "data", torch.ones_like(m.weight)),
    "data.clamp_": lambda model: model.weight.data.clamp_(-0.1, 0.1),
    "data transposed": lambda model: setattr(model.weight, "data", model.weight.data.t()),
    "data.neg_": lambda model: model.weight.data.neg_(),
    "data rows": lambda model: model.weight.data[:2].copy_(model.weight.data[:2].flip(0)),
    "init": lambda model: nn.init.constant_(model.weight, 3.0),
    "max_norm": lambda m: nn.functional.embedding(torch.arange(4), m.weight, max_norm=0.5),
}


@pytest.mark.parametrize(
    ("name", "size", "half", "looks"),
    [
        *((*own, True) for own in zip(WRITES, cycle([4, 257, 5, 256]), cycle(HALVES))),
        *((f"data{w}", s, "float16", True) for w in (".neg_", " rows") for s in (5, 256, 257)),
        *((name, 4, "float16", False) for name in ("load_state_dict", "data =", "max_norm")),
    ],
)
def test_a_write_is_adopted(name, size, half, looks, monkeypatch) -> None:
    """Also without a look at values, as on an accelerator: counter and address tell of most."""
    if not looks:
        monkeypatch.setattr(core_masters, "_compares_values", lambda _: False)
    model, optimizer, _ = linear(half, size)
    step(optimizer, model.weight)
    before = model.weight.detach().clone()
    WRITES[name](model)
    written = model.weight.detach().clone()
    assert not torch.equal(written, before)
    step(optimizer, model.weight, value=0.0)
    assert same_bits([model.weight], [written])
    step(optimizer, model.weight)
    master, changed = optimizer.master_of(model.weight), written != before
    assert torch.equal(model.weight, master.to(written.dtype))
    assert torch.equal(master[changed], written.float()[changed] - 0.125)


def test_new_data_at_the_old_address_is_adopted(monkeypatch) -> None:
    """An allocator gives freed memory again: the master holds what it has seen."""
    monkeypatch.setattr(core_masters, "_compares_values", lambda _: False)
    model, optimizer, _ = linear()
    for value in (1.0, 2.0, 3.0):
        model.weight.data = full(7.0, HALF)
        model.weight.data = full(value, HALF)
        step(optimizer, model.weight, value=0.0)
        assert model.weight.unique().tolist() == [value]


@pytest.mark.parametrize("way", ["copy_", "data"])
def test_elements_that_nobody_wrote_keep_their_fp32_digits(way) -> None:
    """Also after an exchange that is undone, as of averaged weights for a validation."""
    model, optimizer, master = linear()
    kept = model.weight.detach().clone() if way == "copy_" else model.weight.data
    for values in (torch.zeros_like(kept), kept):
        if way == "data":
            model.weight.data = values
        else:
            model.weight.detach().copy_(values)
    step(optimizer, model.weight)
    master -= 0.125
    assert not torch.equal(master, model.weight.float())
    model.weight.detach()[0].fill_(2.0)
    master[0] = 2.0
    assert same_bits([optimizer.master_of(model.weight)], [master])
    model.float()  # It writes what the weights held: nothing new.
    assert same_bits([optimizer.master_of(model.weight)], [master])


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_leaves_the_write_for_the_next_and_it_is_in_what_is_saved(fused) -> None:
    model, optimizer, _ = linear(fused=fused)
    step(optimizer, model.weight)
    model.weight.data.fill_(1.0)
    step(optimizer, model.weight, value=torch.inf)
    assert torch.equal(model.weight, full(1.0, HALF))
    step(optimizer, model.weight)
    assert torch.equal(optimizer.master_of(model.weight), full(0.875))
    model.weight.data.fill_(1.0)
    assert torch.equal(optimizer.state_dict()["masters"][0], full(1.0))
    model.weight.data.fill_(2.0)
    assert torch.equal(optimizer.masters_by_name(model)["weight"], full(2.0))


def test_a_scale_is_taken_out_of_shared_steps_too() -> None:
    model, first, start = linear()
    second = again(model)
    assert first.master_of(model.weight) is second.master_of(model.weight)
    for optimizer in (first, second):
        model.weight.grad = torch.full_like(model.weight, 2.0)
        optimizer.step(Static(8.0))
    assert same_bits([first.master_of(model.weight)], [start - 0.125 - 0.125])


@pytest.mark.parametrize("then", ["fp32", "amp", "mixed", "mixed after fp32"])
def test_another_mode_goes_on_from_the_masters_or_from_what_fp32_weights_were_in_between(
    then,
) -> None:
    """2^-20 is below what either half format holds beside 1, and 2^-40 below float16."""
    model, first, _ = linear("float16" if "after" in then else "bfloat16")
    exact = full(1 + 2.0**-20)
    exact[0] = 2.0**-40
    if "after" in then:
        model.float().weight.detach().copy_(exact)
    else:
        first.load_masters(model, {"weight": exact, "bias": torch.ones(4)})
    masters = [own.master_of(model.weight) for own in (again(model, then.split()[0]), first)]
    assert same_bits(masters, [exact, exact])
    assert same_bits([model.weight], [exact.to(model.weight.dtype)])


def test_a_master_lives_as_long_as_its_weight() -> None:
    gc.collect()
    before = len(core_masters._MASTERS)
    kept = linear()
    assert len(core_masters._MASTERS) == before + 2
    del kept
    gc.collect()
    assert len(core_masters._MASTERS) == before


def frozen(**options):
    """A model with a frozen layer that no optimizer has yet, and its fp32 value."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    before, plain = model[0].weight.detach().clone(), torch.optim.SGD(model[1].parameters(), lr=0.5)
    return model, Precision("mixed").prepare(model, plain, **options)[1], before


def test_a_frozen_weight_is_saved_and_stepped_from_its_fp32_value() -> None:
    """Here in a group added to the wrapped optimizer."""
    (model, optimizer, before), (other, loading, _) = frozen(), frozen()
    saved = optimizer.masters_by_name(model)
    loading.load_masters(other, saved)
    loaded = [loading.masters_by_name(other)["0.weight"], other[0].weight]
    assert same_bits([saved["0.weight"], *loaded], [before, before, before.half()])
    weight = model[0].weight.requires_grad_(True)
    optimizer.optimizer.add_param_group({"params": [weight]})
    assert optimizer.param_groups[1]["params"][0] is weight
    weight.grad = torch.full_like(weight, 2.0)
    optimizer.step(Static(8.0))
    expected = before - 0.125
    assert same_bits([optimizer.master_of(weight), weight], [expected, expected.half()])


def test_it_can_be_given_up_but_where_an_optimizer_has_it() -> None:
    model, optimizer, before = frozen(keep_frozen=False)
    assert optimizer.masters_by_name(model).keys() == {"1.weight", "1.bias"}
    optimizer.add_param_group({"params": [model[0].weight]})
    assert same_bits([optimizer.master_of(model[0].weight)], [before.half().float()])
    model = nn.Linear(4, 4).requires_grad_(False)
    before, plain = model.weight.detach().clone(), torch.optim.SGD([model.weight], lr=0.5)
    _, optimizer = Precision("mixed").prepare(model, plain, keep_frozen=False)
    assert same_bits([optimizer.master_of(model.weight)], [before])
