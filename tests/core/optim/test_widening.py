"""Half weights that other code writes: they go back to fp32, and no small move is lost."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from vocabulary import HALVES, differing, formats, same_bits

from mpframe import Backoff, MasterWeights, OpLists, Precision, Trainer
from mpframe.core.objective import supervised
from mpframe.core.optim import masters as core_masters
from mpframe.core.optim.widening import fp32_weights
from mpframe.training.callbacks.ema import Ema, ema_of

FP32 = torch.float32


def batches(count):
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(32, 16, generator=generator) for _ in range(count)]
    return [(x, x.argmax(1) % 8) for x in inputs]


class Head(nn.Module):
    """As heads of metric learning have it: the weight follows the format of the embedding."""

    def __init__(self, by_data=True):
        super().__init__()
        self.W, self.by_data = nn.Parameter(torch.randn(16, 8)), by_data

    def forward(self, z):
        if self.by_data:
            self.W.data = self.W.data.to(z.dtype)
        return F.normalize(z) @ F.normalize(self.W.to(z.dtype), dim=0) * 8


def trainer_of(precision, model, trained=None, fused=False):
    plain = torch.optim.AdamW((trained or model).parameters(), lr=1e-2, fused=fused)
    model, optimizer = precision.prepare(model, plain)
    objective, scaler = supervised(nn.CrossEntropyLoss()), Backoff(2.0**10)
    return Trainer(model, optimizer, objective, precision, scaler)


@pytest.mark.parametrize(
    ("mode", "half", "parts", "fused"),
    [
        ("amp", "float16", 1, False),
        ("amp", "bfloat16", 2, True),
        ("mixed", "float16", 2, False),
        ("mixed", "bfloat16", 1, True),
    ],
)
def test_a_weight_turned_half_is_stepped_as_if_it_were_cast_and_goes_on_and_resumes(
    mode, half, parts, fused
) -> None:
    """The third step overflows."""

    def make(by_data):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), Head(by_data))
        own = trainer_of(Precision(mode, half), model, fused=fused)
        ema = Ema(model, {p: own.optimizer.master_of(p) for p in model.parameters()}, 0.9)
        own.algorithms["ema"] = ema
        return own

    cast, whole, first, second = map(make, (False, True, True, True))
    given = [list(zip(x.chunk(parts), y.chunk(parts), strict=True)) for x, y in batches(6)]
    given[2] = [(x * torch.inf, y) for x, y in given[2]]
    for number, window in enumerate(given):
        results = [own.train_step(*window) for own in (cast, whole)]
        assert [bool(result.skipped) for result in results] == [number == 2] * 2
        assert same_bits(*([result.loss] for result in results))
    masters = [list(own.optimizer.masters_by_name(own.model).values()) for own in (cast, whole)]
    assert formats(masters) == {FP32}
    assert same_bits(*masters)
    for window in given[:4]:
        first.train_step(*window)
    with torch.no_grad(), ema_of(first).evaluating(first), first.precision.cast():
        first.model(given[0][0][0])  # The averages are rounded, too, and put back.
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for own in (first, second):
        for window in given[4:]:
            own.train_step(*window)
        assert differing(whole.state_dict(), own.state_dict()) == []


@pytest.mark.parametrize(("named", "half"), [(True, "float16"), (False, "bfloat16")])
def test_a_weight_turned_half_outside_of_the_casts_is_rounded_once_and_said(
    named, half, caplog
) -> None:
    model, dtype = nn.Sequential(Head()), HALVES[half]
    weight, plain = model[0].W, torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = Precision().prepare(model, plain)[1] if named else MasterWeights(plain)
    moved = weight.detach().to(dtype).float()
    for _ in range(3):
        weight.data = weight.data.to(dtype)
        weight.grad = torch.full_like(weight, 2.0**-14)  # Lost beside 1 in half.
        optimizer.step()
        moved -= 2.0**-14
    assert torch.equal(weight, moved)
    what = "0.W" if named else "a weight of shape (16, 8)"
    said = f"optimizer: {what} turned half outside of cast(), and was rounded once"
    assert caplog.messages == [said]


@torch.no_grad()
def move(teacher, online, way="BYOL") -> None:
    """As those do: a frozen copy follows the weights by a thousandth in each step."""
    for b, a in zip(teacher.parameters(), online.parameters(), strict=True):
        if way == "BYOL":
            b.mul_(0.999).add_(a, alpha=0.001)
        elif way == "DINO":
            b.data.mul_(0.999).add_(a.data, alpha=0.001)
        elif way == "MoCo":
            b.data = b.data * 0.999 + a.data * 0.001


class Student(nn.Module):
    """A model that holds its teacher, as lightly's do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.online = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
        self.teacher = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            self.teacher(x)
        return self.online(x)


def student(half="float16", grouped=True, **options):
    """A trainer of one whose teacher has its place in the optimizer or not."""
    model = Student()
    return trainer_of(Precision("mixed", half, **options), model, None if grouped else model.online)


@pytest.mark.parametrize(("half", "way"), [("float16", "BYOL"), ("bfloat16", "DINO")])
def test_a_teacher_copied_after_prepare_moves_in_fp32(half, way) -> None:
    """Beside a copy of the masters that is moved by the same half weights."""
    online = Student().online
    trainer = trainer_of(Precision("mixed", half), online)
    teacher = copy.deepcopy(online).requires_grad_(False)
    with fp32_weights(online):
        expected = copy.deepcopy(online)
    assert same_bits(teacher.parameters(), expected.parameters())
    assert online[0].weight.dtype == HALVES[half]
    for batch in batches(4):
        trainer.train_step(batch)
        move(teacher, online, way)
        move(expected, online, way)
    assert same_bits(teacher.parameters(), expected.parameters())
    assert teacher[0].weight.dtype == FP32


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize(
    ("half", "grouped", "way"),
    [("float16", False, "BYOL"), ("float16", True, "DINO"), ("bfloat16", True, "MoCo")],
)
def test_a_teacher_inside_the_model_turns_fp32_where_it_is_moved(
    half, grouped, way, looks, monkeypatch, caplog
) -> None:
    """An accelerator compares values in the first steps alone: `.data.mul_` raises no counter."""
    if not looks:
        monkeypatch.setattr(core_masters, "_compares_values", lambda _: False)
    trainer = student(half, grouped)
    teacher, online, copies = trainer.model.teacher, trainer.model.online, []
    for batch in batches(20):
        trainer.train_step(batch)
        for own in (teacher, *copies):
            move(own, online, way)
        if teacher[0].weight.dtype == FP32 and not copies:
            copies.append(copy.deepcopy(teacher))
    # It is the second step that notices: the first move is rounded to half, no other one is.
    # Small biases may take some steps until a move shows in half.
    assert torch.equal(teacher[0].weight, copies[0][0].weight)
    assert online[0].weight.dtype == HALVES[half]
    said = ": frozen, and written outside of the step: stored in float32 from now on"
    assert "teacher.0.weight" in caplog.messages[0]
    assert caplog.messages[0].endswith(said)


@pytest.mark.parametrize(("looks", "half"), [(True, "float16"), (False, "bfloat16")])
def test_a_teacher_that_nobody_moves_stays_half(half, looks, monkeypatch, caplog) -> None:
    """Also if it was loaded before the first step, or is exchanged and put back."""
    caplog.set_level(logging.INFO)
    if not looks:
        monkeypatch.setattr(core_masters, "_compares_values", lambda _: False)
    trainer = student(half, grouped=False)
    weight = trainer.model.teacher[0].weight.detach()
    weight.fill_(0.5)
    for batch in batches(6):
        trainer.train_step(batch)
        kept = weight.clone()
        weight.fill_(1.0)
        weight.copy_(kept)
    assert trainer.model.teacher[0].weight.dtype == HALVES[half]
    assert (weight.unique().tolist(), caplog.messages) == ([0.5], [])


@pytest.mark.parametrize("grouped", [True, False])
def test_a_resumed_run_moves_its_teacher_in_fp32_at_once(grouped) -> None:
    given, whole, second = batches(8), student("bfloat16", grouped), student("bfloat16", grouped)
    for number, batch in enumerate(given):
        if number == 4:
            second.load_state_dict(copy.deepcopy(whole.state_dict()))
        for own in (whole,) if number < 4 else (whole, second):
            own.train_step(batch)
            move(own.model.teacher, own.model.online)
    assert differing(whole.state_dict(), second.state_dict()) == []
    assert whole.state_dict()["widened"] != []


def test_without_lists_a_teacher_stays_half() -> None:
    """No op is cast there, so that all weights need one format."""
    trainer = student("bfloat16", ops=OpLists())
    for batch in batches(4):
        trainer.train_step(batch)
        move(trainer.model.teacher, trainer.model.online)
    assert formats([*trainer.model.parameters()]) == {torch.bfloat16}


@pytest.mark.parametrize(
    ("mode", "half", "arguments"),
    [
        ("mixed", "float16", {}),
        ("mixed", "bfloat16", {"multi_avg_fn": get_ema_multi_avg_fn(0.999)}),
        ("amp", "float16", {}),
    ],
)
def test_torchs_averaged_model_averages_masters(mode, half, arguments) -> None:
    """Made before the weights turn half, or after."""
    model = Student().online
    early, trainer = AveragedModel(model, **arguments), trainer_of(Precision(mode, half), model)
    reference = nn.ParameterList(trainer.optimizer.master_of(p) for p in model.parameters())
    late, expected = (AveragedModel(own, **arguments) for own in (model, reference))
    for batch in batches(3):
        trainer.train_step(batch)
        for averaged, own in ((early, model), (late, model), (expected, reference)):
            averaged.update_parameters(own)
    for averaged in (early, late):
        assert same_bits(averaged.module.parameters(), expected.module.parameters())
