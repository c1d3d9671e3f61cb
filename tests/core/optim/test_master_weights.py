"""fp32 masters around every optimizer of torch: exactness, groups, what is refused."""

import itertools

import pytest
import small_steps as small
import torch
from fixtures import refused
from small_steps import BFLOAT16, FP32, HALF, INF, NAN, SGD, STEPPING, AdamW
from torch import nn
from vocabulary import formats, same_bits

from mpframe import Backoff, MasterWeights, Precision, Static, Trainer
from mpframe.core.errors import ConfigError
from mpframe.core.objective import supervised
from mpframe.core.optim.masters import set_master
from mpframe.tracking.dtype_map import dtype_map
from mpframe.training.optimizers.multi_optimizer import MultiOptimizer
from mpframe.training.plan import Plan
from mpframe.training.trainers.lbfgs import step_with_closure

LBFGS, MSE = torch.optim.LBFGS, nn.MSELoss()


@pytest.mark.parametrize(
    ("cls", "dtype", "scale", "clip"),
    [
        *((cls, FP32, 2.0**10, {}) for cls in STEPPING),
        *((cls, half, None, {}) for cls, half in zip(STEPPING, itertools.cycle([HALF, BFLOAT16]))),
        *((SGD, FP32, 2.0**-9, {}), (AdamW, FP32, None, {})),
        *((SGD, FP32, 2.0**7, {"max_norm": bound}) for bound in (0.1, 1e9)),
        (AdamW, FP32, 2.0**7, {"max_value": 0.1}),
    ],
)
def test_masters_are_what_the_plain_optimizer_makes_in_fp32_and_clipping_is_torchs(
    cls, dtype, scale, clip
) -> None:
    """Bit for bit, also under a power-of-two scale: it moves exponents, no other bit."""
    plain_params, params = small.parameters(), small.parameters()
    for p in params:
        exact, p.data = p.detach().clone(), p.data.to(dtype)
        if dtype != FP32:
            set_master(p, exact)
    plain, wrapped = cls(plain_params, lr=0.05), MasterWeights(cls(params, lr=0.05))
    torchs = {"max_norm": nn.utils.clip_grad_norm_, "max_value": nn.utils.clip_grad_value_}
    for step in range(3):
        rounded = [g.to(dtype) for g in small.gradients(step, cls)]
        small.set_gradients(plain_params, rounded)
        small.set_gradients(params, rounded, scale or 1.0)
        result = wrapped.step(None if scale is None else Static(scale), **clip)
        for name, bound in clip.items():
            norm = nn.utils.get_total_norm([p.grad for p in plain_params])
            assert torch.equal(result.grad_norm, norm)
            torchs[name](plain_params, bound)
        plain.step()
        assert same_bits([wrapped.master_of(p) for p in params], plain_params)
        assert same_bits(params, [p.to(dtype) for p in plain_params])
    assert same_bits(small.state_tensors(wrapped.optimizer), small.state_tensors(plain))
    assert all((wrapped.master_of(p) is p) is (dtype == FP32) for p in params)


@pytest.mark.parametrize("arrives", [FP32, HALF])
def test_masters_start_from_before_the_rounding(arrives) -> None:
    """Also those of a group that is added later."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(arrives)
    later, first = (layer.weight.detach().clone() for layer in model)
    model, wrapped = Precision("mixed").prepare(model, SGD(model[1].parameters(), lr=0.1))
    assert same_bits([model[1].weight], [first.half()])
    assert same_bits([wrapped.master_of(model[1].weight)], [first.float()])
    wrapped.add_param_group({"params": list(model[0].parameters()), "lr": 1.0})
    assert same_bits([wrapped.master_of(model[0].weight)], [later.float()])
    model[0].weight.grad = torch.ones(4, 4, dtype=HALF)
    wrapped.step()
    assert same_bits([wrapped.master_of(model[0].weight)], [later.float() - 1])


@pytest.mark.parametrize("keep", [True, False])
def test_state_made_before_wrapping_is_widened_if_there_are_masters(keep) -> None:
    params = small.parameters(HALF)
    optimizer = SGD(params, lr=0.1, momentum=0.9)
    small.give(params, 0)
    optimizer.step()
    wrapped = MasterWeights(optimizer, keep_masters=keep)
    for _ in range(2):
        assert formats(small.state_tensors(optimizer)) == {FP32 if keep else HALF}
        small.give(params, 0, scale=1024.0)
        wrapped.step(Static(1024.0))
    assert all((wrapped.master_of(p) is p) is not keep for p in params)


@pytest.mark.parametrize("kind", ["fused", "foreach"])
def test_frozen_unused_and_empty_parameters_stay_also_without_any_gradient(kind) -> None:
    (used, unused, frozen), empty = small.parameters(HALF), nn.Parameter(torch.zeros(0, 3).half())
    params = [used, unused, frozen.requires_grad_(False), empty]
    wrapped = MasterWeights(AdamW([{"params": params}, {"params": []}], lr=0.1, **{kind: True}))
    before = [wrapped.master_of(p).detach().clone() for p in params]
    result = wrapped.step(Backoff(), max_norm=1.0)
    assert (result.amax.item(), result.grad_norm.item(), bool(result.skipped)) == (0, 0, False)
    for _ in range(2):
        used.grad, empty.grad = torch.ones_like(used), torch.zeros_like(empty)
        assert wrapped.step(Static(2.0), max_norm=1e3).amax.item() == 0.5
    after = [wrapped.master_of(p) for p in params]
    assert not torch.equal(after[0], before[0])
    assert same_bits(after[1:], before[1:])
    assert after[2].requires_grad is False


def test_tied_weights_have_one_master_in_the_widest_format_wanted() -> None:
    """An embedding keeps fp32 weights; the head that shares them casts them when it runs."""
    precision = Precision("mixed")
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model, wrapped = precision.prepare(model, SGD(model.parameters(), 1.0))
    assert len(wrapped.param_groups[0]["params"]) == 3
    with precision.cast():
        model(torch.ones(1, 3)).sum().backward()
    wrapped.step()
    assert same_bits([model[1].weight], [wrapped.master_of(model[0].weight).half()])
    names = wrapped.masters_by_name(model)
    assert names["0.weight"].data_ptr() == names["1.weight"].data_ptr()
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    model[1].weight = model[0].weight
    rows = {row.module: row.storage for row in dtype_map(precision, model)}
    precision.prepare(model, SGD(model.parameters(), lr=0.1))
    assert (model[1].weight.dtype, model[1].bias.dtype) == (FP32, HALF)
    assert rows == {"0": FP32, "1": FP32}
    with precision.cast():
        assert model(torch.tensor([1])).dtype == HALF


def test_groups_show_the_models_parameters_and_share_all_else() -> None:
    params, wrapped = small.wrapped(HALF, momentum=0.9)
    (group,), (inner,) = wrapped.param_groups, wrapped.optimizer.param_groups
    assert all(a is b for a, b in zip(group["params"], params, strict=True))
    assert {**group, "params": None} == {**inner, "params": None}
    for one, other in ((group, inner), (inner, group)):
        one["lr"] *= 2
        assert one["lr"] == other["lr"]
    inner["mine"] = 1
    del group["mine"]
    assert ("mine" in inner, len(group)) == (False, len(inner))
    assert refused(ConfigError, group.update, params=[]) == (
        "optimizer.param_groups: params stay as they are; add some with add_param_group, or make a "
        "new optimizer"
    )
    assert wrapped.defaults is wrapped.optimizer.defaults
    small.give(params, 0)
    wrapped.step()
    states = [wrapped.optimizer.state[wrapped.master_of(p)] for p in params]
    assert all(wrapped.state[p] is own for p, own in zip(params, states, strict=True))


@pytest.mark.parametrize("half", [HALF, BFLOAT16])
def test_a_penalty_on_masters_counts(half) -> None:
    """As scaled as the loss, and added in fp32: 2^-13 beside 1 is nothing in half."""
    weight, wrapped = small.one(torch.zeros(2, 1, dtype=half))
    for number, total in enumerate((1 + 2.0**-13, 2 + 2.0**-12)):
        weight.grad = torch.full_like(weight, 4.0)
        (wrapped.master_of(weight).sum() * 2.0**-11).backward()
        if number:
            wrapped.accumulate(4.0)
        assert wrapped.step(Static(4.0)).amax.item() == 1 + 2.0**-13
        assert wrapped.master_of(weight).flatten().tolist() == [-total, -total]
    row = small.sparse([0], torch.ones(1, 1), (2, 1))
    for own, of_master in ((row, row), (row, row.to_dense()), (row.to_dense(), row)):
        before = wrapped.master_of(weight).detach().clone()
        weight.grad, wrapped.master_of(weight).grad = own.to(half), of_master.clone()
        wrapped.step()
        assert torch.equal(wrapped.master_of(weight), before - 2 * row.to_dense())


def test_what_nothing_can_be_clipped_to() -> None:
    params, wrapped = small.wrapped()
    small.give(params, 0)
    before, several = small.snapshot(wrapped, params), MultiOptimizer({"all": wrapped})
    for name, value in itertools.product(("norm", "value"), (0.0, -1.0, NAN, INF)):
        text = f"{name}={value}: must be a finite number > 0"
        for step in (wrapped.step, several.step):
            with pytest.raises(ConfigError, match=f"^max_{text}; None leaves the"):
                step(**{f"max_{name}": value})
        with pytest.raises(ConfigError, match=rf"^trainer.clip_{text}"):
            Plan(**{f"clip_{name}": value})
    assert small.unchanged(before, wrapped, params)
    assert all(p.grad is not None for p in params)


def test_a_frozen_model_takes_any_optimizer_and_a_model_one_over_a_part_and_more() -> None:
    teacher, student = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)
    temperature = nn.Parameter(torch.ones(()))
    for model, trained in ((teacher, [student.weight]), (student, [student.bias, temperature])):
        Precision("mixed").prepare(model, SGD(trained, lr=0.1))
        assert {p.dtype for p in model.parameters()} == {HALF}


def made(*weights, cls=SGD, **options):
    return MasterWeights(cls([nn.Parameter(weight) for weight in weights]), **options)


def prepared_twice(mode="mixed", phase=None):
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    model.register_parameter("phase", phase)
    for _ in range(2):
        Precision(mode).prepare(model, optimizer)


ONE, COMPLEX = torch.zeros(2), nn.Parameter(torch.zeros(2, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("attempt", "said"),
    [
        (lambda: made(COMPLEX), "optimizer: parameter 0 of shape (2,) is torch.complex64; masters "
         "hold real numbers: store it as two real parameters"),
        (lambda: prepared_twice("fp32", COMPLEX), "parameter 'phase' is torch.complex64"),
        (lambda: made(torch.eye(2, dtype=HALF).to_sparse()), "optimizer: parameter 0 of shape "
         "(2, 2) is sparse and torch.float16; a half weight is dense: store it in fp32 "
         "(ops.modules=...:fp32), or dense"),
        (lambda: made(ONE, ONE.to("meta")), "parameters on cpu and meta; "),
        (lambda: prepared_twice(), "optimizer=SGD: has its masters already; use what "
         "precision.prepare returned, or make a new optimizer"),
        (lambda: Precision("mixed").prepare(nn.Linear(2, 2), SGD([nn.Parameter(ONE)], lr=0.1)),
         "optimizer=SGD: holds no parameter of this Linear; make it over model.parameters()"),
        (lambda: Trainer(nn.Linear(2, 2), SGD([nn.Parameter(ONE)], lr=0.1), supervised(MSE)),
         "optimizer=SGD: is not prepared; give the trainer what "
         "precision.prepare(model, optimizer) returned"),
        (lambda: Precision("amp").prepare(nn.Linear(2, 2), [SGD]), "optimizer=[<class "
         "'torch.optim.sgd.SGD'>]: must be a torch optimizer; prepare each of several"),
        (lambda: Trainer(*Precision("amp").prepare(layer := nn.Linear(2, 2), SGD(
            layer.parameters(), lr=0.1)), supervised(MSE)), "precision=fp32: the optimizer was "
         "prepared by another one, amp(float16); give the trainer that precision"),
        (lambda: made(ONE).step(Static(2.0).scale), "optimizer.step: takes a scaler of mpframe "
         "itself, not its scale"),
        (lambda: made(ONE, cls=LBFGS).step(), "optimizer=LBFGS: evaluates the loss itself; step it "
         "with mpframe.training.trainers.lbfgs, or use an optimizer without a closure"),
        (lambda: step_with_closure(made(ONE.half(), cls=LBFGS), int),
         "optimizer=LBFGS: a closure goes without half weights; use dtype=fp32 or"),
        (lambda: made(ONE).step(max_norm=1.0, max_value=0.5),
         "max_norm and max_value: cannot be combined; give only one"),
    ],
)  # fmt: skip
def test_what_does_not_go_is_refused_in_one_line(attempt, said) -> None:
    assert said in refused(ConfigError, attempt)
