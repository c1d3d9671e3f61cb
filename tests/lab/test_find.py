"""The range test and the search for a batch size: their results, and that they leave no trace."""

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkout import ROOT
from fixtures import refused
from in_process import train
from pages import Page
from prepared import Batches, prepared
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from mpframe import Backoff, Callback, LogMax, Trainer
from mpframe.core.errors import ConfigError, MpframeError, UserCodeError
from mpframe.core.objective import StepOutput
from mpframe.data.task import Task
from mpframe.lab.find.batch_size import find_batch_size
from mpframe.lab.find.lr import RangeTest, analyse, find_lr
from mpframe.training.callbacks.ema import AverageWeights, Ema
from mpframe.training.callbacks.schedules import Schedules, warmup_cosine

MODES = [("fp32", None), ("mixed", Backoff), ("mixed", LogMax), ("amp", Backoff)]
in_modes = pytest.mark.parametrize(("mode", "kind"), MODES, ids=str)
FIRST = 2.0**18  # Its first steps overflow.


def batches(count: int = 8) -> Batches:
    made = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 16, 8, generator=made)
    return Batches(zip(inputs, inputs[:, :, :3].argmax(-1), strict=True))


class Counting(nn.Module):
    """Counts its calls in a buffer that no state holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + random.random() + float(np.random.rand())


class Never(Callback):
    def on_optimizer_step(self, trainer: Trainer, result: object) -> None:
        raise AssertionError


def trainer_of(mode: str = "fp32", kind: Any = None, **rest: Any) -> Trainer:
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    layers = nn.Linear(8, 32), nn.BatchNorm1d(32), Counting(), nn.Dropout(), nn.Linear(32, 3)
    rest.setdefault("optimizer", lambda p: torch.optim.Adam(p, lr=0.01))
    trainer = prepared(
        nn.Sequential(*layers), nn.CrossEntropyLoss(), mode, scaler=kind and kind(FIRST), **rest
    )
    optimizer: Any = trainer.optimizer
    schedule = warmup_cosine(optimizer.optimizer, 100)
    masters = {p: optimizer.master_of(p) for p in trainer.model.parameters()}
    averages = AverageWeights(Ema(masters, 0.99), trainer.model)
    trainer.algorithms = {"schedule": Schedules(schedule), "ema": averages}
    trainer.callbacks = {"never": Never()}
    return trainer


def everything(trainer: Trainer) -> list[Any]:
    """All that a measurement must leave as it was, copied."""
    copied = {**trainer.model.state_dict(), "calls": trainer.model[2].calls}  # type: ignore[index]
    generators = random.getstate(), repr(np.random.get_state()), torch.get_rng_state()
    modes = [module.training for module in trainer.model.modules()]
    state = torch.utils._pytree.tree_leaves([trainer.state_dict(), copied, generators, modes])
    return [value.clone() if isinstance(value, Tensor) else value for value in state]


def same(before: list[Any], after: list[Any]) -> bool:
    pairs = zip(before, after, strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


@in_modes
def test_a_range_test_leaves_no_trace(mode: str, kind: Any) -> None:
    trainer = trainer_of(mode, kind)
    trainer.model.eval()
    before, parts = everything(trainer), (trainer.scaler, trainer.algorithms, trainer.callbacks)
    test = find_lr(trainer, batches(), 0.01, low=1e-5, steps=40)
    assert same(before, everything(trainer))
    assert all(
        a is b
        for a, b in zip(parts, (trainer.scaler, trainer.algorithms, trainer.callbacks), strict=True)
    )
    assert len(test.rates) > 20
    assert all(test.applied) is (kind is None)  # Skips at the start do not end it.


@in_modes
def test_the_suggested_rate_learns(mode: str, kind: Any) -> None:
    rate = find_lr(trainer_of(mode, kind), batches(), 0.01, low=1e-6, steps=80).suggestion
    assert rate is not None
    assert 1e-3 < rate < 0.3


def test_training_after_it_is_as_without() -> None:
    finals = []
    for found in (False, True):
        trainer = trainer_of("mixed", Backoff)
        trainer.callbacks = {}
        if found:
            find_lr(trainer, batches(), 0.01, steps=20)
        trainer.fit(batches())
        finals.append(everything(trainer))
    assert same(*finals)


def curve(losses: Any, skipped: Any = False) -> RangeTest:
    losses = np.array(losses, float)
    rates, applied = np.geomspace(1e-5, 1.0, len(losses)), ~(np.zeros(len(losses), bool) | skipped)
    return analyse(rates, [*zip(losses.tolist(), applied.tolist(), strict=True)])


STEEP = 3.0 - 2.0 / (1.0 + np.exp(-np.linspace(-10, 10, 101)))  # halfway at the rate 10^-2.5


def test_the_suggestion_is_where_half_of_the_fall_is_done() -> None:
    rates = [curve(a * STEEP + b).suggestion for a, b in [(1, 0), (10, 0), (1, -50)]]
    assert rates == [pytest.approx(10**-2.5, rel=0.15)] * 3
    noise = np.random.default_rng(0).normal(0, 0.1, 101)
    assert curve(STEEP + noise).suggestion == pytest.approx(10**-2.5, rel=0.3)
    worse_later = np.r_[STEEP, 2 + np.arange(20)]
    assert curve(worse_later).suggestion == pytest.approx(1e-5 ** (1 - 50 / 120), rel=0.3)


def test_noise_suggests_nothing() -> None:
    found = [curve(2 + np.random.default_rng(n).normal(0, 0.1, 100)).suggestion for n in range(20)]
    assert sum(rate is not None for rate in found) <= 2
    assert curve(np.full(50, np.nan), True).suggestion is None
    assert "50 of them skipped, blown up" in curve(np.full(50, np.nan), True).says


def test_skipped_steps_are_no_part_of_the_curve() -> None:
    skipped = np.arange(101) % 7 == 0
    spoilt = np.where(skipped, np.where(np.arange(101) % 2, np.inf, 1e6), STEEP)
    test = curve(spoilt, skipped)
    assert test.suggestion == pytest.approx(10**-2.5, rel=0.15)
    assert "15 of them skipped" in test.says


@pytest.mark.parametrize("lost", [math.nan, 1e6])
def test_it_ends_where_the_loss_blows_up(lost: float) -> None:
    given: list[float] = []

    def objective(model: nn.Module, batch: Any) -> StepOutput:
        given.append(rate := float(trainer.optimizer.param_groups[0]["lr"]))
        lost_or_not = lost if rate > 0.5 else -1.0
        return StepOutput(next(model.parameters()).sum() * 0 + lost_or_not, count=1)

    trainer = prepared(nn.Linear(1, 1), objective)
    test = find_lr(trainer, Batches([0]), 0.1, low=1e-3, high=10, steps=50)
    assert ", blown up" in test.says
    assert 0.5 < test.rates[-1] < 2
    assert given == pytest.approx(list(test.rates))


def test_groups_keep_their_ratio_and_windows_their_size() -> None:
    seen, layers = [], nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))

    def two_groups(_: object) -> Any:
        groups = [{"params": layer.parameters(), "lr": lr} for layer, lr in zip(layers, (0.5, 0.1))]  # noqa: B905
        return torch.optim.SGD(groups)

    trainer = prepared(layers, nn.CrossEntropyLoss(), optimizer=two_groups)
    step = trainer.train_step
    trainer.train_step = lambda *b: (
        seen.append([g["lr"] for g in trainer.optimizer.param_groups]),
        step(*b),
    )[1]  # type: ignore
    find_lr(trainer, batches(), 1.0, low=1e-3, high=1.0, steps=10)
    assert seen[0] == pytest.approx([5e-4, 1e-4])
    assert seen[-1] == pytest.approx([0.5, 0.1])
    assert [g["lr"] for g in trainer.optimizer.param_groups] == [0.5, 0.1]


@pytest.mark.parametrize(("limit", "first", "fits", "fails"), [
    (63, 16, 48, 64), (1, 16, 1, 2), (10**9, 300, 1000, 1001),
    *(pytest.param(*row, marks=pytest.mark.slow) for row in (
        (100, 16, 96, 128), (5, 16, 4, 6), (200, 3, 192, 288),
    )),
])  # fmt: skip
def test_the_largest_batch_that_fits(limit: int, first: int, fits: int, fails: int) -> None:
    trainer = trainer_of("mixed", Backoff)
    before, steps = everything(trainer), trainer.train_step

    def train_step(batch: Any) -> Any:
        if len(batch[0]) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return steps(batch) if len(batch[0]) > 1 else None  # BatchNorm needs 2.

    trainer.train_step = train_step  # type: ignore[method-assign,assignment]
    data = batches(64)[0]
    load = lambda n: [t[:1].expand(n, *t.shape[1:]) for t in data]  # noqa: E731
    assert find_batch_size(trainer, load, first, 1000) == (fits, fails)
    assert same(before, everything(trainer))


@pytest.mark.parametrize(("limit", "says"), [
    (300, "=168 (two steps of 256 fit and 384 did not"),
    pytest.param(9, "=5 (two", marks=pytest.mark.slow),
    pytest.param(9999, "all 1437 training samples fit", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_third_is_left(
    limit: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.accumulate_losses

    def train_step(trainer: Any, *rest: Any) -> Any:
        if len(rest[-1][0][0]) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(trainer, *rest)

    monkeypatch.setattr(Trainer, "accumulate_losses", train_step)
    reason = train(tmp_path, "trainer.find=batch_size", "dtype=fp32", "model=mlp").reason or ""
    assert (
        reason.removeprefix("trainer.find=batch_size: ")
        .removeprefix("dataset.batch_size")
        .startswith(says)
    )


def test_only_memory_ends_the_search() -> None:
    class Asks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            torch.empty(2**55 if len(x) > 4 else 1)  # the real allocator, in a user's model
            return super().forward(x)

    trainer = prepared(Asks(8, 3), nn.CrossEntropyLoss())
    load = lambda n: (torch.zeros(n, 8), torch.zeros(n, dtype=torch.long))  # noqa: E731
    assert find_batch_size(trainer, load, 2, 100) == (4, 6)
    broken = prepared(nn.Linear(9, 3), nn.CrossEntropyLoss())
    assert "mat1 and mat2" in refused(UserCodeError, find_batch_size, broken, load, 2, 100)
    assert "not even one sample" in refused(
        MpframeError,
        find_batch_size,
        prepared(Asks(8, 3), nn.CrossEntropyLoss()),
        lambda n: load(9),
        8,
        100,
    )


def test_a_cpu_is_not_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpframe.lab.find.batch_size.peak_memory", lambda: 2**60)
    load = lambda n: (torch.zeros(n, 8), torch.zeros(n, dtype=torch.long))  # noqa: E731
    found = find_batch_size(prepared(nn.Linear(8, 3), nn.CrossEntropyLoss()), load, 8, 100)
    assert found == (8, 12)


def test_a_run_that_finds_a_rate_says_it_and_trains_nothing(tmp_path: Path) -> None:
    summary = train(tmp_path, "trainer.find=lr", "dtype=fp32", "model=mlp")
    assert (summary.status, summary.steps, summary.train_loss) == ("finished", 0, None)
    assert (summary.reason or "").startswith("trainer.find=lr: optimizer.lr=")
    assert "100 steps from 1e-07 to " in (summary.reason or "")
    assert not (tmp_path / "checkpoints").exists()
    assert (tmp_path / "find_lr.png").read_bytes()[:4] == b"\x89PNG"
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Images("find/lr")[0].step == 0
    assert train(tmp_path, "dtype=fp32", "model=mlp", "trainer.max_steps=1").steps == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["optimizer", "memory_and_speed"])
def test_the_commands_of_the_pages_find(name: str, tmp_path: Path) -> None:
    commands = Page(ROOT / "docs" / f"{name}.md").commands()
    found = [one for one in commands if any("trainer.find=" in word for word in one.arguments)]
    assert found
    for number, one in enumerate(found):
        words = [word for word in one.arguments if not word.startswith("hydra.")]
        reason = train(tmp_path / str(number), *words).reason or ""
        assert "optimizer.lr=0.0" in reason or "all 1437 training samples fit" in reason


LBFGS = "optimizer=own optimizer._target_=torch.optim.LBFGS"
REFUSED = {
    "resume=auto": "trainer.find=lr: measures in one process and before the first step",
    f"{LBFGS} dtype=fp32": "trainer.find=lr: the optimizer evaluates the loss itself",
    "experiment=digits_gan": "trainer.find=lr: there are several losses",
    "trainer.find=rate": "trainer.find=rate: must be one of lr, batch_size",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_found_is_refused(words: str, tmp_path: Path) -> None:
    said = refused(ConfigError, train, tmp_path, "trainer.find=lr", *words.split())
    assert said.startswith(REFUSED[words])


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for number in range(50):
            yield torch.tensor([float(number)]), torch.ones(1)


def rows() -> Task:
    return Task(Rows(), Rows(), loss=nn.MSELoss(), batches_per_epoch=3)


def test_a_stream_has_a_bound_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpframe.lab.find.batch_size._MOST_OF_A_STREAM", 128)
    words = ["model=own", "model._target_=torch.nn.Linear", "+model.in_features=1", "dtype=fp32"]
    words += ["dataset=own", f"dataset._target_={__name__}.rows", "+model.out_features=1"]
    said = train(tmp_path, "trainer.find=batch_size", *words, "scheduler=none").reason
    assert said == (
        "trainer.find=batch_size: 128 samples of the stream fit, so memory does not limit "
        "dataset.batch_size"
    )
