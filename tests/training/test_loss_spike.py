"""Loss spikes: when a loss is one, what each policy does, and what is remembered."""

import copy
import logging
import math
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vocabulary import differing

from mpframe import Backoff, Precision, Trainer
from mpframe.core.errors import CheckpointError, DivergedError
from mpframe.core.objective import supervised
from mpframe.core.step_result import StepResult
from mpframe.training.callbacks.ema import AverageWeights, Ema
from mpframe.training.callbacks.guards import SkipGuard
from mpframe.training.callbacks.loss_spike import LEAST, WINDOW, LossSpikes


def after(losses: list[float], policy: str = "skip", factor: float = 4.0) -> LossSpikes:
    spikes = LossSpikes(policy, factor)
    for loss in losses:
        spikes.remember(torch.tensor(loss))
    return spikes


def verdict(spikes: LossSpikes, loss: float) -> bool:
    return bool(spikes.judge(torch.tensor(loss)))


@pytest.mark.parametrize(
    ("losses", "loss", "spike"),
    [
        ([1.0, 2.0, 3.0] * 5, 8.0, False),  # four times the median
        ([1.0, 2.0, 3.0] * 5, 8.0 * (1 + 2.0**-23), True),
        ([1.0] * (LEAST - 1), 1e9, False),  # Nothing is judged before ten applied steps,
        ([1.0] * LEAST, 1e9, True),
        ([1.0] * LEAST, math.nan, False),
        ([1.0] * LEAST, math.inf, False),
        ([0.0] * LEAST, 1e9, False),  # nor around zero.
        ([-1.0] * LEAST, 1e9, False),
    ],
)
def test_a_spike_is_above_the_factor_times_the_median(
    losses: list[float], loss: float, spike: bool
) -> None:
    assert verdict(after(losses), loss) == spike


def test_the_median_is_of_the_last_fifty() -> None:
    spikes = after([100.0] * WINDOW + [1.0] * (WINDOW // 2 + 1))
    spikes.judge(torch.tensor(1.0))
    assert float(spikes.median) == 1.0
    assert spikes.state_dict()["spikes"].tolist() == [100.0] * (WINDOW // 2 - 1) + [1.0] * (
        WINDOW // 2 + 1
    )


@pytest.mark.parametrize("state", [[1.0], torch.zeros(WINDOW + 1), torch.zeros(2, 2), 3])
def test_another_state_is_refused(state: Any) -> None:
    with pytest.raises(CheckpointError, match=r"callbacks\.loss_spikes: the saved losses are not"):
        LossSpikes("skip", 4.0).load_state_dict({"spikes": state})


Batch = tuple[Tensor, Tensor]


def batch(seed: int, size: float = 1.0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(8, 6, generator=generator)
    return inputs, size * inputs[:, :1]


def make_trainer(mode: str = "fp32", half: str = "float16", policy: str = "skip") -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    plain = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    precision = Precision(mode, half)
    model, masters = precision.prepare(model, plain)
    ema = Ema({p: masters.master_of(p) for p in model.parameters()}, 0.9)
    return Trainer(
        model, masters, supervised(nn.MSELoss()), precision=precision,
        scaler=Backoff(init_scale=16.0),
        algorithms={"ema": AverageWeights(ema, model), "spikes": LossSpikes(policy, 10.0)},
    )  # fmt: skip


def warmed_up(trainer: Trainer) -> Trainer:
    for seed in range(12):
        trainer.train_step(batch(seed))
    return trainer


def stepped(trainer: Trainer, *batches: Batch) -> StepResult:
    """The step's result, if it ends the run as well."""
    results: list[StepResult] = []
    step = trainer.optimizer.step
    with pytest.MonkeyPatch.context() as patch, suppress(DivergedError):
        patch.setattr(
            trainer.optimizer, "step", lambda *a, **kw: results.append(step(*a, **kw)) or results[0]
        )
        trainer.train_step(*batches)
    return results[0]


@pytest.mark.parametrize(
    ("mode", "half", "policy", "window"),
    [
        ("fp32", "float16", "stop", 2),
        ("mixed", "float16", "skip", 1),
        ("mixed", "bfloat16", "stop", 1),
        ("amp", "bfloat16", "skip", 2),
    ],
)
def test_a_spike_that_is_left_out_changes_nothing_but_the_scaler(
    mode: str, half: str, policy: str, window: int
) -> None:
    trainer = warmed_up(make_trainer(mode, half, policy))
    before = copy.deepcopy(trainer.state_dict())
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    result = stepped(trainer, *[batch(99, 40.0)] * window)
    assert bool(result.skipped)
    assert bool(torch.isfinite(result.amax))
    changed = differing(before, trainer.state_dict())
    assert {path for path in changed if "/scaler/" not in path} == {
        "/progress/skipped",
        "/progress/skipped_in_a_row",
    }
    for now, then in zip(trainer.model.parameters(), weights, strict=True):
        assert torch.equal(now, then)


def test_a_spike_of_which_a_run_only_warns_is_a_step_as_any() -> None:
    trainer, unwatched = (warmed_up(make_trainer(policy=policy)) for policy in ("warn", "off"))
    for one in (trainer, unwatched):
        assert not bool(one.train_step(batch(99, 40.0)).skipped)
    first, second = trainer.state_dict(), unwatched.state_dict()
    assert differing(first | {"spikes": None}, second | {"spikes": None}) == []


def test_the_state_of_the_judge_is_in_the_trainers() -> None:
    trainer, resumed = warmed_up(make_trainer()), make_trainer()
    resumed.load_state_dict(copy.deepcopy(trainer.state_dict()))
    assert differing(trainer.state_dict(), resumed.state_dict()) == []
    assert bool(resumed.train_step(batch(99, 40.0)).skipped)


@pytest.mark.parametrize(("policy", "ending"), [("warn", "steps"), ("skip", "; skipped")])
def test_a_spike_is_told(policy: str, ending: str, caplog: pytest.LogCaptureFixture) -> None:
    trainer = warmed_up(make_trainer(policy=policy))
    with caplog.at_level(logging.WARNING):
        trainer.train_step(batch(99, 40.0))
    (message,) = caplog.messages
    assert message.startswith("warning: step 13: loss ")
    assert "is a spike, more than 10 times the median" in message
    assert message.endswith(ending)
    caplog.clear()
    trainer.train_step(batch(3))
    assert caplog.messages == []


def test_a_spike_ends_the_run_where_that_is_the_policy() -> None:
    trainer = warmed_up(make_trainer(policy="stop"))
    line = r"^callbacks\.loss_spikes\.policy=stop: step 13: loss .* is a"
    with pytest.raises(DivergedError, match=line):
        trainer.train_step(batch(99, 40.0))


def test_a_loss_that_stays_high_ends_at_the_guard() -> None:
    trainer, guard = warmed_up(make_trainer()), SkipGuard(60)
    for _ in range(59):
        guard.on_optimizer_step(trainer, trainer.train_step(batch(99, 40.0)))
    last = trainer.train_step(batch(99, 40.0))
    with pytest.raises(DivergedError, match="the loss stays above 10 times the median"):
        guard.on_optimizer_step(trainer, last)
    assert trainer.progress.skipped == 60
