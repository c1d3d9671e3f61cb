"""Loss spikes: when a loss is one, what each policy does, and what is remembered."""

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from fixtures import Log
from prepared import prepared
from torch import Tensor, nn
from vocabulary import differing, same_bits

from mpframe import Backoff, Trainer
from mpframe.core.errors import CheckpointError, DivergedError
from mpframe.training.callbacks.ema import AverageWeights, Ema
from mpframe.training.callbacks.guards import LEAST, WINDOW, LossSpikes, SkipGuard


def after(losses: list[float]) -> LossSpikes:
    spikes = LossSpikes("skip", 4.0)
    for loss in losses:
        spikes.remember(torch.tensor(loss))
    return spikes


@pytest.mark.parametrize(("losses", "loss", "spike"), [
    ([1.0, 2.0, 3.0] * 5, 8.0, False),  # four times the median
    ([1.0, 2.0, 3.0] * 5, 8.0 * (1 + 2.0**-23), True),
    ([1.0] * (LEAST - 1), 1e9, False),  # Nothing is judged before ten applied steps,
    ([1.0] * LEAST, 1e9, True),
    ([1.0] * LEAST, math.nan, False),
    ([1.0] * LEAST, math.inf, False),
    ([0.0] * LEAST, 1e9, False),  # nor around zero.
    ([-1.0] * LEAST, 1e9, False),
])  # fmt: skip
def test_a_spike_is_over_factor_times_median(losses: list[float], loss: float, spike: bool) -> None:
    assert bool(after(losses).judge(torch.tensor(loss))) == spike


def test_the_median_is_of_the_last_fifty_and_another_state_is_refused() -> None:
    most = WINDOW // 2 + 1
    spikes = after([100.0] * WINDOW + [1.0] * most)
    spikes.judge(torch.tensor(1.0))
    assert float(spikes.median) == 1.0
    assert spikes.state_dict()["spikes"].tolist() == [100.0] * (WINDOW - most) + [1.0] * most
    for state in ([1.0], torch.zeros(WINDOW + 1), torch.zeros(2, 2), 3):
        with pytest.raises(CheckpointError, match=r"callbacks\.loss_spikes: the saved losses are"):
            spikes.load_state_dict({"spikes": state})


def batch(seed: int, size: float = 1.0) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
    return inputs, size * inputs[:, :1]


SPIKE = batch(99, 40.0)


def warmed_up(
    mode: str = "fp32", half: str = "float16", policy: str = "skip", steps: int = 12
) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    own: Any = {"optimizer": partial(torch.optim.SGD, lr=1e-3, momentum=0.9)}
    trainer = prepared(model, nn.MSELoss(), mode, half, scaler=Backoff(init_scale=16.0), **own)
    ema = Ema({p: trainer.optimizer.master_of(p) for p in trainer.model.parameters()}, 0.9)
    averages = AverageWeights(ema, trainer.model)
    trainer.algorithms = {"ema": averages, "spikes": LossSpikes(policy, 10.0)}
    for seed in range(steps):
        trainer.train_step(batch(seed))
    return trainer


@pytest.mark.parametrize(("mode", "half", "policy", "window"), [
    ("fp32", "float16", "stop", 2),
    ("mixed", "float16", "skip", 1),
    ("mixed", "bfloat16", "stop", 1),
    ("amp", "bfloat16", "skip", 2),
])  # fmt: skip
def test_a_spike_that_is_left_out_changes_nothing_but_the_scaler(
    mode: str, half: str, policy: str, window: int
) -> None:
    trainer = warmed_up(mode, half, policy)
    before, weights = copy.deepcopy((trainer.state_dict(), list(trainer.model.parameters())))
    if policy == "stop":
        with pytest.raises(DivergedError, match=r"^callbacks\.loss_spikes\.policy=stop: step 13"):
            trainer.train_step(*[SPIKE] * window)
    else:
        assert trainer.train_step(*[SPIKE] * window).skipped
    changed = differing(before, trainer.state_dict())
    counts = {"/progress/skipped", "/progress/skipped_in_a_row"}
    assert {path for path in changed if "/scaler/" not in path} == counts
    assert same_bits(trainer.model.parameters(), weights)


@pytest.mark.parametrize(("policy", "ending"), [("warn", "steps"), ("skip", "; skipped")])
def test_a_spike_is_told_and_a_step_if_a_run_warns(policy: str, ending: str, caplog: Log) -> None:
    trainer, unwatched = (warmed_up("fp32", "float16", own) for own in (policy, "off"))
    for one in (trainer, unwatched):
        assert bool(one.train_step(SPIKE).skipped) == (one is trainer and policy == "skip")
        one.train_step(batch(3))
    if policy == "warn":
        states = [one.state_dict() | {"spikes": None} for one in (trainer, unwatched)]
        assert differing(*states) == []
    (message,) = caplog.messages
    assert message.startswith("warning: step 13: loss ")
    assert "is a spike, more than 10 times the median" in message
    assert message.endswith(ending)


def test_a_resumed_run_goes_on_judging_and_a_loss_that_stays_high_ends_at_the_guard() -> None:
    before, trainer, guard = warmed_up(), warmed_up(steps=0), SkipGuard(60)
    trainer.load_state_dict(copy.deepcopy(before.state_dict()))
    assert differing(before.state_dict(), trainer.state_dict()) == []
    for _ in range(59):
        guard.on_optimizer_step(trainer, trainer.train_step(SPIKE))
    last = trainer.train_step(SPIKE)
    with pytest.raises(DivergedError, match="the loss stays above 10 times the median"):
        guard.on_optimizer_step(trainer, last)
    assert trainer.progress.skipped == 60
