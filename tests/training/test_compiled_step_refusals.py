"""What cannot be one graph is refused: before the first step, or when a step is recorded."""

import copy
import itertools
import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from compiled import SGD, Model, batches, calm, net, run, trainer
from fixtures import Patch, refused
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim.lr_scheduler import OneCycleLR
from vocabulary import differing

from mpframe import Precision, Trainer
from mpframe.core.callback import Algorithm
from mpframe.core.errors import ConfigError
from mpframe.training.callbacks.guards import LossSpikes
from mpframe.training.callbacks.schedules import Schedules
from mpframe.training.callbacks.step_hooks import Penalty
from mpframe.training.compiled_step import CompiledTrainer
from mpframe.training.optimizers.lbfgs import ClosureTrainer
from mpframe.training.plan import Plan
from mpframe.training.step_record import StepRecord


def count_calls(model: Any, x: Tensor, y: Tensor) -> Tensor:
    model.calls += 1
    return y


def count_in_a_tensor(model: Any, x: Tensor, y: Tensor) -> Tensor:
    model.seen += 1
    return y


changing = itertools.count()
# Ends of a forward pass that make the step depend on what a graph does not hold.
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
# Reads of a tensor that are no op of torch, by the name under which they are refused.
BESIDE_OPS = {
    "list": "tolist",
    "numpy": "numpy",
    "array": "array",
    "dlpack": "dlpack",
    "function": "apply",
}
READ = r"a number is read from a tensor \(%s at test_compiled_step_refusals.py:\d+\)"
# The reason that is given for each end.
REFUSED = {
    "item": READ % "local_scalar_dense",
    "lengths": r"a number is read from a tensor \(pack_padded_sequence at test_.*\)",
    "shape": r"a shape depends on the numbers of a tensor \(index at test_\w+\.py:\d+\)",
    **{what: READ % name for what, name in BESIDE_OPS.items()},
    "constant": r"two steps ran other ops \(%mul.*, then %mul.*\)",
    "random": "a step draws random numbers of Python or numpy",
    "attribute": "a step sets the attribute calls of a module to 2",
    "tensor": "a step writes into a tensor that is no parameter, buffer or optimizer state",
    "sparse": r"a tensor is sparse \(aten.*\)",
}


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


class OwnScaler:
    """No Scaler of mpframe: nobody knows what its next state is."""

    scale = torch.tensor(1.0)


class Chooses(Algorithm):
    def before_update(self, trainer: Any, losses: list[Tensor]) -> Tensor | None:
        return losses[0] > 100


# Parts of a trainer that no graph can hold, and the reason that is given.
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
    said = refused(ConfigError, trainer, CompiledTrainer, "mixed", **options)
    assert said == f"trainer.compile=step: {why}; use trainer.compile=true"


def test_products_whose_handler_may_keep_state_are_refused() -> None:
    import mpframe.lowbit  # noqa: F401

    precision, model = Precision("mixed", "bfloat16", products="fp8_tensorwise"), net()
    model, optimizer = precision.prepare(model, SGD(model.parameters()))
    why = r"dtype\.products=fp8_tensorwise runs ops by a handler, which may keep state"
    with pytest.raises(ConfigError, match=why):
        CompiledTrainer(model, optimizer, print, precision, plan=Plan(compile="step"))


def test_other_trainers_refuse_it_by_their_name() -> None:
    for cls in (Trainer, ClosureTrainer):
        assert refused(ConfigError, trainer, cls, plan={"compile": "step"}) == (
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


# How each place of its count is found out.
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
    assert refused(ConfigError, run, made, calm(4)) == (
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
