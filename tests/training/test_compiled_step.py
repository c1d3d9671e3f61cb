"""The step as one graph: the same steps as op by op, and what cannot be one graph is refused."""

import copy
import itertools
import random
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from prepared import prepared
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from vocabulary import differing

from mpframe import Backoff, LogMax, Precision, Trainer
from mpframe.core.callback import Algorithm
from mpframe.core.errors import ConfigError
from mpframe.core.objective import StepOutput
from mpframe.training import compiled_step
from mpframe.training.callbacks.ema import AverageWeights, Ema
from mpframe.training.callbacks.guards import LossSpikes
from mpframe.training.callbacks.schedules import Schedules
from mpframe.training.callbacks.step_hooks import Penalty
from mpframe.training.compiled_step import CompiledTrainer
from mpframe.training.optimizers.lbfgs import ClosureTrainer
from mpframe.training.plan import Plan
from mpframe.training.step_record import StepRecord

OVERFLOW = 4  # the number of a batch
# A product with such a rate is exact, so it makes no difference that a recorded step takes the rate
# as a tensor, multiplies by it and adds, where a plain one does both at once.
SGD = partial(torch.optim.SGD, lr=2.0**-4, momentum=0.9)
Patch = pytest.MonkeyPatch


@pytest.fixture
def op_by_op(monkeypatch: Patch) -> None:
    """Run the records themselves: the same ops, so the same bits."""
    monkeypatch.setattr(StepRecord, "compile", lambda record, inputs: None)


def net(outputs: int = 4) -> nn.Module:
    torch.manual_seed(0)
    normed = nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2)
    return nn.Sequential(*normed, nn.Linear(16, outputs))


def trainer(cls: Any, mode: str = "fp32", objective: Any = None, model: Any = None, **rest: Any):
    plan = {"compile": "step" if cls is CompiledTrainer else False, **rest.pop("plan", {})}
    rest = {"optimizer": SGD, **rest}
    loss = objective or nn.CrossEntropyLoss()
    return prepared(model or net(), loss, mode, cls=cls, plan=Plan(**plan), **rest)


def batches(steps: int = 9, rows: int = 32) -> list[Any]:
    draw = torch.Generator().manual_seed(1)
    made = [
        (torch.randn(rows, 8, generator=draw), torch.randint(0, 4, (rows,), generator=draw))
        for _ in range(steps)
    ]
    for inputs, _ in made[OVERFLOW : OVERFLOW + 1]:
        inputs[0, 0] = torch.inf
    return made


def run(trained: Any, windows: list[Any]) -> list[Any]:
    """Every value of the results; then the trainer's state is the end of the steps."""
    torch.manual_seed(2)
    trained.model.train()
    found = [trained.train_step(*window) for window in windows]
    return [{f.name: getattr(result, f.name) for f in fields(result)} for result in found]


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


class Model(nn.Module):
    """Its forward pass ends with a function of the model, its inputs and its outputs."""

    def __init__(self, end: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.end, self.calls = nn.Linear(8, 4), end, 0
        self.words = nn.Embedding(64, 4, sparse=True)
        self.seen = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self, x, self.layer(x))


def count_calls(model: Any, x: Tensor, y: Tensor) -> Tensor:
    model.calls += 1
    return y


def count_in_a_tensor(model: Any, x: Tensor, y: Tensor) -> Tensor:
    model.seen += 1
    return y


def start_from_one(model: Any, x: Tensor, y: Tensor) -> Tensor:
    total = torch.tensor(1.0)
    total += y.detach().abs().sum()
    return y * total


changing = itertools.count()
ENDS: dict[str, Any] = {
    "item": lambda model, x, y: y * y.sum().item(),
    "lengths": lambda model, x, y: pack_padded_sequence(y[:, None], [len(y)]).data[:, :4],
    "shape": lambda model, x, y: y + y[y > 0].sum(),
    "list": lambda model, x, y: y * x.flatten().tolist()[0],
    "numpy": lambda model, x, y: y * float(x.numpy()[0, 0]),
    "array": lambda model, x, y: y * float(np.asarray(x)[0, 0]),
    "dlpack": lambda model, x, y: y * float(np.from_dlpack(x)[0, 0]),
    "function": lambda model, x, y: y * x.clone().apply_(abs)[0, 0],
    "constant": lambda model, x, y: y * next(changing),
    "random": lambda model, x, y: y * random.random(),
    "attribute": count_calls,
    "tensor": count_in_a_tensor,
    "sparse": lambda model, x, y: y + model.words(torch.arange(len(y))),
}
BESIDE_OPS = {
    "list": "tolist",
    "numpy": "numpy",
    "array": "array",
    "dlpack": "dlpack",
    "function": "apply",
}
READ = r"a number is read from a tensor \(%s at test_compiled_step.py:\d+\)"
REFUSED = {
    "item": READ % "local_scalar_dense",
    "lengths": r"a number is read from a tensor \(pack_padded_sequence at test_.*\)",
    "shape": r"a shape depends on the numbers of a tensor \(index at test_compiled_step.py:\d+\)",
    **{what: READ % name for what, name in BESIDE_OPS.items()},
    "constant": r"two steps ran other ops \(%mul.*, then %mul.*\)",
    "random": "a step draws random numbers of Python or numpy",
    "attribute": "a step sets the attribute calls of a module to 2",
    "tensor": "a step writes into a tensor that is no parameter, buffer or optimizer state",
    "sparse": r"a tensor is sparse \(aten.*\)",
}


def calm(steps: int) -> list[Any]:
    return [[batch] for batch in batches(steps)[:OVERFLOW]]


@pytest.mark.parametrize(
    ("what", "mode"), [*((what, "fp32") for what in REFUSED), ("item", "mixed"), ("list", "mixed")]
)
def test_a_step_that_depends_on_python_is_refused(op_by_op, what: str, mode: str) -> None:
    made = trainer(
        CompiledTrainer, mode, model=Model(ENDS[what]), optimizer=partial(torch.optim.SGD, lr=0.1)
    )
    line = rf"^trainer\.compile=step: {REFUSED[what]}; use trainer\.compile=true$"
    with pytest.raises(ConfigError, match=line):
        run(made, calm(4))


def test_a_step_that_is_refused_changes_nothing(op_by_op) -> None:
    """It has moved the statistics of a BatchNorm, and drawn numbers, when it reads one."""
    made = trainer(CompiledTrainer, model=nn.Sequential(net(8), Model(ENDS["item"])))
    made.train_step(batches()[0])
    before, drawn = copy.deepcopy(made.state_dict()), torch.get_rng_state()
    with pytest.raises(ConfigError, match="a number is read"):
        made.train_step(batches()[1])
    assert differing(before, made.state_dict()) == []
    assert torch.equal(drawn, torch.get_rng_state())


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


class OwnScaler:
    """No Scaler of mpframe: nobody knows what its next state is."""

    scale = torch.tensor(1.0)


class Chooses(Algorithm):
    def before_update(self, trainer: Any, losses: list[Tensor]) -> Tensor | None:
        return losses[0] > 100


UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "ranks": (
        {"comm": SimpleNamespace(size=2)},
        "2 ranks average their gradients within a step",
    ),
    "spikes": (
        {"algorithms": {"spikes": LossSpikes("skip")}},
        "callbacks.loss_spikes decides within a step whether it is skipped",
    ),
    "scaler": (
        {"scaler": OwnScaler()},
        "loss_scaling=OwnScaler is not derived from mpframe's Scaler",
    ),
}


@pytest.mark.parametrize("what", UNFIT)
def test_a_trainer_that_cannot_compile_its_steps_is_not_made(what: str) -> None:
    options, why = UNFIT[what]
    with pytest.raises(ConfigError) as error:
        trainer(CompiledTrainer, "mixed", **options)
    assert str(error.value) == f"trainer.compile=step: {why}; use trainer.compile=true"


def test_products_whose_handler_may_keep_state_are_refused() -> None:
    import mpframe.lowbit  # noqa: F401

    precision, model = Precision("mixed", "bfloat16", products="fp8_tensorwise"), net()
    model, optimizer = precision.prepare(model, SGD(model.parameters()))
    why = r"dtype\.products=fp8_tensorwise runs ops by a handler, which may keep state"
    with pytest.raises(ConfigError, match=why):
        CompiledTrainer(model, optimizer, print, precision, plan=Plan(compile="step"))


def test_other_trainers_refuse_it_by_their_name() -> None:
    for cls in (Trainer, ClosureTrainer):
        with pytest.raises(ConfigError) as error:
            trainer(cls, plan={"compile": "step"})
        assert str(error.value) == (
            f"trainer.compile=step: {cls.__name__} does not compile its steps, which takes one "
            "loss and one optimizer without a closure; use trainer.compile=true"
        )


def test_what_acts_within_a_step_is_refused_when_it_is_there(op_by_op) -> None:
    hooked = trainer(CompiledTrainer)
    hooked.optimizer.register_step_pre_hook(Penalty(lambda w: w.square().sum(), 0.1))
    with pytest.raises(ConfigError, match="step: Penalty hooks into the optimizer's step, w"):
        run(hooked, calm(3))
    chosen = trainer(CompiledTrainer, algorithms={"mine": Chooses()})
    with pytest.raises(ConfigError, match=r"step: callbacks\.mine decides within a step whether"):
        run(chosen, calm(3))


class Counts(torch.optim.Optimizer):
    """SGD, whose rate depends on how often it stepped, which it counts as it is told."""

    def __init__(self, parameters: Any, lr: float, where: str) -> None:
        super().__init__(parameters, {"lr": lr, "calls": 0})
        self.where, self.calls = where, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        self.calls += self.where == "attribute"
        group["calls"] += self.where == "group"
        for parameter in group["params"]:
            state = self.state[parameter]
            state["calls"] = state.get("calls", 0) + (self.where == "state")
            if self.where == "tensor":
                state["last"] = parameter.grad.clone()
            steps = self.calls + group["calls"] + state["calls"]
            parameter -= group["lr"] / (1 + steps) * parameter.grad


COUNTED = {
    "group": "the optimizer keeps calls, which changes, outside of tensors",
    "state": "the optimizer keeps calls, which changes, outside of tensors",
    "attribute": "two steps ran other ops",
    "tensor": "the optimizer replaces tensors of its state",
}


@pytest.mark.parametrize("where", COUNTED)
def test_an_optimizer_that_counts_in_python_is_refused(op_by_op, where: str) -> None:
    made = trainer(CompiledTrainer, optimizer=partial(Counts, lr=0.1, where=where))
    with pytest.raises(ConfigError, match=f"^trainer.compile=step: {COUNTED[where]}"):
        run(made, calm(4))


def test_a_schedule_of_anything_but_the_rate_is_refused(op_by_op) -> None:
    made = trainer(CompiledTrainer)
    cycle = OneCycleLR(made.optimizer, 0.1, total_steps=9)  # Moves momentum as well.
    made.algorithms["schedule"] = Schedules(cycle)
    with pytest.raises(ConfigError) as error:
        run(made, calm(4))
    assert str(error.value) == (
        "trainer.compile=step: momentum of the optimizer changes from step to step; use "
        "trainer.compile=true"
    )


def test_an_error_of_the_compiler_is_one_line(monkeypatch: Patch) -> None:
    def compile_graph(*_: Any) -> None:
        raise RuntimeError("no C++ compiler was found\nin any place")

    monkeypatch.setattr(StepRecord, "compile", compile_graph)
    with pytest.raises(ConfigError, match=r"step: torch's compiler raised RuntimeError \(no C\+\+"):
        run(trainer(CompiledTrainer), calm(3))
    assert not torch.compiler.is_compiling()


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
