"""The step as one graph makes the same steps as op by op, from a record for each kind of step."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled import OVERFLOW, Model, batches, calm, net, run, trainer
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from vocabulary import differing

from mpframe import Backoff, LogMax, Trainer
from mpframe.core.objective import StepOutput
from mpframe.training import compiled_step
from mpframe.training.callbacks.ema import AverageWeights, Ema
from mpframe.training.callbacks.schedules import Schedules
from mpframe.training.compiled_step import CompiledTrainer


def both(windows: list[Any], options: Callable[[], dict[str, Any]]) -> tuple[Any, Any]:
    """Take the steps op by op and compiled. They have the same bits."""
    plain, compiled = (trainer(cls, **options()) for cls in (Trainer, CompiledTrainer))
    assert differing(run(plain, windows), run(compiled, windows)) == []
    assert differing(plain.state_dict(), compiled.state_dict()) == []
    return plain, compiled


@pytest.mark.parametrize("clip", [None, 0.25])
@pytest.mark.parametrize(
    ("mode", "half", "scaler"),
    [
        ("fp32", "float16", None),
        ("amp", "bfloat16", None),
        ("mixed", "bfloat16", None),
        ("amp", "float16", Backoff),
        ("mixed", "float16", Backoff),
        ("mixed", "float16", partial(Backoff, hysteresis=2, growth_interval=2)),
        ("mixed", "float16", LogMax),
    ],
)
def test_a_record_makes_the_steps_of_the_trainer(op_by_op, mode, half, scaler, clip) -> None:
    """With one skipped, a rate that changes, an average of the weights, dropout and BatchNorm."""
    ended = []
    for cls in (Trainer, CompiledTrainer):
        made = trainer(cls, mode, half=half, scaler=scaler and scaler(), plan={"clip_norm": clip})
        schedule = StepLR(made.optimizer, 2, gamma=0.5)
        masters = {p: made.optimizer.master_of(p) for p in made.model.parameters()}
        average = AverageWeights(Ema(masters, 0.99), made.model)
        made.algorithms |= {"schedule": Schedules(schedule), "ema": average}
        ended.append((run(made, [[batch] for batch in batches()]), made.state_dict()))
        assert made.progress.skipped >= 1
    assert differing(*ended) == []
    assert made.optimizer.param_groups[0]["lr"] == 2.0 ** (-4 - made.progress.steps // 2)
    assert len(made._records) == len(made._confirmed) == 1


def test_a_skipped_step_changes_nothing_but_the_scale(op_by_op) -> None:
    made = trainer(CompiledTrainer, "mixed", scaler=Backoff(), optimizer=torch.optim.AdamW)
    good, bad = batches()[0], batches()[OVERFLOW]
    run(made, [[good], [good], [good]])
    before = {n: t.clone() for n, t in enumerate(made._undone() + list(made.model.buffers()))}
    run(made, [[bad]])
    assert differing(before, dict(enumerate(made._undone() + list(made.model.buffers())))) == []
    assert made.scaler.scale == 2.0**15
    assert made.progress.skipped == 1


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        *[(name, False) for name in ("Adam", "AdamW", "Adamax", "NAdam", "RMSprop", "Adagrad")],
        *[(name, True) for name in ("Adam", "AdamW", "Adagrad")],
    ],
)
def test_an_optimizer_counts_its_steps_in_tensors(op_by_op, name, fused) -> None:
    """A plain optimizer computes 1 - b^t in float64, a recorded one in float32. For b = 0.999 and t
    = 1 that is 0.001, rounded to 2^-24: 6e-5 of it, and 3e-5 of its root. No step moves a weight by
    more than 10 rates here, so n steps by n * 10 * 3e-5 rates. Its kernels do the same if fused."""
    rate, steps = 2.0**-7, 9
    make = partial(getattr(torch.optim, name), lr=rate, **({"fused": True} if fused else {}))
    plain, compiled = (trainer(cls, optimizer=make) for cls in (Trainer, CompiledTrainer))
    for one in (plain, compiled):
        run(one, [[batch] for batch in batches(steps)])
    for this, other in zip(plain.model.parameters(), compiled.model.parameters(), strict=True):
        assert torch.equal(this, other) or not fused
        assert (this - other).abs().max() <= steps * 10 * 3e-5 * rate
    assert len(compiled._confirmed) == 1


def test_each_shape_of_batch_has_a_record(op_by_op, monkeypatch, caplog) -> None:
    """The last batch of an epoch is short; and a window may hold one."""
    monkeypatch.setattr(compiled_step, "_MOST", 3)
    whole, short, odd = batches(6), batches(6, 7), batches(6, 5)
    windows = [[b] for pair in zip(whole, short, strict=True) for b in pair]
    windows += [[whole[0], short[0]], [whole[1], short[OVERFLOW]], [whole[2], short[2]]]
    _, compiled = both(
        [*windows, [odd[0]], [odd[1]], *windows], lambda: {"mode": "mixed", "scaler": Backoff()}
    )
    assert len(compiled._records) == len(compiled._confirmed) == 3
    assert caplog.messages == [
        "warning: trainer.compile=step: 3 kinds of step are compiled, and all others run op by op: "
        "batches differ in shape, or settings of model or optimizer change"
    ]


def test_a_tensor_that_a_batch_holds_twice(op_by_op) -> None:
    def objective(model: nn.Module, batch: Any) -> StepOutput:
        return StepOutput(F.mse_loss(model(batch["x"]), batch["y"]))

    x, y = torch.rand(3, 8), torch.rand(3, 8)
    steps = [[{"x": x, "y": other}] for other in (x, y, x, y, x, y)]
    _, compiled = both(steps, lambda: {"objective": objective, "model": net(8)})
    assert len(compiled._records) == 2


def test_what_other_code_does_between_steps_counts(op_by_op) -> None:
    ended = []
    for cls in (Trainer, CompiledTrainer):
        made = trainer(cls, "mixed", scaler=Backoff())
        run(made, [[batch] for batch in batches(4)])
        with torch.no_grad():
            made.model[4].weight.mul_(0.5)
        made.model[0].weight.requires_grad_(False)
        run(made, [[batch] for batch in batches(4)])
        made.optimizer.param_groups[0]["momentum"] = 0.5
        run(made, [[batch] for batch in batches(4)])
        made.model[1].eval()
        found = [made.train_step(batch).loss for batch in batches(4)]
        ended.append((found, made.state_dict()))
    assert differing(*ended) == []
    assert len(made._records) == 4


class Weighted:
    """A loss beside a penalty on the outputs, whose weight is a number of the model or its own."""

    def __init__(self) -> None:
        self.share, self.loss = 0.0, nn.CrossEntropyLoss()

    def __call__(self, model: Any, batch: Any) -> StepOutput:
        outputs = model(batch[0])
        share = self.share + model.share
        return StepOutput(self.loss(outputs, batch[1]) + share * outputs.square().mean())

    def called(self, model: Any, batch: Any) -> StepOutput:
        return self(model, batch)


def clip_more(made: Any) -> None:
    made.plan = replace(made.plan, clip_norm=2.0**-7)


def smooth(made: Any) -> None:
    made.objectives[0].objective.loss.label_smoothing = 0.5


def set_share(made: Any) -> None:
    made.objectives[0].objective.__self__.share = 1.0


def double(module: Any, inputs: Any, output: Tensor) -> Tensor:
    return output * 2


CHANGES: dict[str, Callable[[Any], Any]] = {
    "number": lambda made: setattr(made.model, "share", 1.0),
    "probability": lambda made: setattr(made.model[3], "p", 0.75),
    "hook": lambda made: made.model[0].register_forward_hook(double),
    "module": lambda made: setattr(made.model, "2", nn.Tanh()),
    "loss": smooth,
    "objective": set_share,
    "plan": clip_more,
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_other_code_changes_in_python_has_a_record_of_its_own(op_by_op, what: str) -> None:
    ended = []
    for cls in (Trainer, CompiledTrainer):
        weighted, model = Weighted(), net()
        model.share = 0.0  # type: ignore[assignment]
        objective = weighted.called if what == "objective" else weighted
        made = trainer(cls, model=model, objective=objective)
        found = run(made, calm(4))
        CHANGES[what](made)
        ended.append((found + run(made, calm(4)), made.state_dict()))
    assert differing(*ended) == []
    assert len(made._records) == len(made._confirmed) == 2


def test_an_attribute_that_is_set_to_its_value_is_no_change(op_by_op) -> None:
    made = trainer(CompiledTrainer)
    for number, window in enumerate(calm(4)):
        made.model[3].p = float("0.2")  # Another object.
        made.model.late = "x" * (number > 9)
        run(made, [window])
    assert len(made._records) == 1


def test_a_resumed_run_goes_on_exactly(op_by_op) -> None:
    """Its first step is recorded, as the state of its optimizer is there."""
    make = partial(trainer, CompiledTrainer, "mixed", optimizer=torch.optim.AdamW)
    windows = [[batch] for batch in batches(12)]
    whole, first, second = make(scaler=LogMax()), make(scaler=LogMax()), make(scaler=LogMax())
    run(whole, windows[:6])
    run(first, windows[:6])
    second.load_state_dict(first.state_dict())
    assert differing(run(whole, windows[6:]), run(second, windows[6:])) == []
    assert differing(whole.state_dict(), second.state_dict()) == []


def start_from_one(model: Any, x: Tensor, y: Tensor) -> Tensor:
    total = torch.tensor(1.0)
    total += y.detach().abs().sum()
    return y * total


@pytest.mark.parametrize("end", [start_from_one, lambda _, x, y: y[torch.arange(len(y))]])
def test_a_constant_is_new_in_each_step(op_by_op, end) -> None:
    both(calm(4), lambda: {"model": Model(end)})


def test_a_step_that_writes_into_its_batch_does_so_once(op_by_op) -> None:
    """A recorded step is undone and run again, on the batch that it was given."""
    ended = []
    for cls in (Trainer, CompiledTrainer):
        made = trainer(cls, model=Model(lambda model, x, y: model.layer(x.mul_(4))))
        windows = calm(4)
        ended.append((run(made, windows), made.state_dict(), windows))
    assert differing(*ended) == []


# What a graph of fused ops may do: leave out roundings to half, and add in another order.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "half", "scaler"),
    [("fp32", "float16", None), ("amp", "bfloat16", None), ("mixed", "float16", LogMax)],
)
def test_inductor_makes_the_same_steps(mode, half, scaler) -> None:
    """R = 16 roundings of size u, half a unit in the last place, on the way to a loss, so n R u
    max|loss| after n steps. Whether a step is skipped, its scale and the rate are equal, and so is
    dropout, which draws the numbers of torch."""
    plain, compiled = ended = [
        trainer(cls, mode, half=half, scaler=scaler and scaler(), plan={"clip_norm": 0.25})
        for cls in (Trainer, CompiledTrainer)
    ]
    for made in ended:
        made.algorithms["schedule"] = Schedules(StepLR(made.optimizer, 2, gamma=0.5))
    results = [run(made, [[batch] for batch in batches()]) for made in ended]
    u = torch.finfo(torch.float32 if mode == "fp32" else getattr(torch, half)).eps / 2
    most = max(float(result["loss"].nan_to_num(0.0)) for result in results[0])
    for step, (one, other) in enumerate(zip(*results, strict=True), 1):
        assert one["verdict"] == other["verdict"]
        assert one["scale"] == other["scale"]
        if not one["verdict"].skipped:
            assert abs(one["loss"] - other["loss"]) <= step * 16 * u * most
    assert compiled.model[1].num_batches_tracked == plain.model[1].num_batches_tracked == 8
    before = [tensor.clone() for tensor in compiled._undone()]
    assert compiled.train_step(batches()[OVERFLOW]).known.skipped
    assert differing(before, compiled._undone()) == []
