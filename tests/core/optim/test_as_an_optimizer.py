"""`MasterWeights` where a `torch.optim.Optimizer` is wanted: schedules, hooks, copies."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR
from vocabulary import same_bits, tensors

from mpframe import MasterWeights, Precision, Static
from mpframe.core.errors import ConfigError

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SWALR": lambda o: SWALR(o, swa_lr=0.05, anneal_epochs=3),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))


def prepared(
    mode: str = "mixed", half: str = "float16", **options: Any
) -> tuple[nn.Module, MasterWeights]:
    model = net()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.2}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, **options)
    return Precision(mode, half).prepare(model, optimizer)


def fill(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


def step(optimizer: Any, model: nn.Module, value: float = 1.0) -> None:
    fill(model, value)
    optimizer.step()


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
def test_a_schedule_over_it_is_one_over_a_plain_optimizer(make: Callable[[Any], Any]) -> None:
    """Built on what `prepare` returned; learning rates and momenta of each group, each step."""
    (model, wrapped), (plain_model, prepared_plain) = prepared(), prepared("fp32")
    plain = prepared_plain.optimizer
    schedules = make(wrapped), make(plain)
    for _ in range(5):
        step(wrapped, model)
        step(plain, plain_model)
        for schedule in schedules:
            metric = (1.0,) if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else ()
            schedule.step(*metric)
        for own, inner, other in zip(
            wrapped.param_groups, wrapped.optimizer.param_groups, plain.param_groups, strict=True
        ):
            for name in ("lr", "momentum"):
                assert own[name] == inner[name] == other[name]


def test_skipped_steps_give_no_warning_about_their_order() -> None:
    model, wrapped = prepared()
    schedule = lr_scheduler.StepLR(wrapped, 1)
    step(wrapped, model, float("inf"))
    schedule.step()


def test_hooks_see_the_steps_that_are_taken() -> None:
    model, wrapped = prepared()
    seen = []
    wrapped.register_step_post_hook(lambda optimizer, *_: seen.append(optimizer))
    wrapped.register_state_dict_pre_hook(lambda optimizer: seen.append(optimizer))
    step(wrapped, model)
    step(wrapped, model, float("inf"))
    wrapped.state_dict()
    assert seen == [wrapped.optimizer] * 2
    assert isinstance(wrapped, Optimizer)


def closure_over(model: nn.Module, optimizer: Any, precision: Precision) -> Callable[[], Any]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        with precision.cast():
            loss = model(torch.linspace(-1, 1, 8).view(2, 4)).float().pow(2).mean()
        loss.backward()
        return loss

    return closure


class TestClosures:
    """Lightning and torch's users call `step(closure)`; the closure computes the gradients."""

    @pytest.mark.parametrize(
        ("mode", "half", "by_position"),
        [("fp32", "float16", True), ("amp", "bfloat16", False), ("mixed", "float16", False)],
    )
    def test_a_closure_is_called_once_before_the_step(
        self, mode: str, half: str, by_position: bool
    ) -> None:
        runs: list[list[Any]] = []
        for given in (True, False):
            model, wrapped = prepared(mode, half)
            closure = closure_over(model, wrapped, Precision(mode, half))
            losses = []
            for _ in range(3):
                if not given:
                    losses.append(closure().detach())
                    assert wrapped.step().loss is None
                else:
                    named = {} if by_position else {"closure": closure}
                    losses.append(wrapped.step(*[closure][: not named], **named).loss)
            runs.append([*losses, *(p.detach() for p in model.parameters())])
        assert same_bits(*runs)

    def test_a_step_whose_closure_overflows_is_skipped(self) -> None:
        model, wrapped = prepared()
        before = [p.detach().clone() for p in model.parameters()]
        result = wrapped.step(lambda: fill(model, torch.inf))
        assert bool(result.skipped)
        assert result.loss is None
        assert same_bits(model.parameters(), before)

    def test_with_a_scaler_and_clipping(self) -> None:
        (model, wrapped), (plain_model, plain) = prepared(), prepared()
        options = {"scaler": Static(4.0), "max_norm": 1.0}
        wrapped.step(closure=lambda: fill(model, 4.0), **options)
        fill(plain_model, 4.0)
        plain.step(**options)
        assert same_bits(model.parameters(), plain_model.parameters())


def deep(pair: Any) -> Any:
    return copy.deepcopy(pair)


def pickled(pair: Any) -> Any:
    return pickle.loads(pickle.dumps(pair))


class TestCopies:
    """A copy of model and optimizer trains as they do, and apart from them."""

    @pytest.mark.parametrize(
        ("half", "copied", "scheduled"),
        [("float16", deep, True), ("bfloat16", pickled, True), ("float16", pickled, False)],
    )
    def test_a_copy_goes_on_by_itself(
        self, half: str, copied: Callable[[Any], Any], scheduled: bool
    ) -> None:
        pair = prepared(half=half)
        if scheduled:  # It has put a function of its own in the place of `step`.
            lr_scheduler.StepLR(pair[1], 1)
        step(pair[1], pair[0])
        model, optimizer = copied(pair)
        kept = [m.clone() for m in optimizer.masters_by_name(model).values()]
        step(pair[1], pair[0])
        assert same_bits(optimizer.masters_by_name(model).values(), kept)
        step(optimizer, model)
        assert same_bits(model.parameters(), pair[0].parameters())
        named = [o.masters_by_name(m).values() for m, o in ((model, optimizer), pair)]
        assert same_bits(*named)
        assert same_bits(*(tensors(list(o.state.values())) for o in (optimizer, pair[1])))

    @pytest.mark.parametrize("copied", [deep, pickled])
    def test_a_copy_has_its_masters(self, copied: Callable[[Any], Any]) -> None:
        """One for each weight, also for a second optimizer over the copied model."""
        model, optimizer = copied(prepared())
        again = torch.optim.SGD(model.parameters(), lr=0.1)
        _, second = Precision("mixed").prepare(model, again)
        weight = model[0].weight
        assert second.master_of(weight) is optimizer.master_of(weight)
        with pytest.raises(ConfigError, match="has its masters already"):
            MasterWeights(optimizer.optimizer)
        weight.data.clamp_(-0.1, 0.1)
        step(optimizer, model, 0.0)
        assert weight.abs().max() <= 0.1


class TestSparse:
    """An optimizer that does not take a sparse gradient says so before anything has moved."""

    @pytest.mark.parametrize(
        ("dtype", "way"), [(torch.float32, "step"), (torch.float16, "accumulate")]
    )
    def test_it_is_refused(self, dtype: torch.dtype, way: str) -> None:
        dense, table = (nn.Parameter(torch.ones(3, 2, dtype=dtype)) for _ in range(2))
        groups = [{"params": [dense]}, {"params": [table]}]
        wrapped = MasterWeights(torch.optim.AdamW(groups, lr=0.1))
        lr_scheduler.StepLR(wrapped.optimizer, 1)
        dense.grad, table.grad = torch.ones_like(dense), torch.ones_like(table).to_sparse(1)
        if way == "accumulate":
            wrapped.accumulate()
        with pytest.raises(ConfigError) as error:
            wrapped.step()
        reason = "Adam does not support sparse gradients, please consider SparseAdam instead"
        assert str(error.value) == (
            f"optimizer=AdamW: the parameter of shape (3, 2) has a sparse gradient: {reason}; use "
            "optimizer._target_=torch.optim.SGD, Adagrad or SparseAdam, or sparse=False in the "
            "embedding"
        )
        assert torch.equal(dense, torch.ones_like(dense))
        assert not wrapped.optimizer.state

    @pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch's Adagrad
    @pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam])
    def test_trying_leaves_no_trace(self, cls: Any) -> None:
        """The first step is what it is alone; hooks see one step."""
        tables = [nn.Parameter(torch.ones(3, 2, dtype=d)) for d in (torch.float32, torch.float16)]
        plain, wrapped = cls(tables[:1], lr=0.1), MasterWeights(cls(tables[1:], lr=0.1))
        seen: list[Any] = []
        wrapped.register_step_pre_hook(lambda optimizer, *_: seen.append(optimizer))
        for table, optimizer in zip(tables, (plain, wrapped), strict=True):
            table.grad = torch.ones_like(table).to_sparse(1)
            optimizer.step()
        assert same_bits([wrapped.master_of(tables[1])], tables[:1])
        assert seen == [wrapped.optimizer]
        assert wrapped.state.keys() <= {tables[1]}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_step_raises_the_version_of_what_it_moved(dtype: torch.dtype, fused: bool) -> None:
    """By it a kept cast knows that it is old; torch's fused kernels do not raise it."""
    moved, still = (nn.Parameter(torch.ones(2, dtype=dtype)) for _ in range(2))
    wrapped = MasterWeights(torch.optim.SGD([moved, still], lr=0.1, fused=fused))
    for _ in range(2):
        watched = [moved, wrapped.master_of(moved)]
        before = [tensor._version for tensor in watched]
        moved.grad = torch.ones_like(moved)
        wrapped.step()
        assert all(t._version > old for t, old in zip(watched, before, strict=True))


def test_a_model_without_parameters_and_no_lists() -> None:
    from mpframe import OpLists

    model = nn.Sequential(nn.ReLU())
    precision = Precision("mixed", ops=OpLists())
    outside = nn.Parameter(torch.ones(2))
    precision.prepare(model, torch.optim.SGD([outside], lr=0.1))
    with precision.cast():
        assert torch.equal(model(torch.ones(2)), torch.ones(2))
