"""What products carry from step to step: histories of amax, and a generator of random numbers."""

import io
import math
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from ranked import assert_same
from torch import Tensor, nn

from mpframe import Precision, Trainer
from mpframe.checkpoint import rng_state
from mpframe.checkpoint.state import Snapshot
from mpframe.core.comm import Comm
from mpframe.core.errors import ConfigError
from mpframe.core.objective import supervised
from mpframe.lab.autopsy.replay import Case, Setting, noises_of, replay
from mpframe.lab.doctor.subject import Subject
from mpframe.lowbit.recipe import Recipe
from mpframe.lowbit.state import ProductState
from mpframe.run.resume import _load

# Both in one: delayed scales forward, stochastic rounding of the gradients.
NOISY = {"rounding": "stochastic", "format": "e2m1"}
DELAYED = {"format": "e4m3fn", "history": 3}
BOTH = Recipe.from_mapping("both", {"every": DELAYED, "dx": {"dy": NOISY}, "dw": {"dy": NOISY}})


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(16, 32, generator=generator) * 2.0**number
    return x, torch.randint(0, 8, (16,), generator=generator)


def trainer() -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    precision = Precision("mixed", half="bfloat16", products=BOTH)
    model, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return Trainer(model, optimizer, supervised(F.cross_entropy), precision)


def trained(*numbers: int, run: Trainer | None = None) -> Trainer:
    run = run or trainer()
    for number in numbers:
        run.train_step(batch(number))
    return run


def state_of(run: Trainer) -> dict[str, Tensor]:
    """The generators' states and the histories, by name."""
    state = run.precision.state_dict()
    parts = {f"{name} {part}": t for name, own in state["amax"].items() for part, t in own.items()}
    return {**state["generators"], **{k: t for k, t in parts.items() if t is not None}}


def test_a_resumed_run_is_the_same_bit_for_bit() -> None:
    file = io.BytesIO()
    torch.save(trained(0, 1, 2, 3).state_dict(), file)
    file.seek(0)
    other = trainer()
    torch.manual_seed(77)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert_same(trained(4, 5, 6, run=other).weights(), trained(*range(7)).weights())


def test_a_rank_that_was_not_there_draws_numbers_of_its_own() -> None:
    """A checkpoint of fewer ranks: histories are of all ranks, a generator is rank 0's."""
    run, other = trained(0, 1), trainer()
    snapshot = Snapshot(2, {"trainer": run.state_dict(), "rng": rng_state()})
    other.comm = Comm()
    other.comm.rank = 1
    _load(snapshot, other)
    loaded, saved = other.precision.state_dict(), run.precision.state_dict()
    assert loaded["generators"] == {}
    assert loaded["amax"].keys() == saved["amax"].keys()
    other.comm.rank = 0
    _load(snapshot, other)
    assert_same(other.precision.state_dict()["generators"], saved["generators"])


@pytest.mark.parametrize(
    ("steps", "scales"),
    [
        # The first step has itself alone; the fourth has the second and the third.
        ([[4], [1], [2], [8]], [[4], [4], [4], [2]]),
        # One scale within a step, as for micro-batches or a forward pass that is run again.
        ([[4], [16, 32, 1], [1]], [[4], [4, 4, 4], [32]]),
        ([[4], [math.inf], [math.nan], [1]], [[4], [4], [4], [4]]),
    ],
    ids=["of_the_steps_before", "one_within_a_step", "what_overflowed_is_forgotten"],
)
def test_a_history_of_two_steps(steps: list[list[float]], scales: list[list[float]]) -> None:
    state, weight, seen = ProductState(), nn.Parameter(torch.zeros(1)), []
    weight.grad = torch.zeros(1)
    for step in steps:
        seen.append([float(state.track_amax("w x", torch.tensor(x), 2, True)) for x in step])
        torch.optim.SGD([weight]).step()
    assert seen == scales


def test_each_operand_of_each_weight_has_a_history_and_evaluation_leaves_no_trace() -> None:
    run = trained(0)
    before = run.precision.state_dict()["amax"]
    assert set(before) == {f"{n}.weight {role}" for n in (0, 2) for role in ("x", "w", "dy")}
    assert before["0.weight x"]["present"] == batch(0)[0].bfloat16().abs().max().float()
    with torch.no_grad(), run.precision.cast():
        run.model(batch(9)[0])
    for name, own in run.precision.state_dict()["amax"].items():
        # What was pending is now past; nothing is new.
        both = [own["past"], *([] if own["present"] is None else [own["present"][None]])]
        largest = torch.cat([before[name]["past"], before[name]["present"][None]]).max()
        assert torch.cat(both).max() == largest


def test_a_model_that_was_not_prepared_has_no_history() -> None:
    layer, x = nn.Linear(32, 32), batch(0)[0].requires_grad_()
    said = r"dtype.products=fp8_delayed: keeps a history .*one of \[32, 32\]"
    with Precision("amp", products="fp8_delayed").cast():
        with pytest.raises(ConfigError, match=said):
            layer(x)
        # Neither have an evaluation, and two activations: they are scaled by themselves.
        with torch.no_grad():
            layer(x)
        assert (x @ x.t()).isfinite().all()


def test_what_looks_at_a_run_leaves_no_trace() -> None:
    """A trace; the autopsy and the doctor replay forward and backward passes."""
    run = trained(0, 1)
    before = state_of(run)
    assert replay(
        Case(run.model, run.precision, run.objectives, [batch(2)], {"": 1.0}), Setting()
    ).finite
    subject = Subject(run, loader=cast(Any, None), options={})
    subject.batch = batch(3)
    assert noises_of(subject.case)
    assert_same(state_of(run), before)
    precision = Precision("mixed", half="bfloat16", products=BOTH)
    precision.prepare(model := nn.Linear(32, 32), torch.optim.SGD(model.parameters()), batch(0)[0])
    assert precision.state_dict() == {"generators": {}, "amax": {}}


def test_the_runs_seed_seeds_the_rounding() -> None:
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(ProductState().draw(torch.empty(8)))
    assert torch.equal(drawn[0], drawn[1])
    torch.manual_seed(1)
    assert not any(torch.equal(drawn[0], other) for other in (drawn[2], torch.rand(8)))


def test_compiled_and_eager_agree() -> None:
    """Forward, gradients, random numbers and histories, over several steps."""
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        layers = nn.Unflatten(1, (32, 1)), nn.Conv1d(32, 32, 1), nn.Flatten(), nn.GRUCell(32, 8)
        model: Any = nn.Sequential(nn.Linear(32, 32), *layers)
        precision = Precision("mixed", half="bfloat16", products=BOTH)
        model, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        for number in range(3):
            with precision.cast():
                run(batch(number)[0]).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = precision.state_dict()
        histories = [h["past"] for _, h in sorted(state["amax"].items())]
        results.append([*model.parameters(), *histories, state["generators"]["cpu"]])
    assert all(map(torch.equal, *results))
