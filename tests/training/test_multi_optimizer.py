"""Several optimizers in one step: exact against loops by hand, and who moves after an overflow."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from vocabulary import differing, flat

from mpframe import Backoff, Precision, Static, Trainer
from mpframe.core.callback import Batch
from mpframe.core.errors import CheckpointError, ConfigError
from mpframe.core.objective import supervised
from mpframe.training.callbacks.guards import saturation_warning
from mpframe.training.optimizers.multi_optimizer import MultiOptimizer

# Each with the part, or the loss, that overflows.
BAD = [
    ("fp32", "float16", 0),
    ("mixed", "float16", 1),
    ("mixed", "bfloat16", 0),
    ("amp", "float16", 1),
]
INF = float("inf")
PARTS = ("body", "head")


def body_and_head() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator))
        for _ in range(count)
    ]


def plain_parts(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    return {
        "body": torch.optim.AdamW(model[0].parameters(), lr=1e-2),
        "head": torch.optim.SGD(model[2].parameters(), lr=1e-1, momentum=0.9),
    }


def joint(
    mode: str = "fp32", half: str = "float16", skip: str = "all"
) -> tuple[nn.Module, MultiOptimizer, Precision]:
    model, precision = body_and_head(), Precision(mode, half)
    parts = {n: precision.prepare(model, own)[1] for n, own in plain_parts(model).items()}
    return model, MultiOptimizer(parts, skip=skip), precision


def snapshot(model: nn.Module, optimizer: MultiOptimizer) -> dict[str, Any]:
    """Weights, masters and optimizer state of each part."""
    return {
        name: copy.deepcopy([part.parameters, part.state_dict()])
        for name, part in optimizer.parts.items()
    }


def same(one: Any, other: Any) -> bool:
    return flat(one).keys() == flat(other).keys() and not differing(one, other)


@pytest.mark.parametrize(
    ("skip", "clipping"), [("all", {}), ("each", {"max_norm": 0.05}), ("all", {"max_value": 0.005})]
)
def test_in_fp32_it_is_the_loop_by_hand(skip: str, clipping: dict[str, float]) -> None:
    model, optimizer, _ = joint(skip=skip)
    hand = body_and_head()
    plain = plain_parts(hand)
    scaler = Static(2.0**10)
    for inputs, targets in batches(20):
        (nn.functional.cross_entropy(model(inputs), targets) * scaler.scale).backward()
        result = optimizer.step(scaler, **clipping)
        optimizer.zero_grad()
        for own in plain.values():
            own.zero_grad()
        nn.functional.cross_entropy(hand(inputs), targets).backward()
        if "max_norm" in clipping:
            nn.utils.clip_grad_norm_(hand.parameters(), clipping["max_norm"])
        if "max_value" in clipping:
            nn.utils.clip_grad_value_(hand.parameters(), clipping["max_value"])
        for own in plain.values():
            own.step()
        assert not result.skipped
    # The norm of all parameters at once, and that of the parts' norms, differ in their last bit.
    tolerance = 1e-6 if "max_norm" in clipping else 0.0
    for mine, theirs in zip(model.parameters(), hand.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("mode", "half", "number"), BAD)
def test_all_or_nothing(mode: str, half: str, number: int) -> None:
    bad = PARTS[number]
    model, optimizer, precision = joint(mode, half, "all")
    one_good_step(model, optimizer, precision)
    before = snapshot(model, optimizer)
    backward(model, precision)
    spoil(optimizer, bad)
    scaler = Backoff()
    result = optimizer.step(scaler)
    assert result.skipped
    assert all(part.skipped for part in result.each().values())
    assert same(before, snapshot(model, optimizer))
    assert scaler.scale == 2.0**15


@pytest.mark.parametrize(("mode", "half", "number"), BAD)
def test_each_on_its_own(mode: str, half: str, number: int) -> None:
    bad, good = PARTS[number], PARTS[1 - number]
    model, optimizer, precision = joint(mode, half, "each")
    twin, alone, _ = joint(mode, half, "each")
    for net, own in ((model, optimizer), (twin, alone)):
        one_good_step(net, own, precision if net is model else _)
    before = snapshot(model, optimizer)
    backward(model, precision)
    backward(twin, _)
    spoil(optimizer, bad)
    result = optimizer.step(Static(1.0), max_norm=1e-3)
    for parameter in alone.parts[bad].parameters:
        parameter.grad = None
    alone.parts[good].step(Static(1.0), max_norm=1e-3)
    after, expected = snapshot(model, optimizer), snapshot(twin, alone)
    assert not result.skipped
    skipped = {name: bool(part.skipped) for name, part in result.each().items()}
    assert skipped == {bad: True, good: False}
    assert same(before[bad], after[bad])
    assert same(expected[good], after[good])
    assert not same(before[good], after[good])


def one_good_step(model: nn.Module, optimizer: MultiOptimizer, precision: Precision) -> None:
    backward(model, precision)
    assert not optimizer.step(Static(1.0)).skipped
    optimizer.zero_grad()


def backward(model: nn.Module, precision: Precision) -> None:
    inputs, targets = batches(1)[0]
    with precision.cast():
        outputs = model(inputs)
    nn.functional.cross_entropy(outputs.float(), targets).backward()


def spoil(optimizer: MultiOptimizer, part: str) -> None:
    gradient = optimizer.parts[part].parameters[0].grad
    assert gradient is not None
    gradient.view(-1)[0] = INF


@pytest.mark.parametrize(("skip", "dropped"), [("all", ["body", "head"]), ("each", ["head"])])
def test_a_bad_micro_batch_is_dropped_by_all_or_by_its_part(skip: str, dropped: list[str]) -> None:
    model, optimizer, precision = joint(skip=skip)
    twin, other, _ = joint(skip=skip)
    for number in range(3):
        backward(model, precision)
        if number == 1:
            spoil(optimizer, "head")
        amax = optimizer.accumulate()
        assert torch.isfinite(amax) == (number != 1)
        backward(twin, _)
        for name in dropped if number == 1 else []:
            for parameter in other.parts[name].parameters:
                parameter.grad = torch.full_like(parameter, INF)
        for part in other.parts.values():
            part.accumulate()
    result = optimizer.step(None)
    for part in other.parts.values():
        part.step(None)
    assert result.dropped == 1
    assert same(snapshot(model, optimizer), snapshot(twin, other))


@pytest.mark.parametrize(("skip", "skipped"), [("all", {"body", "head"}), ("each", {"head"})])
def test_means_of_all_ranks_skip_all_or_their_part(skip: str, skipped: set[str]) -> None:
    """An inf on any rank is one in the mean. The amax is that of all parts, for the scaler."""
    model, optimizer, precision = joint(skip=skip)
    backward(model, precision)
    spoil(optimizer, "head")
    means = {parameter: parameter.grad for parameter in model.parameters()}
    optimizer.zero_grad()
    optimizer.set_reduced_grads(means, torch.tensor(INF), torch.tensor(INF))
    parts = optimizer.step(None).each()
    assert {name for name, part in parts.items() if part.skipped} == skipped


def test_a_weight_beyond_half_is_held_at_its_end_after_loading() -> None:
    model, optimizer, _ = joint("mixed")
    weights = {**model.state_dict(), **optimizer.masters_by_name(model)}
    weights["0.weight"] = torch.full((8, 6), 1e6)
    optimizer.load_masters(model, weights)
    assert torch.equal(model[0].weight, torch.full((8, 6), 65504.0, dtype=torch.float16))
    assert torch.equal(optimizer.master_of(model[0].weight), weights["0.weight"])
    assert "48 weights" in (saturation_warning(optimizer, model) or "")


@pytest.mark.parametrize(("mode", "half", "number"), BAD[:2])
def test_one_part_of_one_loss_is_skipped_and_the_buffers_are_undone(
    mode: str, half: str, number: int
) -> None:
    """The other part steps; the statistics are those of a batch that was not wholly good."""
    bad = PARTS[number]
    model, optimizer, precision = joint(mode, half, "each")
    model[1] = nn.BatchNorm1d(8, affine=False)
    optimizer.parts[bad].parameters[0].register_hook(lambda gradient: gradient * INF)
    trainer = Trainer(model, optimizer, supervised(nn.CrossEntropyLoss()), precision)
    before = copy.deepcopy(list(model.buffers()))
    result = trainer.train_step(batches(1)[0])
    assert [name for name, part in result.each().items() if part.skipped] == [bad]
    assert not result.skipped
    assert same(before, list(model.buffers()))


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: joint(skip="some"), r"optimizer\.skip=some: must be all or each"),
        (lambda: one_loss({"a": Backoff()}), r"optimizer\.scalers=each: there is one loss, and one backward pass has one scale; use optimizer\.scalers=shared"),
        (lambda: parts_of_one(one=torch.optim.SGD, two=torch.optim.SGD), r"optimizer\.parts: 2 parameters are in one and in two; each belongs to one part"),
        (lambda: parts_of_one(one=torch.optim.LBFGS), r"optimizer\.parts\.one=LBFGS: needs a closure, and steps alone; choose an optimizer without one"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(make: Callable[[], Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        make()


def one_loss(scaler: Any) -> Trainer:
    model, optimizer, precision = joint()
    return Trainer(model, optimizer, supervised(nn.CrossEntropyLoss()), precision, scaler=scaler)


def parts_of_one(**classes: Any) -> MultiOptimizer:
    model, precision = nn.Linear(2, 2), Precision()
    made = {name: cls(model.parameters(), lr=1.0) for name, cls in classes.items()}
    return MultiOptimizer({name: precision.prepare(model, own)[1] for name, own in made.items()})


def test_another_runs_parts_are_refused() -> None:
    parts = r"optimizer\.parts: the checkpoint has a, this run body, head"
    with pytest.raises(CheckpointError, match=parts):
        joint()[1].load_state_dict({"a": {}})
