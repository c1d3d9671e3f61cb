"""What products carry from step to step: histories of amax, and a generator of random numbers."""

import io
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpframe import Precision, Trainer
from mpframe.checkpoint import rng_state
from mpframe.checkpoint.state import Snapshot
from mpframe.core.comm import Comm
from mpframe.core.errors import ConfigError
from mpframe.core.objective import supervised
from mpframe.lab.autopsy.replay import Case, Setting, noises_of, replay
from mpframe.lab.doctor.subject import Subject
from mpframe.lowbit.formats import FORMATS
from mpframe.lowbit.recipe import Recipe
from mpframe.lowbit.scaling import Quantization
from mpframe.lowbit.state import ProductState
from mpframe.run.resume import _load

# Both in one: delayed scales forward, stochastic rounding of the gradients.
BOTH = Recipe.from_mapping(
    "both",
    {
        "every": {"format": "e4m3fn", "history": 3},
        "dx": {"dy": {"rounding": "stochastic", "format": "e2m1"}},
        "dw": {"dy": {"rounding": "stochastic", "format": "e2m1"}},
    },
)


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(16, 32, generator=generator) * 2.0**number
    return x, torch.randint(0, 8, (16,), generator=generator)


def trainer(precision: Precision | None = None) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    precision = precision or Precision("mixed", half="bfloat16", products=BOTH)
    model, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return Trainer(model, optimizer, supervised(F.cross_entropy), precision)


def train(run: Trainer, *numbers: int) -> dict[str, Tensor]:
    for number in numbers:
        run.train_step(batch(number))
    return {name: weight.clone() for name, weight in run.weights().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


class TestResume:
    def test_bit_for_bit(self) -> None:
        run = trainer()
        train(run, 0, 1, 2, 3)
        file = io.BytesIO()
        torch.save(run.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        other = trainer()
        torch.manual_seed(77)
        other.load_state_dict(state)
        assert same(train(other, 4, 5, 6), train(trainer(), *range(7)))

    def test_a_rank_that_was_not_there_draws_numbers_of_its_own(self) -> None:
        """A checkpoint of fewer ranks: histories are of all ranks, a generator is rank 0's."""
        run = trainer()
        train(run, 0, 1)
        snapshot = Snapshot(2, {"trainer": run.state_dict(), "rng": rng_state()})
        other = trainer()
        other.comm = Comm()
        other.comm.rank = 1
        _load(snapshot, other)
        loaded, saved = other.precision.state_dict(), run.precision.state_dict()
        assert loaded["generators"] == {}
        assert loaded["amax"].keys() == saved["amax"].keys()
        other.comm.rank = 0
        _load(snapshot, other)
        assert same(other.precision.state_dict()["generators"], saved["generators"])


class TestHistory:
    HOW = Quantization(FORMATS["e4m3fn"], history=2)

    def amax(self, state: ProductState, own: float, record: bool = True) -> float:
        return float(state.track_amax("w x", torch.tensor(own), 2, record))

    def step(self) -> None:
        parameter = nn.Parameter(torch.zeros(1))
        parameter.grad = torch.zeros(1)
        torch.optim.SGD([parameter]).step()

    def test_is_of_the_steps_before(self) -> None:
        state, seen = ProductState(), []
        for own in (4.0, 1.0, 2.0, 8.0):
            seen.append(self.amax(state, own))
            self.step()
        # The first step has itself alone; the fourth has the second and the third.
        assert seen == [4.0, 4.0, 4.0, 2.0]

    def test_one_scale_within_a_step(self) -> None:
        """As for micro-batches, and for a forward pass that is run again."""
        state = ProductState()
        self.amax(state, 4.0)
        self.step()
        assert [self.amax(state, own) for own in (16.0, 32.0, 1.0)] == [4.0] * 3
        self.step()
        assert self.amax(state, 1.0) == 32.0

    def test_what_overflowed_is_forgotten(self) -> None:
        state = ProductState()
        self.amax(state, 4.0)
        for beyond in (torch.inf, torch.nan):
            self.step()
            self.amax(state, beyond)
        self.step()
        assert self.amax(state, 1.0) == 4.0

    def test_evaluation_leaves_no_trace(self) -> None:
        run = trainer()
        train(run, 0, 1)
        before = run.precision.state_dict()["amax"]
        with torch.no_grad(), run.precision.cast():
            run.model(batch(9)[0])
        after = run.precision.state_dict()["amax"]
        # What was pending is now past; nothing is new.
        for name in before:
            largest = torch.cat([before[name]["past"], before[name]["present"][None]]).max()
            present = after[name]["present"]
            both = [after[name]["past"], *([] if present is None else [present[None]])]
            assert torch.cat(both).max() == largest

    def test_each_operand_of_each_weight_has_its_own(self) -> None:
        run = trainer()
        train(run, 0)
        operands = {f"{n}.weight {role}" for n in (0, 2) for role in ("x", "w", "dy")}
        assert set(run.precision.state_dict()["amax"]) == operands
        seen = run.precision.state_dict()["amax"]["0.weight x"]["present"]
        assert seen == batch(0)[0].bfloat16().abs().max().float()

    def test_of_a_model_that_was_not_prepared(self) -> None:
        layer, x = nn.Linear(32, 32), batch(0)[0].requires_grad_()
        said = r"dtype.products=fp8_delayed: keeps a history .*one of \[32, 32\]"
        with Precision("amp", products="fp8_delayed").cast():
            with pytest.raises(ConfigError, match=said):
                layer(x)
            with torch.no_grad():
                layer(x)
            # Two activations have no history: they are scaled by themselves.
            assert (x @ x.t()).isfinite().all()


def test_a_forward_pass_that_runs_again_rounds_as_it_did() -> None:
    results = []
    for again in (False, True):
        run = trainer(Precision("mixed", half="bfloat16", products="fp8_delayed"))
        train(run, 0)
        x, y = batch(3)
        with run.precision.cast():
            out = checkpoint(run.model, x, use_reentrant=False) if again else run.model(x)
            loss = F.cross_entropy(out, y)
        loss.backward()
        results.append([p.grad for p in run.model.parameters()])
    assert all(map(torch.equal, *results))


def test_a_trace_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    precision = Precision("mixed", half="bfloat16", products=BOTH)
    precision.prepare(model, torch.optim.SGD(model.parameters()), batch(0)[0])
    assert precision.state_dict() == {"generators": {}, "amax": {}}


def test_what_looks_at_a_run_leaves_no_trace() -> None:
    """The autopsy and the doctor replay forward and backward passes."""
    run = trainer()
    train(run, 0, 1)
    before = state_of(run)
    objectives = run.objectives
    case = Case(run.model, run.precision, objectives, [batch(2)], {"": 1.0})
    assert replay(case, Setting()).finite
    subject = Subject(run, loader=cast(Any, None), options={})
    subject.batch = batch(3)
    assert noises_of(subject.case)
    after = state_of(run)
    assert after.keys() == before.keys()
    assert same(after, before)


def state_of(run: Trainer) -> dict[str, Tensor]:
    """The generators' states and the histories, by name."""
    state = run.precision.state_dict()
    parts = {f"{name} {part}": t for name, own in state["amax"].items() for part, t in own.items()}
    return {**state["generators"], **{k: t for k, t in parts.items() if t is not None}}


def test_the_runs_seed_seeds_the_rounding() -> None:
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(ProductState().draw(torch.empty(8)))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    torch.manual_seed(1)
    assert not torch.equal(drawn[0], torch.rand(8))


def test_compiled_and_eager_agree() -> None:
    """Forward, gradients, random numbers and histories, over several steps."""
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(32, 32), nn.Unflatten(1, (32, 1)), nn.Conv1d(32, 8, 1))
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
