"""The range test and the search for a batch size: their results, and that they leave no trace."""

import copy
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import Patch, refused
from in_process import events, train
from prepared import Batches, prepared
from torch import Tensor, nn
from vocabulary import differing

from mpframe import Backoff, LogMax, Trainer
from mpframe.core.errors import ConfigError, MpframeError, UserCodeError
from mpframe.core.objective import StepOutput
from mpframe.lab.find.batch_size import find_batch_size
from mpframe.lab.find.lr import RangeTest, analyse, find_lr
from mpframe.training.callbacks.ema import Ema
from mpframe.training.callbacks.schedules import Schedules, warmup_cosine


def batches(count: int = 8) -> Batches:
    made = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 16, 8, generator=made)
    return Batches(zip(inputs, inputs[:, :, :3].argmax(-1), strict=True))


class Limited(nn.Module):
    """Counts its calls in a buffer that no state holds; asks for too much for a large batch."""

    limit = 10**9

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        torch.empty(2**55 if len(x) > self.limit else 1)  # the real allocator, in a user's model
        self.calls += 1
        return x + random.random() + float(np.random.rand())


def trainer_of(mode: str, kind: Any) -> Trainer:
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    layers = nn.Linear(8, 32), Limited(), nn.BatchNorm1d(32), nn.Dropout(), nn.Linear(32, 3)
    trainer = prepared(
        nn.Sequential(*layers), nn.CrossEntropyLoss(), mode,
        optimizer=lambda p: torch.optim.Adam(p, lr=0.01),
        scaler=kind and kind(2.0**18),  # Its first steps overflow.
    )  # fmt: skip
    optimizer: Any = trainer.optimizer
    schedule = warmup_cosine(optimizer.optimizer, 100)
    masters = {p: optimizer.master_of(p) for p in trainer.model.parameters()}
    averages = Ema(trainer.model, masters, 0.99)
    trainer.algorithms = {"schedule": Schedules(schedule), "ema": averages}
    trainer.callbacks = {"never": object()}  # Whoever calls it fails.
    trainer.model.eval()
    return trainer


def everything(trainer: Trainer) -> list[Any]:
    """All that a measurement must leave as it was, copied."""
    generators = random.getstate(), repr(np.random.get_state()), torch.get_rng_state()
    modes = [module.training for module in trainer.model.modules()]
    parts = [id(own) for own in (trainer.scaler, trainer.algorithms, trainer.callbacks)]
    weights = trainer.model.state_dict(), trainer.model[1].calls  # type: ignore[index]
    return copy.deepcopy([trainer.state_dict(), weights, generators, modes, parts])


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("fp32", None), ("mixed", Backoff), ("mixed", LogMax), ("amp", Backoff)],
)
def test_a_range_test_suggests_a_rate_that_learns_and_leaves_no_trace(mode: str, kind: Any) -> None:
    trainer = trainer_of(mode, kind)
    before = everything(trainer)
    test = find_lr(trainer, batches(), 0.01, low=1e-6, steps=80)
    assert differing(before, everything(trainer)) == []
    assert 1e-3 < (test.suggestion or 0) < 0.3
    assert all(test.applied) is (kind is None)  # Skips at the start do not end it.


def curve(losses: Any, skipped: Any = False) -> RangeTest:
    losses = np.array(losses, float)
    rates, applied = np.geomspace(1e-5, 1.0, len(losses)), ~(np.zeros(len(losses), bool) | skipped)
    return analyse(rates, [*zip(losses.tolist(), applied.tolist(), strict=True)])


def test_the_suggestion_is_where_half_of_the_fall_is_done_without_skipped_steps() -> None:
    steep = 3.0 - 2.0 / (1.0 + np.exp(-np.linspace(-10, 10, 101)))
    half = pytest.approx(10**-2.5, rel=0.15)
    assert [curve(a * steep + b).suggestion for a, b in [(1, 0), (10, 0), (1, -50)]] == [half] * 3
    worse_later = np.r_[steep, 2 + np.arange(20)]
    assert curve(worse_later).suggestion == pytest.approx(1e-5 ** (1 - 50 / 120), rel=0.3)
    skipped = np.arange(101) % 7 == 0
    test = curve(np.where(skipped, np.where(np.arange(101) % 2, np.inf, 1e6), steep), skipped)
    assert test.suggestion == half
    assert "15 of them skipped" in test.says


def test_noise_suggests_nothing() -> None:
    found = [curve(2 + np.random.default_rng(n).normal(0, 0.1, 100)).suggestion for n in range(20)]
    assert sum(rate is not None for rate in found) <= 2
    assert curve(np.full(50, np.nan), True).suggestion is None


@pytest.mark.parametrize("lost", [math.nan, 1e6])
def test_rates_of_groups_keep_their_ratio_and_end_where_the_loss_blows_up(lost: float) -> None:
    given: list[list[float]] = []

    def rates() -> list[float]:
        return [float(group["lr"]) for group in trainer.optimizer.param_groups]

    def objective(model: nn.Module, batch: Any) -> StepOutput:
        given.append(rates())
        loss = lost if given[-1][0] > 0.5 else -1.0
        return StepOutput(sum(p.sum() for p in model.parameters()) * 0 + loss, count=1)

    def two_groups(parameters: Any) -> Any:
        weight, bias = parameters
        return torch.optim.SGD([{"params": weight, "lr": 0.1}, {"params": bias, "lr": 0.02}])

    trainer = prepared(nn.Linear(1, 1), objective, optimizer=two_groups)
    test = find_lr(trainer, Batches([0]), 0.1, low=1e-3, high=10, steps=50)
    assert ", blown up" in test.says
    assert 0.5 < test.rates[-1] < 2
    assert [rate for rate, _ in given] == pytest.approx(list(test.rates))
    assert [rate for _, rate in given] == pytest.approx(list(test.rates / 5))
    assert rates() == [0.1, 0.02]


def test_only_memory_ends_the_search_for_the_largest_batch(monkeypatch: Patch) -> None:
    trainer = trainer_of("mixed", Backoff)
    limited: Any = trainer.model[1]  # type: ignore[index]
    load = lambda n: [t[:1].expand(n, *t.shape[1:]) for t in batches(64)[0]]  # noqa: E731
    before = everything(trainer)
    for limited.limit, first, *found in (
        (63, 16, 48, 64), (10**9, 300, 1000, 1001), (100, 16, 96, 128), (5, 16, 4, 6),
        (2, 16, 2, 3), (200, 3, 192, 288),
    ):  # fmt: skip
        assert find_batch_size(trainer, load, first, 1000) == tuple(found)
    limited.limit = 0
    said = refused(MpframeError, find_batch_size, trainer, load, 8, 100)
    assert "not even one sample" in said
    assert differing(before, everything(trainer)) == []
    broken = prepared(nn.Linear(9, 3), nn.CrossEntropyLoss())
    assert "mat1 and mat2" in refused(UserCodeError, find_batch_size, broken, load, 2, 100)
    limited.limit = 10**9
    monkeypatch.setattr("mpframe.lab.find.batch_size.peak_memory", lambda: 2**60)
    assert find_batch_size(trainer, load, 8, 100) == (8, 12)  # A CPU is not filled.


BATCH_SIZE = ["trainer.find=batch_size", "dtype=fp32"]


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (300, "dataset.batch_size=168 (two steps of 256 fit and 384 did not; a third is left)"),
        (9999, "all 1437 training samples fit, so memory does not limit dataset.batch_size"),
    ],
)
def test_a_third_is_left(limit: int, said: str, tmp_path: Path, monkeypatch: Patch) -> None:
    step = Trainer.accumulate_losses

    def train_step(trainer: Any, *rest: Any) -> Any:
        if len(rest[-1][0][0]) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(trainer, *rest)

    monkeypatch.setattr(Trainer, "accumulate_losses", train_step)
    reason = train(tmp_path, *BATCH_SIZE, "model=mlp").reason
    assert reason == f"trainer.find=batch_size: {said}"


def test_a_stream_has_a_bound_as_well(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("mpframe.lab.find.batch_size._MOST_OF_A_STREAM", 128)
    words = ["model=own", "model._target_=torch.nn.Linear", "+model.in_features=1"]
    words += ["dataset=own", "dataset._target_=ranked.stream", "+model.out_features=1"]
    reason = train(tmp_path, *BATCH_SIZE, *words, "scheduler=none").reason or ""
    assert reason.startswith("trainer.find=batch_size: 128 samples of the stream fit, so memory")


def test_a_run_that_finds_a_rate_says_it_and_trains_nothing(tmp_path: Path) -> None:
    summary = train(tmp_path, "trainer.find=lr", "dtype=fp32", "model=mlp")
    assert (summary.status, summary.steps, summary.train_loss) == ("finished", 0, None)
    assert (summary.reason or "").startswith("trainer.find=lr: optimizer.lr=")
    assert "100 steps from 1e-07 to " in (summary.reason or "")
    assert not (tmp_path / "checkpoints").exists()
    assert (tmp_path / "find_lr.png").read_bytes()[:4] == b"\x89PNG"
    assert events(tmp_path).Images("find/lr")[0].step == 0


def test_what_cannot_be_found_is_refused(tmp_path: Path) -> None:
    for words, said in (
        ("resume=auto", "lr: measures in one process and before the first step"),
        ("optimizer=own optimizer._target_=torch.optim.LBFGS dtype=fp32",
         "lr: the optimizer evaluates the loss itself"),
        ("experiment=digits_gan", "lr: there are several losses"),
    ):  # fmt: skip
        given = "trainer.find=lr", *words.split()
        assert refused(ConfigError, train, tmp_path, *given).startswith(f"trainer.find={said}")
