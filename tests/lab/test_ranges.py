"""The ranges of a training step against a recount of what the step really used."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_context import context
from test_exponents import recount
from torch import Tensor, nn
from vocabulary import CalledOps

from mpframe import Backoff, Precision, Trainer
from mpframe.core.callback import Batch, Callback
from mpframe.core.errors import DataError
from mpframe.core.objective import supervised
from mpframe.lab import watch_ranges
from mpframe.lab.exponents import FIELDS
from mpframe.lab.range_watch import RangeWatch
from mpframe.lab.ranges import FOLDER, KINDS, RangeProbe, RangeRecord, Ranges, read_ranges
from mpframe.tracking.tracker import Tracker
from mpframe.training.plan import Plan

MODES = [("fp32", "float16"), ("mixed", "float16"), ("amp", "bfloat16")]


def trainer_of(mode: str = "mixed", half: str = "float16", plan: Plan | None = None) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)
    )
    precision = Precision(mode, half)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, masters = precision.prepare(model, optimizer)
    scaler = None if mode == "fp32" else Backoff(2.0**12)
    loss = supervised(nn.CrossEntropyLoss())
    return Trainer(model, masters, loss, precision, scaler=scaler, plan=plan or Plan(clip_norm=0.1))


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(6, 1, 8, 8, generator=generator), torch.randint(0, 3, (6,)))
        for _ in range(count)
    ]


def spy(trainer: Trainer) -> dict[str, dict[str, list[Tensor]]]:
    """Copies of all that the next step uses, by kind and layer, taken by hooks of its own."""
    seen: dict[str, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))

    def keep(kind: str, layer: str, values: Tensor) -> None:
        seen[kind][layer].append(values.detach().clone())

    for layer, module in trainer.model.named_children():

        def watch(_: Any, __: Any, output: Tensor, layer: str = layer) -> None:
            keep("activations", layer, output)
            output.register_hook(lambda g: keep("activation_gradients", layer, g))

        module.register_forward_hook(watch)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p, layer=layer: keep("gradients", layer, p.grad)
            )
    return seen


def test_what_counts_is_not_asked_of_the_casts() -> None:
    """The hooks of a module run in its cast block, where Python is asked about each op."""
    trainer, called = trainer_of(), CalledOps()
    probe = RangeProbe(trainer, torch.float16)
    with called:
        trainer.train_step(*batches(1))
    probe.ranges()
    assert "linear" in called.names
    assert "bincount" not in called.names


@pytest.mark.parametrize(
    ("mode", "half", "micro_batches"),
    [*((*mode, 3) for mode in MODES), ("mixed", "bfloat16", 1), ("amp", "float16", 1)],
)
def test_every_kind_is_counted_right(mode: str, half: str, micro_batches: int) -> None:
    trainer, dtype = trainer_of(mode, half), getattr(torch, half)
    scale = float(trainer.scaler.scale) if trainer.scaler else 1.0  # type: ignore[union-attr]
    seen = spy(trainer)
    before = masters_of(trainer)
    probe = RangeProbe(trainer, dtype)
    assert not trainer.train_step(*batches(micro_batches)).skipped
    ranges = probe.ranges()
    after = masters_of(trainer)
    for layer, module in trainer.model.named_children():
        own = list(module.parameters())
        seen["weights"][layer] = own
        seen["updates"][layer] = [after[p] - before[p] for p in own]
        for kind in KINDS:
            scaled = kind in ("gradients", "activation_gradients")
            values = torch.cat([torch.zeros(0), *(t.float().ravel() for t in seen[kind][layer])])
            row = ranges.rows[KINDS.index(kind), ranges.layers.index(layer)]
            given = values.detach() / scale if scaled else values.detach()
            assert row.tolist() == recount(given, dtype, scale if scaled else 1.0), (kind, layer)
            in_half = any(tensor.dtype == dtype for tensor in seen[kind][layer])
            assert ranges.in_half[KINDS.index(kind), ranges.layers.index(layer)] == in_half
        stuck = [(after[p].to(dtype) == before[p].to(dtype)) & (after[p] != before[p]) for p in own]
        away = sum(int(part.sum()) for part in stuck)
        assert ranges.rounded_away[ranges.layers.index(layer)] == away
    assert (ranges.step, ranges.scale) == (1, scale)
    numbers = sum(parameter.numel() for parameter in trainer.model.parameters())
    assert ranges.field("gradients", "count").sum() == micro_batches * numbers


def masters_of(trainer: Trainer) -> dict[Tensor, Tensor]:
    optimizer = trainer.optimizer
    return {p: optimizer.master_of(p).detach().clone() for p in trainer.model.parameters()}


@pytest.mark.parametrize(("mode", "half"), MODES)
def test_watching_changes_no_bit_and_leaves_no_hook(tmp_path: Path, mode: str, half: str) -> None:
    plain, watched = trainer_of(mode, half), trainer_of(mode, half)
    with Tracker(tmp_path) as tracker:
        watch = RangeWatch(every=2)
        watch.setup(watched, context(tmp_path, tracker))
        for batch in batches(5):
            plain.train_step(batch)
            watch.on_step_begin(watched, [batch])
            watch.on_optimizer_step(watched, watched.train_step(batch))
        for mine, theirs in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        watch.on_step_begin(watched, batches(1))
        watch.on_optimizer_step(watched, watched.train_step(batches(1)[0]))
    assert not any(module._forward_hooks for module in watched.model.modules())
    assert not any(p._post_accumulate_grad_hooks for p in watched.model.parameters())
    assert [report.step for report in read_ranges(tmp_path)] == [2, 4, 6]


@pytest.mark.parametrize(("figure", "worst"), [("headroom_bits", "a"), ("over_count", "c")])
def test_scalars_show_the_worst_layers(figure: str, worst: str) -> None:
    seen = {"a": 1.0, "b": 2.0, "c": 3.0, "d": np.nan}
    found = RangeWatch(every=1, worst=1)._worst_of(f"numerics/weights/{figure}", seen)
    assert found == {f"numerics/weights/{figure}/{worst}": seen[worst]}


def test_off_is_a_callback_that_does_nothing() -> None:
    assert type(watch_ranges(None)) is Callback


def test_updates_that_half_rounds_away() -> None:
    """32 updates of 2^-12 to a weight of 1: each is below half a bfloat16 step, 2^-8."""
    model, precision = nn.Linear(1, 1, bias=False), Precision("mixed", "bfloat16")
    with torch.no_grad():
        model.weight.fill_(1.0)
    model, masters = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=2.0**-12))
    trainer = Trainer(model, masters, supervised(lambda out, target: -out.sum()), precision)
    probe = RangeProbe(trainer, torch.bfloat16)
    trainer.train_step((torch.ones(1, 1), torch.ones(1)))
    assert probe.ranges().rounded_away_fraction().tolist() == [1.0]


def test_a_skipped_step_has_no_updates() -> None:
    trainer = trainer_of()
    probe = RangeProbe(trainer, torch.float16)
    inputs, targets = batches(1)[0]
    assert trainer.train_step((inputs * torch.inf, targets)).skipped
    ranges = probe.ranges()
    assert (ranges.field("updates", "zeros") == ranges.field("updates", "count")).all()
    assert ranges.field("gradients", "bad").sum() > 0
    assert not ranges.rounded_away.any()


def made(step: int, layers: int = 2, scale: float = 2.0**10) -> Ranges:
    generator = np.random.default_rng(step)
    rows = np.zeros((len(KINDS), layers, len(FIELDS) + 255))
    rows[:, :, len(FIELDS) + 90 : len(FIELDS) + 130] = generator.integers(0, 99, (5, layers, 40))
    rows[:, :, 0] = rows[:, :, len(FIELDS) :].sum(axis=-1)
    rows[:, :, FIELDS.index("amax")] = 8.0
    names = tuple(f"encoder.block{index}.attention.projection" for index in range(layers))
    in_half = np.arange(len(KINDS) * layers).reshape(len(KINDS), layers) % 2 == 0
    away = generator.integers(0, 9, layers).astype(float)
    return Ranges(step, scale, names, rows, away, in_half)


def same(one: Ranges, other: Ranges) -> bool:
    facts = (one.step, one.scale, one.layers) == (other.step, other.scale, other.layers)
    away = np.array_equal(one.rounded_away, other.rounded_away)
    formats = np.array_equal(one.in_half, other.in_half)
    return facts and away and formats and np.array_equal(one.rows, other.rows)


def test_the_record_is_read_back_and_a_resumed_run_drops_what_it_repeats(tmp_path: Path) -> None:
    record = RangeRecord(tmp_path)
    for step in (10, 20, 30):
        record.add(made(step))
    assert all(map(same, read_ranges(tmp_path), [made(10), made(20), made(30)]))
    with (tmp_path / FOLDER / "ranges.bin").open("ab") as file:
        file.write(b"cut short")
    RangeRecord(tmp_path, kept=20).add(made(25))
    assert [report.step for report in read_ranges(tmp_path)] == [10, 20, 25]


def test_a_run_without_a_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="train the run with numerics=on"):
        read_ranges(tmp_path)
    RangeRecord(tmp_path)
    with pytest.raises(DataError, match=r"holds no report; train for numerics\.every steps"):
        read_ranges(tmp_path)
    (tmp_path / FOLDER / "ranges.bin").write_bytes(b"ab\n")
    with pytest.raises(DataError, match="damaged"):
        read_ranges(tmp_path)
