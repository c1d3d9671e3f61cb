"""Counts of magnitudes against a recount in float64; a step's ranges and pictures of them."""

import math
from collections import defaultdict
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import Patch
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import events
from prepared import context, prepared
from torch import Tensor, nn
from vocabulary import CalledOps, same_bits

from mpframe import Backoff, Trainer
from mpframe.core.callback import Batch, Callback
from mpframe.lab import pictures, watch_ranges
from mpframe.lab.exponents import BINS, FIELDS, LOWEST, Limits, add_rows
from mpframe.lab.exponents import count_exponents as count
from mpframe.lab.pictures import draw_layers
from mpframe.lab.range_watch import RangeWatch
from mpframe.lab.ranges import KINDS, RangeProbe, Ranges
from mpframe.tracking.tracker import Tracker
from mpframe.training.plan import Plan

FLOAT16 = Limits.of(torch.float16)
HALVES = [torch.float16, torch.bfloat16]
SPECIAL = [0.0, math.inf, math.nan, 65504.0, 65505.0, 2.0**-24, 2.0**-25, 2.0**-26, 3e38]
SPECIAL += [2.0**-14, 2.0**-14 * (1 - 2.0**-12), 2.0**-126, 2.0**-133, 2.0**-134, 2.0**-149]
numbers = st.one_of(
    st.sampled_from([*SPECIAL, *(-value for value in SPECIAL)]),
    st.floats(width=32),
    st.builds(lambda m, e: m * 2.0**e, st.floats(1, 2, width=32), st.integers(-40, 17)),
)


def recount(values: Tensor, half: torch.dtype, scale: float) -> list[float]:
    """The same figures by rounding each value alone, in float64 and numpy."""
    x = values.double().numpy().ravel()
    finite, zero = np.isfinite(x), x == 0
    y = x[finite & ~zero].astype(np.float64) * scale
    info = torch.finfo(half)
    # Every number of either half format is one of fp32's, so float64 -> half rounds once here:
    # to a number of steps of the smallest number, ties to even, as the format does.
    lost = [np.round(y * k / (info.smallest_normal * info.eps)) == 0 for k in (0.5, 1.0, 2.0)]
    tiny = (np.abs(y) < info.smallest_normal) & ~lost[1]
    counts = [x.size, zero.sum(), (~finite).sum(), *(own.sum() for own in lost), tiny.sum()]
    counts += [(np.abs(y) > info.max).sum(), np.abs(y).max(initial=0.0)]
    bins = np.zeros(BINS)
    for value in np.abs(x[finite & ~zero]):
        bins[max(math.frexp(value)[1] - 1, LOWEST) - LOWEST] += 1
    return [float(number) for number in [*counts, *bins]]


@pytest.mark.parametrize(
    ("stored", "half"),
    [*((stored, torch.float16) for stored in HALVES), *((torch.float32, half) for half in HALVES)],
)
@settings(max_examples=60, deadline=None)
@given(values=st.lists(numbers, max_size=40), exponent=st.integers(-4, 20))
def test_a_float64_recount_agrees(
    stored: torch.dtype, half: torch.dtype, values: list[float], exponent: int
) -> None:
    tensor = torch.tensor(values, dtype=torch.float32).to(stored)
    scale = 2.0**exponent
    # A product beyond fp32 would be inf there and finite in the recount.
    scale = scale if not (tensor.abs()[tensor.isfinite()] * scale).isinf().any() else 1.0
    row = count(tensor, Limits.of(half), torch.tensor(scale))
    # fp32 products below 2^-149 are rounded: exact where nothing so small is made still smaller.
    if exponent >= 1 or not (tensor.abs()[tensor != 0] < 2.0**-120).any():
        assert row.tolist() == recount(tensor, half, scale)


@pytest.mark.parametrize("stored", HALVES)
def test_many_values_of_a_format_are_counted_as_few_and_sparse_ones(stored: Any) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(stored)
    values = torch.cat([every, torch.randn(2**16).to(stored), every[2**14 : 2**14 + 999]])
    scale, held_at = torch.tensor(2.0**8), torch.tensor(2.0**3)
    parts = [count(p, FLOAT16, scale, held_at) for p in values.split(2**15)]
    whole = count(values, FLOAT16, scale, held_at)
    assert torch.equal(whole, add_rows(parts))
    assert whole[FIELDS.index("count")] == len(values)
    same = count(torch.full((2**16,), 3.0, dtype=torch.float16), FLOAT16, 2.0)
    assert same[FIELDS.index("amax")] == 6.0  # The largest is among what is there.
    places, entries = torch.tensor([[0, 0, 1]]), torch.tensor([1.0, 2.0, 5.0])
    sparse = torch.sparse_coo_tensor(places, entries, (9,), check_invariants=True)
    assert torch.equal(count(sparse, FLOAT16), count(torch.tensor([3.0, 5.0]), FLOAT16))


def trainer_of(mode: str = "mixed", half: str = "float16") -> Trainer:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)]
    own = {"scaler": None if mode == "fp32" else Backoff(2.0**12), "plan": Plan(clip_norm=0.1)}
    own["optimizer"] = partial(torch.optim.AdamW, lr=1e-3)
    return prepared(nn.Sequential(*layers), nn.CrossEntropyLoss(), mode, half, **own)


def batches(number: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(number, 6, 1, 8, 8, generator=generator)
    classes = torch.randint(0, 3, (number, 6), generator=generator)
    return list(zip(images, classes, strict=True))


def spy(trainer: Trainer) -> dict[str, dict[str, list[Tensor]]]:
    """Copies of all that the next step uses, by kind and layer, taken by hooks of its own."""
    seen: dict[str, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))

    def keep(kind: str, layer: str, values: Tensor) -> None:
        seen[kind][layer].append(values.detach().clone())

    for layer, module in trainer.model.named_children():

        def watch(_: Any, __: Any, output: Tensor, layer: str = layer) -> None:
            keep("activations", layer, output)
            output.register_hook(partial(keep, "activation_gradients", layer))

        module.register_forward_hook(watch)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p, layer=layer: keep("gradients", layer, p.grad)
            )
    return seen


def masters_of(trainer: Trainer) -> dict[Tensor, Tensor]:
    masters = trainer.optimizer
    return {p: masters.master_of(p).detach().clone() for p in trainer.model.parameters()}


@pytest.mark.parametrize(
    ("mode", "half", "micro_batches"),
    [("fp32", "float16", 3), ("mixed", "float16", 3), ("amp", "bfloat16", 3),
     ("mixed", "bfloat16", 1)],
)  # fmt: skip
def test_every_kind_is_counted_right(mode: str, half: str, micro_batches: int) -> None:
    trainer, dtype = trainer_of(mode, half), getattr(torch, half)
    scale = float(trainer.scaler.scale) if trainer.scaler else 1.0
    seen, before = spy(trainer), masters_of(trainer)
    probe = RangeProbe(trainer, dtype)
    assert not trainer.train_step(*batches(micro_batches)).skipped
    ranges, after = probe.ranges(), masters_of(trainer)
    for layer, module in trainer.model.named_children():
        own, place = list(module.parameters()), ranges.layers.index(layer)
        seen["weights"][layer] = own
        seen["updates"][layer] = [after[p] - before[p] for p in own]
        for index, kind in enumerate(KINDS):
            at = scale if kind in ("gradients", "activation_gradients") else 1.0
            values = torch.cat([torch.zeros(0), *(t.float().ravel() for t in seen[kind][layer])])
            found = ranges.rows[index, place].tolist()
            assert found == recount(values.detach() / at, dtype, at), (kind, layer)
        stuck = [(after[p].to(dtype) == before[p].to(dtype)) & (after[p] != before[p]) for p in own]
        assert ranges.rounded_away[place] == sum(int(part.sum()) for part in stuck)
    assert (ranges.step, ranges.scale) == (1, scale)
    counted = sum(parameter.numel() for parameter in trainer.model.parameters())
    assert ranges.field("gradients", "count").sum() == micro_batches * counted


def test_watching_changes_no_bit_and_leaves_no_hook(tmp_path: Path) -> None:
    """Nor are casts asked about what counts: a module's hooks run in its cast block."""
    assert type(watch_ranges(None)) is Callback  # Off, it does nothing.
    plain, watched = trainer_of(), trainer_of()
    with closing(Tracker(tmp_path)) as tracker:
        watch = RangeWatch(every=2)
        watch.setup(watched, context(tmp_path, tracker))
        for batch in batches(6):
            plain.train_step(batch)
            watch.on_step_begin(watched, [batch])
            with CalledOps() as called:
                result = watched.train_step(batch)
            watch.on_optimizer_step(watched, result)
            assert ("linear" in called.names, "bincount" in called.names) == (True, False)
    assert same_bits(plain.model.parameters(), watched.model.parameters())
    assert not any(module._forward_hooks for module in watched.model.modules())
    assert not any(p._post_accumulate_grad_hooks for p in watched.model.parameters())
    reports = events(tmp_path).Histograms("numerics/weights/exponents/0")
    assert [report.step for report in reports] == [2, 4, 6]


def test_scalars_show_the_worst_layers() -> None:
    seen = {"a": 1.0, "b": 2.0, "c": 3.0, "d": math.nan}
    for figure, worst in (("headroom_bits", "a"), ("snr_db", "a"), ("over_count", "c")):
        tag = f"numerics/weights/{figure}"
        found = RangeWatch(every=1, worst=1)._worst_of(tag, seen)
        assert found == {f"{tag}/{worst}": seen[worst]}


def test_a_skipped_step_has_no_updates() -> None:
    trainer = trainer_of()
    probe = RangeProbe(trainer, torch.float16)
    inputs, targets = batches(1)[0]
    assert trainer.train_step((inputs * torch.inf, targets)).skipped
    ranges = probe.ranges()
    assert np.array_equal(ranges.field("updates", "zeros"), ranges.field("updates", "count"))
    assert ranges.field("gradients", "bad").sum() > 0
    assert not ranges.rounded_away.any()


def made(layers: int) -> Ranges:
    generator = np.random.default_rng(7)
    rows = np.zeros((len(KINDS), layers, len(FIELDS) + 255))
    rows[:, :, len(FIELDS) + 90 : len(FIELDS) + 130] = generator.integers(0, 99, (5, layers, 40))
    rows[:, :, 0] = rows[:, :, len(FIELDS) :].sum(axis=-1)
    rows[:, :, FIELDS.index("amax")] = 8.0
    names = tuple(f"encoder.block{index}.attention.projection" for index in range(layers))
    return Ranges(7, 2.0**10, names, rows, np.ones(layers))


def test_layers_are_drawn_against_the_limits_of_half_at_the_scale(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(pictures, "save", lambda figure, path: drawn.append(figure.axes[0]))
    ranges = made(layers=6)
    for kind, octaves in (("weights", 0), ("gradients", 10)):
        draw_layers(ranges, kind, torch.float16, tmp_path)
        lines = [float(line.get_xdata()[0]) + 0.5 + octaves for line in drawn[-1].lines]
        assert lines == pytest.approx([-25, -14, 16], abs=1e-3)
        low, high = drawn[-1].get_xlim()
        assert low < min(lines) - octaves < max(lines) - octaves < high
    assert np.allclose(ranges.headroom("weights", FLOAT16), np.log2(65504) - 3)
    ranges.rows[:] = 0
    assert not draw_layers(ranges, "weights", torch.float16, tmp_path)
