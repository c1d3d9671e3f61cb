"""Half weights that other code writes: they go back to fp32, and no small move is lost."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from vocabulary import HALVES, differing, same_bits

from mpframe import Backoff, MasterWeights, Precision, Trainer
from mpframe.core.objective import StepOutput
from mpframe.core.optim import masters as core_masters
from mpframe.core.optim.widening import fp32_weights
from mpframe.training.callbacks.ema import AverageWeights, Ema, ema_of
from mpframe.training.optimizers.multi_optimizer import MultiOptimizer
from mpframe.training.optimizers.split_master import SplitMaster

in_half = pytest.mark.parametrize(("mode", "half"), [("amp", "bfloat16"), ("mixed", "float16")])


def batches(count: int, features: int = 16) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(32, features, generator=generator) for _ in range(count)]
    return [(x, x.argmax(1) % 8) for x in inputs]


class Head(nn.Module):
    """As heads of metric learning have it: the weight follows the format of the embedding."""

    def __init__(self, *, by_data: bool = True) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(16, 8))
        self.by_data = by_data

    def forward(self, z: Tensor) -> Tensor:
        if self.by_data:
            self.W.data = self.W.data.to(z.dtype)
        W = self.W.to(z.dtype)
        return F.normalize(z) @ F.normalize(W, dim=0) * 8


def net(head: Callable[[], nn.Module] = Head) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), head())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": adamw,
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


def fit(
    model: nn.Module, precision: Precision, optimizer: Any, scaler: Any, given: Any, parts: int = 1
) -> list[Tensor]:
    """Losses; the third step overflows, so that it is skipped."""
    losses = []
    for number, (inputs, targets) in enumerate(given):
        optimizer.zero_grad()
        for x, y in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
            with precision.cast():
                loss = F.cross_entropy(model(x), y)
            (loss * scaler.scale * (torch.inf if number == 2 else 1.0)).backward()
            if parts > 1:
                optimizer.accumulate(scaler.scale)
        assert bool(optimizer.step(scaler).skipped) == (number == 2)
        losses.append(loss.detach())
    return losses


class TestTurnedHalf:
    """A forward pass sets the `.data` of a parameter to half."""

    @pytest.mark.parametrize(
        ("mode", "half", "parts", "make"),
        [
            ("amp", "float16", 1, OPTIMIZERS["AdamW"]),
            ("amp", "bfloat16", 2, OPTIMIZERS["fused"]),
            ("mixed", "float16", 2, OPTIMIZERS["SGD"]),
            ("mixed", "bfloat16", 1, OPTIMIZERS["fused"]),
        ],
    )
    def test_it_is_stepped_as_if_it_were_cast(
        self, mode: str, half: str, parts: int, make: Callable[[Any], Any]
    ) -> None:
        runs = []
        for by_data in (True, False):
            precision = Precision(mode, half)
            model = net(lambda: Head(by_data=by_data))  # noqa: B023
            model, optimizer = precision.prepare(model, make(model.parameters()))
            losses = fit(model, precision, optimizer, Backoff(2.0**10), batches(5), parts)
            masters = [optimizer.master_of(p) for p in model.parameters()]
            runs.append([*losses, *(m.detach() for m in masters)])
            assert all(master.dtype == torch.float32 for master in masters)
        assert same_bits(*runs)

    def test_beside_another_optimizer(self) -> None:
        runs = []
        for by_data in (True, False):
            precision = Precision("amp")
            model = net(lambda: Head(by_data=by_data))  # noqa: B023
            parts = {
                name: precision.prepare(model, adamw(model[index].parameters()))[1]
                for index, name in enumerate(("trunk", "head"))
            }
            losses = fit(model, precision, MultiOptimizer(parts), Backoff(2.0**10), batches(5))
            runs.append([*losses, parts["head"].master_of(model[1].W).detach()])
        assert same_bits(*runs)

    @pytest.mark.parametrize(("named", "half"), [(True, "float16"), (False, "bfloat16")])
    def test_outside_of_the_casts_it_is_rounded_once_and_said(
        self, named: bool, half: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        model, dtype = net(), HALVES[half]
        plain = torch.optim.SGD(model[1].parameters(), lr=1.0)
        optimizer = Precision().prepare(model, plain)[1] if named else MasterWeights(plain)
        start = model[1].W.detach().clone()
        for _ in range(3):
            model[1].W.data = model[1].W.data.to(dtype)
            model[1].W.grad = torch.full_like(model[1].W, 2.0**-14)  # Lost beside 1 in half.
            optimizer.step()
        moved = start.to(dtype).float()
        for _ in range(3):
            moved -= 2.0**-14
        assert torch.equal(model[1].W, moved)
        what = "1.W" if named else r"a weight of shape (16, 8)"
        assert caplog.messages == [
            f"optimizer: {what} turned half outside of cast(), and was rounded once"
        ]

    @in_half
    def test_a_trainer_goes_on_and_resumes_bit_for_bit(self, mode: str, half: str) -> None:
        def trainer() -> Trainer:
            model, precision = net(), Precision(mode, half)
            model, optimizer = precision.prepare(model, adamw(model.parameters()))
            ema = Ema({p: optimizer.master_of(p) for p in model.parameters()}, 0.9)
            algorithms = {"ema": AverageWeights(ema, model)}
            return Trainer(model, optimizer, objective, precision, algorithms=algorithms)

        given = batches(6)
        whole, first, second = trainer(), trainer(), trainer()
        for batch in given:
            whole.train_step(batch)
        for batch in given[:3]:
            first.train_step(batch)
        evaluate(first, given[0])  # The averages are rounded, too, and put back.
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        for batch in given[3:]:
            second.train_step(batch)
            first.train_step(batch)
        assert differing(whole.state_dict(), first.state_dict()) == []
        assert differing(whole.state_dict(), second.state_dict()) == []


def objective(model: nn.Module, batch: Any) -> StepOutput:
    outputs = model(batch[0])
    return StepOutput(F.cross_entropy(outputs, batch[1]), outputs, batch[1])


def evaluate(trainer: Trainer, batch: Any) -> None:
    ema = ema_of(trainer)
    assert ema is not None
    with torch.no_grad(), ema.apply(), trainer.precision.cast():
        trainer.model(batch[0])


def move(teacher: nn.Module, online: nn.Module) -> None:
    for b, a in zip(teacher.parameters(), online.parameters(), strict=True):
        b.mul_(0.999).add_(a, alpha=0.001)


def move_data(teacher: nn.Module, online: nn.Module) -> None:
    for b, a in zip(teacher.parameters(), online.parameters(), strict=True):
        b.data.mul_(0.999).add_(a.data, alpha=0.001)


def move_by_new_data(teacher: nn.Module, online: nn.Module) -> None:
    for b, a in zip(teacher.parameters(), online.parameters(), strict=True):
        b.data = b.data * 0.999 + a.data * 0.001


MOVES = {"BYOL": move, "DINO": move_data, "MoCo": move_by_new_data}


class Student(nn.Module):
    """A model that holds its teacher, as lightly's do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.online = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
        self.teacher = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher(x)
        return self.online(x)


def train(
    model: nn.Module, optimizer: Any, precision: Precision, after: Callable[[], Any], steps: int
) -> None:
    for inputs, targets in batches(steps):
        optimizer.zero_grad()
        with precision.cast():
            loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            after()


class TestTeachers:
    """A frozen copy that follows the weights by a thousandth in each step."""

    @pytest.mark.parametrize(
        ("half", "kept", "moved"),
        [
            ("float16", True, move),
            ("bfloat16", True, move_data),
            ("bfloat16", SplitMaster, move_by_new_data),
        ],
    )
    def test_a_copy_made_after_prepare_moves_in_fp32(
        self, half: str, kept: Any, moved: Callable[..., None]
    ) -> None:
        """Beside a copy of the masters that is moved by the same half weights."""
        precision, online = Precision("mixed", half, master_weights=kept), Student().online
        _, optimizer = precision.prepare(online, adamw(online.parameters()))
        teacher = copy.deepcopy(online).requires_grad_(False)
        with fp32_weights(online):
            expected = copy.deepcopy(online)
        assert same_bits(teacher.parameters(), expected.parameters())
        assert online[0].weight.dtype == HALVES[half]
        train(
            online,
            optimizer,
            precision,
            lambda: (moved(teacher, online), moved(expected, online)),
            4,
        )
        assert same_bits(teacher.parameters(), expected.parameters())
        assert teacher[0].weight.dtype == torch.float32

    @pytest.mark.parametrize(
        ("half", "kept", "grouped", "moved"),
        [
            ("float16", True, True, move),
            ("float16", True, False, move_data),
            ("bfloat16", True, True, move_by_new_data),
            ("bfloat16", SplitMaster, True, move_data),
            ("bfloat16", SplitMaster, False, move_by_new_data),
        ],
    )
    def test_one_inside_the_model_turns_fp32_where_it_is_moved(
        self, half: str, kept: Any, grouped: bool, moved: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        precision, model = Precision("mixed", half, master_weights=kept), Student()
        plain = adamw((model if grouped else model.online).parameters())
        _, optimizer = precision.prepare(model, plain)
        copies: list[nn.Module] = []

        def after() -> None:
            moved(model.teacher, model.online)
            if copies:
                moved(copies[0], model.online)
            elif model.teacher[0].weight.dtype == torch.float32:
                copies.append(copy.deepcopy(model.teacher))

        train(model, optimizer, precision, after, 20)
        # It is the second step that notices: the first move is rounded to half, no other one is.
        # Small biases may take some steps until a move shows in half.
        assert torch.equal(model.teacher[0].weight, copies[0][0].weight)
        assert model.online[0].weight.dtype == HALVES[half]
        assert "teacher.0.weight" in caplog.messages[0]
        assert caplog.messages[0].endswith(
            ": frozen, and written outside of the step: stored in float32 from now on"
        )

    @pytest.mark.parametrize(("name", "grouped"), [("BYOL", False), ("DINO", True), ("MoCo", True)])
    def test_as_on_an_accelerator(
        self, name: str, grouped: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """There values are compared in the first steps alone: `.data.mul_` raises no counter."""
        monkeypatch.setattr(core_masters, "_values_count", lambda _: False)
        precision, model = Precision("mixed", "bfloat16"), Student()
        plain = adamw((model if grouped else model.online).parameters())
        _, optimizer = precision.prepare(model, plain)
        train(model, optimizer, precision, lambda: MOVES[name](model.teacher, model.online), 3)
        assert model.teacher[0].weight.dtype == torch.float32
        before = model.teacher[0].weight.detach().clone()
        train(model, optimizer, precision, lambda: None, 1)
        assert torch.equal(model.teacher[0].weight, before)  # No master writes over it.

    @pytest.mark.parametrize(("looks", "half"), [(True, "float16"), (False, "bfloat16")])
    def test_what_nobody_moves_stays_half(
        self, half: str, looks: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also if it was loaded before the first step, or is exchanged and put back."""
        if not looks:
            monkeypatch.setattr(core_masters, "_values_count", lambda _: False)
        precision, model = Precision("mixed", half), Student()
        _, optimizer = precision.prepare(model, adamw(model.online.parameters()))
        weight = model.teacher[0].weight
        with torch.no_grad():
            weight.fill_(0.5)

        def exchange() -> None:
            kept = weight.clone()
            weight.fill_(1.0)
            weight.copy_(kept)

        train(model, optimizer, precision, exchange, 6)
        assert weight.dtype == HALVES[half]
        assert weight.unique().tolist() == [0.5]

    @pytest.mark.parametrize(
        ("grouped", "kept"), [(True, True), (False, True), (True, SplitMaster)]
    )
    def test_a_resumed_run_moves_it_in_fp32_at_once(self, kept: Any, grouped: bool) -> None:
        def trainer() -> Trainer:
            precision, model = Precision("mixed", "bfloat16", master_weights=kept), Student()
            plain = adamw((model if grouped else model.online).parameters())
            _, optimizer = precision.prepare(model, plain)
            return Trainer(model, optimizer, objective, precision)

        def follow(trainer: Trainer, given: list[Any]) -> None:
            for batch in given:
                trainer.train_step(batch)
                with torch.no_grad():
                    model: Any = trainer.model
                    move(model.teacher, model.online)

        given = batches(8)
        whole, second = trainer(), trainer()
        follow(whole, given[:4])
        second.load_state_dict(copy.deepcopy(whole.state_dict()))
        follow(whole, given[4:])
        follow(second, given[4:])
        assert differing(whole.state_dict(), second.state_dict()) == []
        assert whole.state_dict()["widened"] != []

    def test_without_lists_it_stays_half(self) -> None:
        """No op is cast there, so that all weights need one format."""
        from mpframe import OpLists

        precision, model = Precision("mixed", "bfloat16", ops=OpLists()), Student()
        _, optimizer = precision.prepare(model, adamw(model.parameters()))
        train(model, optimizer, precision, lambda: move(model.teacher, model.online), 4)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


class TestAveragedModel:
    """torch's AveragedModel over a model with half weights averages the masters."""

    @pytest.mark.parametrize(
        ("mode", "half", "early", "arguments"),
        [
            ("mixed", "float16", True, {}),
            ("mixed", "bfloat16", False, {"multi_avg_fn": get_ema_multi_avg_fn(0.999)}),
            ("mixed", "float16", False, {}),
            ("amp", "float16", True, {"multi_avg_fn": get_ema_multi_avg_fn(0.999)}),
        ],
    )
    def test_averages_masters(
        self, mode: str, half: str, early: bool, arguments: dict[str, Any]
    ) -> None:
        precision, model = Precision(mode, half), Student().online
        if early:
            averaged = AveragedModel(model, **arguments)
        _, optimizer = precision.prepare(model, adamw(model.parameters()))
        if not early:
            averaged = AveragedModel(model, **arguments)
        reference = nn.ParameterList(optimizer.master_of(p) for p in model.parameters())
        expected = AveragedModel(reference, **arguments)

        def after() -> None:
            averaged.update_parameters(model)
            expected.update_parameters(reference)

        train(model, optimizer, precision, after, 3)
        assert same_bits(averaged.module.parameters(), expected.module.parameters())


def test_no_line_without_a_write(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    precision, model = Precision("mixed"), Student()
    _, optimizer = precision.prepare(model, adamw(model.parameters()))
    train(model, optimizer, precision, lambda: None, 6)
    assert caplog.messages == []
