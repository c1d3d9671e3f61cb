"""What follows a run: its best validation, early stopping, loss spikes, and averages of weights."""

import copy
import math
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures import Log, refused
from prepared import prepared
from torch import Tensor, nn
from vocabulary import differing, same_bits

from mpframe import Backoff, Trainer
from mpframe.checkpoint.state import weights_of
from mpframe.core.errors import CheckpointError, ConfigError, DivergedError
from mpframe.training.callbacks.ema import Ema
from mpframe.training.callbacks.guards import LEAST, WINDOW, EarlyStopping, LossSpikes, SkipGuard
from mpframe.training.evaluation import Best, Evaluation
from mpframe.training.plan import Progress
from mpframe.training.results import Results

NAN = math.nan


def told(callback: Any, values: list[float], higher: bool | None = True) -> Any:
    trainer = SimpleNamespace(progress=Progress(), stop_reason=None)
    trainer.stop = lambda reason: vars(trainer).update(stop_reason=reason)
    for trainer.progress.steps, value in enumerate(values, start=1):
        done = Evaluation(1.0 - value, {"accuracy": value}, {"accuracy": higher}, "accuracy")
        callback.on_evaluate(trainer, done)
        if trainer.stop_reason is not None:
            break
    return trainer


@pytest.mark.parametrize(("values", "higher", "best"), [
    ([0.1, 0.3, 0.2], True, (0.3, 2)),
    ([0.1, 0.3, 0.2], False, (0.1, 1)),
    ([0.3, 0.3], True, (0.3, 1)),  # Of equal ones the first.
    ([NAN, 0.2, NAN], True, (0.2, 2)),
    ([NAN], True, (None, None)),
    ([0.1, 0.2], None, (None, None)),  # A metric without a direction has no best.
])  # fmt: skip
def test_the_best_value_and_its_step(values: list[float], higher: bool, best: object) -> None:
    first, resumed = Results(), Results()
    told(first, values, higher)
    resumed.load_state_dict(first.state_dict())
    kept = resumed.best
    assert (kept.value, kept.step) == best
    assert kept.offer("loss", 2.0, 20, higher_is_better=False)  # Another metric begins anew.
    assert kept == Best("loss", 2.0, 20)


@pytest.mark.parametrize(("values", "options", "higher", "stops"), [
    ([0.1, 0.2, 0.3, 0.4], {"patience": 1}, True, None),
    ([0.1, 0.2, 0.2, 0.1], {"patience": 2}, True, 4),
    ([0.1, 0.2, 0.1, 0.3, 0.3, 0.3], {"patience": 2}, True, 6),
    ([0.0, 0.25, 0.5, 0.75], {"patience": 1, "min_delta": 0.25}, True, 2),
    ([0.0, 0.5, 1.0], {"patience": 1, "min_delta": 0.25}, True, None),
    ([NAN, 0.1, NAN, NAN], {"patience": 2}, True, 4),
    ([0.3, 0.2, 0.1, 0.2], {"patience": 1}, False, 4),
    ([0.1, 0.2, 0.1], {"patience": 1, "monitor": "loss"}, None, 3),
])  # fmt: skip
def test_more_is_better_or_less_as_said(values: Any, options: Any, higher: Any, stops: Any) -> None:
    trainer = told(EarlyStopping(**options), values, higher)
    assert (trainer.stop_reason and trainer.progress.steps) == stops


def test_the_reason_names_the_best_and_a_resumed_run_stays_stopped_unless_patience_grew() -> None:
    words = "early stopping: val_accuracy was not better than {}, validations since then: 2"
    assert told(EarlyStopping(patience=2), [NAN, NAN]).stop_reason == words.format("nan")
    first = EarlyStopping(patience=2)
    assert told(first, [0.25, 0.5, 0.25, 0.125]).stop_reason == words.format("0.5 (step 2)")
    for patience, stopped in ((2, True), (3, False)):
        trainer, again = told(None, []), EarlyStopping(patience=patience)
        again.load_state_dict(first.state_dict())
        again.setup(trainer, SimpleNamespace())
        assert (trainer.stop_reason is not None) is stopped
        assert again.state_dict() == first.state_dict()


@pytest.mark.parametrize(("options", "higher", "line"), [
    ({"patience": 0}, True, "patience=0: must be a whole number >= 1"),
    ({"min_delta": -1.0}, True, "min_delta=-1.0: must be a finite number >= 0"),
    ({"monitor": "acuracy"}, True, "monitor=acuracy: must be one of accuracy, loss"),
    ({}, None, "monitor=accuracy: the metric does not say which value is better; give it "
     "higher_is_better = True or False, or monitor loss"),
])  # fmt: skip
def test_what_cannot_be_watched_is_refused(options: Any, higher: bool | None, line: str) -> None:
    said = refused(ConfigError, lambda: told(EarlyStopping(**options), [0.5], higher))
    assert said == f"callbacks.early_stopping.{line}"


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
    ema = Ema(
        trainer.model, {p: trainer.optimizer.master_of(p) for p in trainer.model.parameters()}, 0.9
    )
    trainer.algorithms = {"ema": ema, "spikes": LossSpikes(policy, 10.0)}
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
    mode: str, half: str, policy: str, window: int, caplog: Log
) -> None:
    trainer = warmed_up(mode, half, policy)
    before, weights = copy.deepcopy((trainer.state_dict(), list(trainer.model.parameters())))
    if policy == "stop":
        with pytest.raises(DivergedError, match=r"^callbacks\.loss_spikes\.policy=stop: step 13"):
            trainer.train_step(*[SPIKE] * window)
    else:
        assert trainer.train_step(*[SPIKE] * window).skipped
        assert caplog.messages[-1].endswith("; skipped")
    changed = differing(before, trainer.state_dict())
    counts = {"/progress/skipped", "/progress/skipped_in_a_row"}
    assert {path for path in changed if "/scaler/" not in path} == counts
    assert same_bits(trainer.model.parameters(), weights)


def test_a_spike_is_told_and_a_step_if_a_run_warns(caplog: Log) -> None:
    warning, unwatched = (warmed_up(policy=policy) for policy in ("warn", "off"))
    for one in (warning, unwatched):
        assert not one.train_step(SPIKE).skipped
        one.train_step(batch(3))
    assert differing(*(one.state_dict() | {"spikes": None} for one in (warning, unwatched))) == []
    (message,) = caplog.messages
    assert message.startswith("warning: step 13: loss ")
    assert "is a spike, more than 10 times the median" in message


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


def average_of(weight: nn.Parameter, master: Tensor, decay: float) -> Ema:
    return Ema(nn.ParameterDict({"weight": weight}), {weight: master}, decay)


@pytest.mark.parametrize("decay", [0.0625, 0.15, 0.99])
def test_the_average_follows_its_equation_and_the_decay_is_warmed_up(decay: float) -> None:
    """min(d, (1 + t) / (10 + t)), from t = 0 again after a restart."""
    weight = nn.Parameter(torch.tensor([1.0]))
    ema = average_of(weight, weight, decay)
    for step in [*range(40), *range(3)]:
        if step == 0:
            ema.on_load_weights(None)
            expected = weight.detach().clone()
        weight.data.fill_(float(step))
        ema.update()
        expected = torch.lerp(expected, weight.detach(), 1.0 - min(decay, (1 + step) / (10 + step)))
        assert torch.equal(ema.by_name()["weight"], expected)
        assert ema.updates == step + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_with_the_verdict_on_the_device_the_numbers_are_the_same(dtype: torch.dtype) -> None:
    """Where the first step is known on the host, as a fused optimizer's is, and where it is not."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(1000, dtype=dtype))
    known, told, mixed = (average_of(weight, weight, 0.5) for _ in range(3))  # reached after 8
    for step in range(30):
        weight.data = torch.randn(1000, dtype=dtype)
        skipped = step % 3 == 1
        if skipped:
            weight.data[0] = torch.inf
        else:
            known.update()
        told.update(torch.tensor(skipped))
        mixed.update(None if step == 0 else torch.tensor(skipped))
    for ema in (told, mixed):
        assert torch.equal(ema.by_name()["weight"], known.by_name()["weight"])
        assert ema.updates == known.updates == 20


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_it_is_kept_in_fp32_and_rounded_and_held_in_range_for_use(half: torch.dtype) -> None:
    """As the weights are in training: 70000 is 65504 in float16, not inf."""
    beyond = 70000.0 if half == torch.float16 else torch.finfo(torch.float32).max
    master, limit = torch.tensor([1.0, beyond, -beyond]), torch.finfo(half).max
    weight = nn.Parameter(torch.zeros(3, dtype=half))
    ema = average_of(weight, master, 0.0625)
    master[0].add_(2.0**-12)
    ema.update()
    expected = torch.tensor([1.0 + 2.0**-12 - 2.0**-16, beyond, -beyond])
    assert torch.equal(ema.by_name()["weight"], expected)
    weight.data.fill_(2.0)
    with suppress(KeyboardInterrupt), ema.evaluating(None):
        assert (weight.tolist(), weight.dtype) == ([1.0, limit, -limit], half)
        raise KeyboardInterrupt
    assert (weight.tolist(), weight.dtype) == ([2.0] * 3, half)
    assert torch.equal(master, torch.tensor([1.0 + 2.0**-12, beyond, -beyond]))


def test_averages_are_saved_and_loaded_by_name() -> None:
    """In whatever order the parameters were given; a frozen one has none. Others are refused."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    weights = [model[1].weight, model[0].weight]
    saved = Ema(model, {weight: weight for weight in weights}, 0.5).by_name()
    assert sorted(saved) == ["0.weight", "1.weight"]
    assert torch.equal(saved["0.weight"], model[0].weight)
    other = Ema(model, {weight: torch.zeros_like(weight) for weight in weights[::-1]}, 0.5)
    other.load_by_name(saved)
    for theirs in ({**saved, "0.weight": torch.ones(2, 3)}, {"weight": saved["0.weight"]}):
        with pytest.raises(CheckpointError, match="the saved averages are of other weights"):
            other.load_by_name(theirs)
    assert all(torch.equal(average, saved[n]) for n, average in other.by_name().items())
    for decay in (0.0, float("nan")):
        with pytest.raises(ConfigError, match=r"trainer\.ema_decay=.*: must be a number > 0 and <"):
            Ema(model, {}, decay)


def test_each_name_of_a_tied_weight_has_its_average_in_an_export() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    model["head"].weight = weight = model["embed"].weight
    saved = Ema(model, {weight: torch.zeros_like(weight)}, 0.5).by_name()
    state = {"trainer": {"weights": model.state_dict(), "ema": saved}}
    for average in weights_of(state, "ema", Path("checkpoint")).values():
        assert torch.equal(average, torch.zeros(4, 2))
