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
from mpframe.training.callbacks.ema import AverageWeights, Ema, ema_of
from mpframe.training.optimizers.multi_optimizer import MultiOptimizer

OBJECTIVE = supervised(nn.CrossEntropyLoss())


def batches(count):
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(32, 16, generator=generator) for _ in range(count)]
    return [(x, x.argmax(1) % 8) for x in inputs]


class Head(nn.Module):
    """As heads of metric learning have it: the weight follows the format of the embedding."""

    def __init__(self):
        super().__init__()
        self.W, self.by_data = nn.Parameter(torch.randn(16, 8)), True

    def forward(self, z):
        if self.by_data:
            self.W.data = self.W.data.to(z.dtype)
        return F.normalize(z) @ F.normalize(self.W.to(z.dtype), dim=0) * 8


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), Head())


def follow(trainer, given) -> None:
    """Train, and move a teacher if there is one."""
    for batch in given:
        trainer.train_step(batch)
        if isinstance(trainer.model, Student):
            move(trainer.model.teacher, trainer.model.online)


def adamw(parameters, **options):
    return torch.optim.AdamW(parameters, lr=1e-2, **options)


@pytest.mark.parametrize(
    ("mode", "half", "parts", "fused"),
    [
        ("amp", "float16", 1, False),
        ("amp", "bfloat16", 2, True),
        ("mixed", "float16", 2, False),
        ("mixed", "bfloat16", 1, True),
    ],
)
@pytest.mark.parametrize("several", [False, True])
def test_a_weight_turned_half_is_stepped_as_if_it_were_cast(
    mode, half, parts, fused, several
) -> None:
    """By one optimizer, or by one for each module. The third step overflows."""
    runs = []
    for by_data in (True, False):
        precision, model, scaler = Precision(mode, half), net(), Backoff(2.0**10)
        model[1].by_data = by_data
        stepped = {"trunk": model[0], "head": model[1]} if several else {"all": model}
        own = {name: adamw(part.parameters(), fused=fused) for name, part in stepped.items()}
        optimizer = MultiOptimizer(
            {name: precision.prepare(model, plain)[1] for name, plain in own.items()}
        )
        losses = []
        for number, given in enumerate(batches(5)):
            optimizer.zero_grad()
            for x, y in zip(*(whole.chunk(parts) for whole in given), strict=True):
                with precision.cast():
                    losses.append(F.cross_entropy(model(x), y))
                (losses[-1] * scaler.scale * (torch.inf if number == 2 else 1.0)).backward()
                if parts > 1:
                    optimizer.accumulate(scaler.scale)
            assert optimizer.step(scaler).skipped == (number == 2)
        masters = [optimizer.master_of(p).detach() for p in model.parameters()]
        runs.append([*losses, *masters])
        assert formats(masters) == {torch.float32}
    assert same_bits(*runs)


@pytest.mark.parametrize(("named", "half"), [(True, "float16"), (False, "bfloat16")])
def test_a_weight_turned_half_outside_of_the_casts_is_rounded_once_and_said(
    named, half, caplog
) -> None:
    model, dtype = net(), HALVES[half]
    plain = torch.optim.SGD(model[1].parameters(), lr=1.0)
    optimizer = Precision().prepare(model, plain)[1] if named else MasterWeights(plain)
    moved = model[1].W.detach().to(dtype).float()
    for _ in range(3):
        model[1].W.data = model[1].W.data.to(dtype)
        model[1].W.grad = torch.full_like(model[1].W, 2.0**-14)  # Lost beside 1 in half.
        optimizer.step()
        moved -= 2.0**-14
    assert torch.equal(model[1].W, moved)
    what = "1.W" if named else "a weight of shape (16, 8)"
    said = f"optimizer: {what} turned half outside of cast(), and was rounded once"
    assert caplog.messages == [said]


@pytest.mark.parametrize(("mode", "half"), [("amp", "bfloat16"), ("mixed", "float16")])
def test_a_trainer_whose_weight_turned_half_goes_on_and_resumes_bit_for_bit(mode, half) -> None:
    def trainer():
        model, precision = net(), Precision(mode, half)
        model, optimizer = precision.prepare(model, adamw(model.parameters()))
        ema = Ema({p: optimizer.master_of(p) for p in model.parameters()}, 0.9)
        algorithms = {"ema": AverageWeights(ema, model)}
        return Trainer(model, optimizer, OBJECTIVE, precision, algorithms=algorithms)

    given = batches(6)
    whole, first, second = trainer(), trainer(), trainer()
    follow(whole, given)
    follow(first, given[:3])
    with torch.no_grad(), ema_of(first).apply(), first.precision.cast():
        first.model(given[0][0])  # The averages are rounded, too, and put back.
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for own in (first, second):
        follow(own, given[3:])
        assert differing(whole.state_dict(), own.state_dict()) == []


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
    """One with its optimizer, in which the teacher has its place or not."""
    precision, model = Precision("mixed", half, **options), Student()
    plain = adamw((model if grouped else model.online).parameters())
    return model, precision.prepare(model, plain)[1], precision


def steps(model, optimizer, precision, count):
    """Trains, and yields after each step."""
    for inputs, targets in batches(count):
        optimizer.zero_grad()
        with precision.cast():
            loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        yield


@pytest.mark.parametrize(("half", "way"), [("float16", "BYOL"), ("bfloat16", "DINO")])
def test_a_teacher_copied_after_prepare_moves_in_fp32(half, way) -> None:
    """Beside a copy of the masters that is moved by the same half weights."""
    precision, online = Precision("mixed", half), Student().online
    _, optimizer = precision.prepare(online, adamw(online.parameters()))
    teacher = copy.deepcopy(online).requires_grad_(False)
    with fp32_weights(online):
        expected = copy.deepcopy(online)
    assert same_bits(teacher.parameters(), expected.parameters())
    assert online[0].weight.dtype == HALVES[half]
    for _ in steps(online, optimizer, precision, 4):
        move(teacher, online, way)
        move(expected, online, way)
    assert same_bits(teacher.parameters(), expected.parameters())
    assert teacher[0].weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("half", "grouped", "way"),
    [("float16", True, "BYOL"), ("float16", False, "DINO"), ("bfloat16", True, "MoCo")],
)
def test_a_teacher_inside_the_model_turns_fp32_where_it_is_moved(
    half, grouped, way, caplog
) -> None:
    model, optimizer, precision = student(half, grouped)
    copies = []
    for _ in steps(model, optimizer, precision, 20):
        for own in (model.teacher, *copies):
            move(own, model.online, way)
        if model.teacher[0].weight.dtype == torch.float32 and not copies:
            copies.append(copy.deepcopy(model.teacher))
    # It is the second step that notices: the first move is rounded to half, no other one is.
    # Small biases may take some steps until a move shows in half.
    assert torch.equal(model.teacher[0].weight, copies[0][0].weight)
    assert model.online[0].weight.dtype == HALVES[half]
    said = ": frozen, and written outside of the step: stored in float32 from now on"
    assert "teacher.0.weight" in caplog.messages[0]
    assert caplog.messages[0].endswith(said)


@pytest.mark.parametrize(("way", "grouped"), [("BYOL", False), ("DINO", True), ("MoCo", True)])
def test_a_teacher_turns_fp32_as_on_an_accelerator(way, grouped, monkeypatch) -> None:
    """There values are compared in the first steps alone: `.data.mul_` raises no counter."""
    monkeypatch.setattr(core_masters, "_compares_values", lambda _: False)
    model, *rest = student("bfloat16", grouped)
    for _ in steps(model, *rest, 3):
        move(model.teacher, model.online, way)
    assert model.teacher[0].weight.dtype == torch.float32
    before = model.teacher[0].weight.detach().clone()
    list(steps(model, *rest, 1))
    assert torch.equal(model.teacher[0].weight, before)  # No master writes over it.


@pytest.mark.parametrize(("looks", "half"), [(True, "float16"), (False, "bfloat16")])
def test_a_teacher_that_nobody_moves_stays_half(half, looks, monkeypatch, caplog) -> None:
    """Also if it was loaded before the first step, or is exchanged and put back."""
    caplog.set_level(logging.INFO)
    if not looks:
        monkeypatch.setattr(core_masters, "_compares_values", lambda _: False)
    model, *rest = student(half, grouped=False)
    weight = model.teacher[0].weight.detach()
    weight.fill_(0.5)
    for _ in steps(model, *rest, 6):
        kept = weight.clone()
        weight.fill_(1.0)
        weight.copy_(kept)
    assert model.teacher[0].weight.dtype == HALVES[half]
    assert (weight.unique().tolist(), caplog.messages) == ([0.5], [])


@pytest.mark.parametrize("grouped", [True, False])
def test_a_resumed_run_moves_its_teacher_in_fp32_at_once(grouped) -> None:
    students = (student("bfloat16", grouped) for _ in range(2))
    whole, second = (Trainer(model, own, OBJECTIVE, how) for model, own, how in students)
    given = batches(8)
    follow(whole, given[:4])
    second.load_state_dict(copy.deepcopy(whole.state_dict()))
    follow(whole, given[4:])
    follow(second, given[4:])
    assert differing(whole.state_dict(), second.state_dict()) == []
    assert whole.state_dict()["widened"] != []


def test_without_lists_a_teacher_stays_half() -> None:
    """No op is cast there, so that all weights need one format."""
    model, *rest = student("bfloat16", ops=OpLists())
    for _ in steps(model, *rest, 4):
        move(model.teacher, model.online)
    assert formats([*model.parameters()]) == {torch.bfloat16}


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
    precision, model = Precision(mode, half), Student().online
    early = AveragedModel(model, **arguments)
    _, optimizer = precision.prepare(model, adamw(model.parameters()))
    reference = nn.ParameterList(optimizer.master_of(p) for p in model.parameters())
    late, expected = (AveragedModel(own, **arguments) for own in (model, reference))

    for _ in steps(model, optimizer, precision, 3):
        for averaged, own in ((early, model), (late, model), (expected, reference)):
            averaged.update_parameters(own)
    for averaged in (early, late):
        assert same_bits(averaged.module.parameters(), expected.module.parameters())
