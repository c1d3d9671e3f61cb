"""The step as one graph: the same steps as op by op, from a record for each kind of step.

What cannot be one graph is refused: before the first step, or when a step is recorded.
"""

import copy
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compiled import OVERFLOW, Model, batches, calm, net, run, trainer
from fixtures import Patch, refused
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim.lr_scheduler import StepLR
from vocabulary import differing

from mpframe import Backoff, LogMax, Precision, Schedules, Trainer
from mpframe.core.callback import Algorithm
from mpframe.core.errors import ConfigError
from mpframe.core.objective import StepOutput
from mpframe.training.callbacks.ema import Ema
from mpframe.training.callbacks.guards import LossSpikes
from mpframe.training.callbacks.step_hooks import Penalty
from mpframe.training.trainers import compiled_step
from mpframe.training.trainers.compiled_step import CompiledTrainer
from mpframe.training.trainers.lbfgs import ClosureTrainer
from mpframe.training.trainers.step_record import StepRecord


@pytest.fixture
def op_by_op(monkeypatch: Patch) -> None:
    """Run the records themselves: the same ops, so the same bits."""
    monkeypatch.setattr(StepRecord, "compile", lambda record, inputs: None)


def both(windows: list[Any], options: Callable[[], dict[str, Any]]) -> tuple[Any, Any]:
    """Take the steps op by op and compiled. They have the same bits."""
    plain, compiled = (trainer(cls, **options()) for cls in (Trainer, CompiledTrainer))
    assert differing(run(plain, windows), run(compiled, windows)) == []
    assert differing(plain.state_dict(), compiled.state_dict()) == []
    return plain, compiled


@pytest.mark.parametrize(("mode", "half", "scaler", "clip"), [
    ("fp32", "float16", None, 0.25),
    ("amp", "bfloat16", None, None),
    ("mixed", "bfloat16", None, 0.25),
    ("amp", "float16", Backoff, 0.25),
    ("mixed", "float16", Backoff, None),
    ("mixed", "float16", partial(Backoff, hysteresis=2, growth_interval=2), 0.25),
    ("mixed", "float16", LogMax, None),
])  # fmt: skip
def test_a_record_makes_the_steps_of_the_trainer(op_by_op, mode, half, scaler, clip) -> None:
    """With one skipped, a rate that changes, an average of the weights, dropout and BatchNorm."""
    ended = []
    for cls in (Trainer, CompiledTrainer):
        made = trainer(cls, mode, half=half, scaler=scaler and scaler(), plan={"clip_norm": clip})
        schedule = StepLR(made.optimizer, 2, gamma=0.5)
        masters = {p: made.optimizer.master_of(p) for p in made.model.parameters()}
        average = Ema(made.model, masters, 0.99)
        made.algorithms |= {"schedule": Schedules(schedule), "ema": average}
        ended.append((run(made, [[batch] for batch in batches()]), made.state_dict()))
        assert made.progress.skipped >= 1
    assert differing(*ended) == []
    assert made.optimizer.param_groups[0]["lr"] == 2.0 ** (-4 - made.progress.steps // 2)
    assert len(made._records) == len(made._confirmed) == 1


@pytest.mark.parametrize(("name", "fused"), [
    *[(name, False) for name in ("Adam", "AdamW", "Adamax", "NAdam", "RMSprop", "Adagrad")],
    *[(name, True) for name in ("Adam", "AdamW", "Adagrad")],
])  # fmt: skip
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


def objective_of(made: Any) -> Any:
    return made.objectives[0].objective


CHANGES: dict[str, Callable[[Any], Any]] = {
    "number": lambda made: setattr(made.model, "share", 1.0),
    "probability": lambda made: setattr(made.model[3], "p", 0.75),
    "hook": lambda made: made.model[0].register_forward_hook(lambda m, x, output: output * 2),
    "module": lambda made: setattr(made.model, "2", nn.Tanh()),
    "loss": lambda made: setattr(objective_of(made).loss, "label_smoothing", 0.5),
    "objective": lambda made: setattr(objective_of(made).__self__, "share", 1.0),
    "plan": lambda made: setattr(made, "plan", replace(made.plan, clip_norm=2.0**-7)),
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
    windows, whole, resumed = (
        [[b] for b in batches(12)],
        make(scaler=LogMax()),
        make(scaler=LogMax()),
    )
    run(whole, windows[:6])
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    assert differing(run(whole, windows[6:]), run(resumed, windows[6:])) == []
    assert differing(whole.state_dict(), resumed.state_dict()) == []


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


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "half", "scaler"), [
    ("fp32", "float16", None), ("amp", "bfloat16", None), ("mixed", "float16", LogMax),
])  # fmt: skip
def test_inductor_makes_the_same_steps(mode, half, scaler) -> None:
    """But a graph of fused ops leaves out roundings to half, and adds in another order.

    R = 16 roundings of size u, half a unit in the last place, on the way to a loss, so n R u
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


def count_calls(model: Any, x: Tensor, y: Tensor) -> Tensor:
    model.calls += 1
    return y


changing = itertools.count()
READ = r"a number is read from a tensor \(%s at test_\w+.py:\d+\)"
# Ends of a forward pass that make the step depend on what a graph does not hold, and the reason
# that is given for each.
ENDS: dict[str, tuple[Any, str]] = {
    "item": (lambda model, x, y: y * y.sum().item(), READ % "local_scalar_dense"),
    "lengths": (lambda model, x, y: pack_padded_sequence(y[:, None], [len(y)]).data[:, :4],
                READ % "pack_padded_sequence"),
    "shape": (lambda model, x, y: y + y[y > 0].sum(),
              r"a shape depends on the numbers of a tensor \(index at test_\w+\.py:\d+\)"),
    # Reads that are no op of torch.
    "list": (lambda model, x, y: y * x.flatten().tolist()[0], READ % "tolist"),
    "numpy": (lambda model, x, y: y * float(x.numpy()[0, 0]), READ % "numpy"),
    "array": (lambda model, x, y: y * float(np.asarray(x)[0, 0]), READ % "array"),
    "constant": (lambda model, x, y: y * next(changing),
                 r"two steps ran other ops \(%mul.*, then %mul.*\)"),
    "random": (lambda model, x, y: y * random.random(),
               "a step draws random numbers of Python or numpy"),
    "attribute": (count_calls, "a step sets the attribute calls of a module to 2"),
    "tensor": (lambda model, x, y: y + 0 * model.seen.add_(1),
               "a step writes into a tensor that is no parameter, buffer or optimizer state"),
    "sparse": (lambda model, x, y: y + model.words(torch.arange(len(y))),
               r"a tensor is sparse \(aten.*\)"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("what", "mode"), [*((what, "fp32") for what in ENDS), ("item", "mixed"), ("list", "mixed")]
)
def test_a_step_that_depends_on_python_is_refused(op_by_op, what: str, mode: str) -> None:
    end, why = ENDS[what]
    plain = partial(torch.optim.SGD, lr=0.1)
    made = trainer(CompiledTrainer, mode, model=Model(end), optimizer=plain)
    line = rf"^trainer\.compile=step: {why}; use trainer\.compile=true$"
    with pytest.raises(ConfigError, match=line):
        run(made, calm(4))


FP8 = Precision("mixed", "bfloat16", products="fp8_tensorwise")
OTHER = "does not compile its steps, which takes one loss and one optimizer without a closure"


@pytest.mark.parametrize(("options", "why"), [
    ({"comm": SimpleNamespace(size=2)}, "2 ranks average their gradients within a step"),
    ({"algorithms": {"spikes": LossSpikes("skip")}},
     "callbacks.loss_spikes decides within a step whether it is skipped"),
    ({"scaler": SimpleNamespace(scale=torch.tensor(1.0))},
     "loss_scaling=SimpleNamespace is not derived from mpframe's Scaler"),
    ({"mode": FP8}, "dtype.products=fp8_tensorwise runs ops by a handler, which may keep state"),
    ({"cls": Trainer, "plan": {"compile": "step"}}, f"Trainer {OTHER}"),
    ({"cls": ClosureTrainer, "plan": {"compile": "step"}}, f"ClosureTrainer {OTHER}"),
])  # fmt: skip
def test_a_trainer_that_cannot_compile_its_steps_is_not_made(options: Any, why: str) -> None:
    said = refused(ConfigError, trainer, **{"cls": CompiledTrainer, "mode": "mixed", **options})
    assert said == f"trainer.compile=step: {why}; use trainer.compile=true"


class Chooses(Algorithm):
    def before_update(self, trainer: Any, losses: list[Tensor]) -> Tensor | None:
        return losses[0] > 100


PENALTY = Penalty(lambda weight: weight.square().sum(), 0.1)


@pytest.mark.parametrize(("add", "why"), [
    (lambda made: made.optimizer.register_step_pre_hook(PENALTY), "Penalty hooks into the optim"),
    (lambda made: made.algorithms.update(mine=Chooses()), "callbacks.mine decides within a step w"),
])  # fmt: skip
def test_what_acts_within_a_step_is_refused_when_it_is_there(op_by_op, add: Any, why: str) -> None:
    made = trainer(CompiledTrainer)
    add(made)
    assert refused(ConfigError, run, made, calm(4)).startswith(f"trainer.compile=step: {why}")


class Counts(torch.optim.SGD):
    """Counts its steps in a group or a state, or replaces a tensor of a state."""

    def __init__(self, parameters: Any, where: str) -> None:
        super().__init__(parameters, lr=0.1)
        self.where = where

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        (group,) = self.param_groups
        state = self.state[group["params"][0]]
        own = group if self.where == "group" else state
        own["calls"] = torch.ones(3) if self.where == "tensor" else own.get("calls", 0) + 1


@pytest.mark.parametrize(("where", "why"), [
    ("group", "the optimizer keeps calls, which changes, outside of tensors"),
    ("state", "the optimizer keeps calls, which changes, outside of tensors"),
    ("tensor", "the optimizer replaces tensors of its state"),
])  # fmt: skip
def test_an_optimizer_that_counts_in_python_is_refused(op_by_op, where: str, why: str) -> None:
    made = trainer(CompiledTrainer, optimizer=partial(Counts, where=where))
    assert refused(ConfigError, run, made, calm(4)).startswith(f"trainer.compile=step: {why}")


def test_an_error_of_the_compiler_is_one_line(monkeypatch: Patch) -> None:
    def compile_graph(*_: Any) -> None:
        raise RuntimeError("no C++ compiler was found\nin any place")

    monkeypatch.setattr(StepRecord, "compile", compile_graph)
    with pytest.raises(ConfigError, match=r"step: torch's compiler raised RuntimeError \(no C\+\+"):
        run(trainer(CompiledTrainer), calm(3))
    assert not torch.compiler.is_compiling()
