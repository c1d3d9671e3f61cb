"""Combinations that hardly anyone uses: each raised, or gave a wrong number, before."""

from dataclasses import replace

import pytest
import torch
from fixtures import refused
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import pack_sequence
from torch.optim import SGD
from vocabulary import inside

from mpframe import MasterWeights, OpLists, Precision
from mpframe.core.comm import Comm
from mpframe.core.errors import ConfigError
from mpframe.core.objective import StepOutput
from mpframe.core.optim.gradients import measure_grads
from mpframe.core.trainer import StepTrainer
from mpframe.core.tree import map_tensors
from mpframe.precision.handlers import OpHandler

HALF = torch.float16


def prepared(model, mode, **options):
    precision = Precision(mode, **options)
    model, optimizer = precision.prepare(model, SGD(model.parameters(), lr=0.1))
    return precision, model, optimizer


@pytest.mark.parametrize("pin", ["half", "fp32"])
@pytest.mark.parametrize(("mode", "lists"), [("fp32", OpLists.named()), ("amp", OpLists())])
def test_a_pin_changes_no_format_where_no_op_is_cast(mode, lists, pin) -> None:
    model, ops = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), replace(lists, modules={"0": pin})
    precision, model, _ = prepared(model, mode, ops=ops, op_handlers=[OpHandler()])
    x = torch.randn(2, 4)
    assert torch.equal(inside(precision, model)(x), model(x))


def test_a_recipe_on_a_module_acts_in_fp32() -> None:
    ops = replace(OpLists.named(), modules={"0": "fp8_tensorwise"})
    precision, model, _ = prepared(nn.Sequential(nn.Linear(32, 32)), "fp32", ops=ops)
    x = torch.randn(32, 32)
    assert not torch.equal(inside(precision, model)(x), model(x))


def test_without_lists_inputs_become_half_whichever_weight_comes_first() -> None:
    model = nn.Module()
    model.head, model.body = nn.Linear(4, 4), nn.Linear(4, 4)
    model.forward = lambda x: model.head(model.body(x))
    precision, model, _ = prepared(model, "mixed", ops=OpLists(modules={"head": "fp32"}))
    assert inside(precision, model)(torch.randn(2, 4)).dtype == HALF


def test_a_half_weight_cannot_be_stepped_twice() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=HALF))
    optimizer = MasterWeights(SGD([weight], lr=1.0))
    line = "optimizer: parameter 0 of shape (2,) is in a group already, and would be stepped twice"
    assert refused(ConfigError, optimizer.add_param_group, {"params": [weight]}) == line


@pytest.mark.parametrize("kinds", [("sparse", "dense"), ("dense", "sparse")])
def test_micro_batches_may_be_sparse_and_dense(kinds) -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    nn.init.zeros_(embedding.weight)
    optimizer = MasterWeights(SGD(embedding.parameters(), lr=1.0))
    for kind in (*kinds, "bad"):
        if kind == "sparse":
            embedding(torch.tensor([1])).sum().backward()
        else:
            embedding.weight.grad = torch.full((4, 2), 3.0 if kind == "dense" else torch.inf)
        optimizer.accumulate()
    result = optimizer.step()
    assert result.dropped == 1
    assert embedding.weight[:, 0].tolist() == [-1.5, -2.0, -1.5, -1.5]


def test_an_empty_micro_batch_leaves_no_trace_in_buffers() -> None:
    precision, model, optimizer = prepared(nn.Linear(4, 1), "fp32")
    model.register_buffer("mean", torch.zeros(()))

    def objective(model, x):
        model.mean.lerp_(x.mean(), 0.5)
        return StepOutput(model(x).sum(), len(x))

    trainer = StepTrainer(model, optimizer, objective, precision)
    result = trainer.train_step(torch.ones(4, 4), torch.ones(0, 4))
    assert (bool(result.skipped), model.mean.item()) == (False, 0.5)


class Lazy(nn.Linear):
    """Registers a buffer in its first forward pass."""

    def forward(self, x):
        if not hasattr(self, "cache"):
            self.register_buffer("cache", torch.zeros(4))
        self.cache += 1
        self.steps += 1
        return super().forward(x) + self.cache.mean()


def test_a_buffer_that_a_skipped_step_registers_is_gone() -> None:
    precision, model, optimizer = prepared(Lazy(4, 4), "fp32")
    model.register_buffer("steps", torch.zeros(()))
    objective = lambda model, x: StepOutput(model(x).mean(), len(x))  # noqa: E731
    trainer = StepTrainer(model, optimizer, objective, precision)
    for x, steps in ((torch.inf, 0), (1.0, 1), (1.0, 2)):
        trainer.train_step(torch.full((2, 4), x))
        assert ("cache" in model._buffers, model.steps.item()) == (steps > 0, steps)
    assert model.cache.tolist() == [2.0] * 4


def test_float64_gradients_are_measured_on_an_accelerator(monkeypatch) -> None:
    """A fake kernel takes any format, so its calls are repeated with values, on a CPU."""
    norm, calls = torch._foreach_norm, []

    def noted(values, *args):
        calls.append(([value.dtype for value in values], args))
        return norm(values, *args)

    monkeypatch.setattr(torch, "_foreach_norm", noted)
    with FakeTensorMode(), torch.device("cuda"):
        wide = {torch.empty(4): torch.empty(4), torch.empty(4): torch.empty(4).double()}
        gradients = measure_grads(wide, 1.0, torch.device("cuda"), with_norm=True)
    assert {gradients.amax.dtype, gradients.norm().dtype} == {torch.float32}
    for dtypes, args in calls:
        assert norm([torch.full((1,), 3.0, dtype=dtype) for dtype in dtypes], *args)[0] == 3.0
    assert len(calls) == 2


def test_a_module_with_an_extra_state_loads_its_masters() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"seen": 1}

        def set_extra_state(self, state) -> None: ...

    _, model, optimizer = prepared(Extra(2, 2), "mixed")
    optimizer.load_masters(model, optimizer.masters_by_name(model))


def test_a_refused_group_leaves_the_optimizer_as_it_was() -> None:
    _, model, optimizer = prepared(nn.Linear(2, 2), "mixed")
    wrong = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    assert "masters hold real numbers" in refused(
        ConfigError, optimizer.add_param_group, {"params": [wrong]}
    )
    model(torch.ones(1, 2).half()).sum().backward()
    assert not optimizer.step().skipped


def test_a_buffer_is_rounded_alike_when_stored_and_when_loaded() -> None:
    model = nn.Linear(2, 2)
    values = torch.tensor([1e9, -1e9, torch.inf, -torch.inf, 0.1])
    model.register_buffer("limits", values)
    _, model, optimizer = prepared(model, "mixed", ops=OpLists())
    stored = model.limits.clone()
    assert stored.tolist()[:4] == [65504.0, -65504.0, torch.inf, -torch.inf]
    optimizer.load_masters(model, {**optimizer.masters_by_name(model), "limits": values})
    assert torch.equal(model.limits, stored)


def test_ranks_sum_fp32_for_half_weights_that_only_another_one_uses() -> None:
    used, unused = (nn.Parameter(torch.ones(2, dtype=HALF)) for _ in range(2))
    optimizer, comm = MasterWeights(SGD([used, unused], lr=1.0), keep_masters=False), Comm()
    comm.size, comm.max_of, summed = 2, lambda numbers: [1 for _ in numbers], []
    comm.sum_ = summed.extend
    optimizer.set_comm(comm)
    for _ in range(2):
        used.grad = torch.ones(2, dtype=HALF)
        optimizer.accumulate()
    optimizer.step()
    assert {tensor.dtype for tensor in summed} == {torch.float32}
    assert used.tolist() == [0.5, 0.5]  # The other rank has as many samples and no gradient.


def test_a_packed_sequence_keeps_its_sizes_on_the_cpu() -> None:
    packed = pack_sequence([torch.randn(3, 2), torch.randn(1, 2)])
    moved = map_tensors(lambda tensor: tensor.to("meta"), packed)
    assert type(moved) is type(packed)
    assert (moved.data.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")


def test_a_model_with_a_sparse_weight_is_traced_and_a_module_that_raised_pins_nothing() -> None:
    model, lists = nn.Module(), replace(OpLists.named(), modules={"fails": "fp32"})
    model.adjacency = nn.Parameter(torch.eye(4).to_sparse())
    model.fails, model.tail = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(x):
        try:
            return model.fails(x)
        except RuntimeError:
            return model.tail(torch.sparse.mm(model.adjacency, x))

    model.forward = forward
    optimizer = SGD(model.tail.parameters(), lr=0.1)
    Precision("mixed", ops=lists).prepare(model, optimizer, (torch.ones(4, 4),))
    assert model.tail.weight.dtype == HALF


def test_without_scaling_the_scale_is_on_the_models_device() -> None:
    precision, model, optimizer = prepared(nn.Linear(2, 2, device="meta"), "fp32")
    trainer = StepTrainer(model, optimizer, lambda *_: StepOutput(torch.ones(())), precision)
    assert trainer.scaler.scale.device.type == "meta"
