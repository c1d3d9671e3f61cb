"""Memory otherwise, the same training: `trainer.recompute`, `trainer.channels_last`, and casts of
gathered weights, which do not stay until the backward pass."""

import copy
from collections import Counter, OrderedDict
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from fixtures import refused
from prepared import prepared
from ranked import in_group, parts, setup
from ranks import Ranks
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from vocabulary import Living, same_bits

from mpframe import Backoff, OpLists, Plan, Precision
from mpframe.core.comm import Comm
from mpframe.core.errors import ConfigError
from mpframe.training.memory import cast_again, recompute, to_channels_last
from mpframe.workloads.images import resnet18


def net() -> nn.Module:
    """Everything that a second forward pass might do otherwise: chance, statistics, casts."""
    torch.manual_seed(0)
    one, two = (
        nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.5))
        for _ in range(2)
    )
    return nn.Sequential(nn.Linear(8, 8), one, two, nn.Linear(8, 3))


@pytest.mark.parametrize(("mode", "half", "pins", "window"), [
    ("fp32", "float16", {}, 1),
    ("amp", "bfloat16", {"1": "fp32", "2.0": "half"}, 1),
    ("mixed", "float16", {}, 2),
])  # fmt: skip
def test_weights_buffers_chance_are_the_same(mode: str, half: str, pins: Any, window: int) -> None:
    ends: list[list[Tensor]] = []
    for patterns in ([], ["1", "2*"]):
        model, precision = net(), Precision(mode, half, ops=replace(OpLists.named(), modules=pins))
        recompute(model, patterns)
        scaler = None if mode == "fp32" else Backoff()
        rest: Any = {"scaler": scaler, "plan": Plan(accumulate=window)}
        trainer = prepared(model, nn.CrossEntropyLoss(), precision, **rest)
        torch.manual_seed(1)
        for scale in (1.0, float("inf"), 1.0):
            batch = torch.randn(4, 8) * scale, torch.tensor([0, 1, 2, 0])
            trainer.train_step(*[batch] * window)
        trainer.read_verdicts()
        ends.append([*trainer.weights().values(), torch.rand(1)])
    assert same_bits(*ends)


class Counting(nn.Linear):
    """Counts its calls in a buffer that it replaces, and multiplies by the count."""

    def forward(self, input: Tensor, *, factor: float = 1.0) -> Any:
        self.calls = self.calls + 1
        outputs = super().forward(input)
        return outputs * self.calls, {"scaled": outputs.tanh() * factor}


def test_a_module_may_replace_its_buffers_and_return_any_tree_through_two_backward_passes() -> None:
    plain = Counting(4, 4)
    plain.register_buffer("calls", torch.zeros(()))
    again, ends = copy.deepcopy(plain), []
    recompute(again, [""])
    for model in (plain, again):
        first, other = model(torch.ones(2, 4), factor=3.0)
        (first.sum() + other["scaled"].sum()).backward()
        ends.append([*(p.grad for p in model.parameters()), model.calls])
    assert same_bits(*ends)
    assert again.calls == 1
    twice: Any = net()
    recompute(twice, ["1"])
    weights, loss = list(twice.parameters()), twice(torch.randn(4, 8)).square().sum()
    passes = [torch.autograd.grad(loss, weights, retain_graph=True) for _ in range(2)]
    assert same_bits(*passes)


CALLS: Counter[nn.Module] = Counter()  # What a module counts in itself is counted once.


class Leaf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        CALLS[self] += 1
        return x.sin()


def test_what_matches_is_computed_twice_in_training_and_what_is_within_no_third_time() -> None:
    inner, beside, outer, x = Leaf(), Leaf(), Leaf(), torch.randn(4, requires_grad=True)
    parts = {"0": nn.Sequential(nn.Sequential(inner)), "01": beside, "1": outer}
    model = nn.Sequential(OrderedDict(parts))
    recompute(model, ["0*"])
    model(x).sum().backward()
    assert (CALLS[inner], CALLS[beside], CALLS[outer]) == (2, 2, 1)
    assert [name for name, own in model.named_modules() if "forward" in vars(own)] == ["0", "01"]
    model.eval()(x).sum().backward()
    assert CALLS[inner] == 3
    model.train()
    with torch.no_grad():
        model(x)
    assert CALLS[inner] == 4
    # As a compiler or an export does: no checkpoint is in the graph.
    assert "checkpoint" not in str(torch.export.export(model.eval(), (x.detach(),)))


def test_names_and_copies_are_those_of_the_plain_model_and_other_names_are_refused() -> None:
    plain, model, leaf = net(), net(), Leaf()
    recompute(model, ["1"])
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    twin = copy.deepcopy(model)
    model[1][2] = leaf  # The copy runs modules of its own.
    twin(torch.randn(4, 8)).sum().backward()
    assert CALLS[leaf] == 0
    names = "the names are 0, 1, 1.0, 1.0.parametrizations, ..."
    said = refused(ConfigError, recompute, net(), ["1", "blocks.*"])
    assert said == f"trainer.recompute=[blocks.*]: matches no module; {names}"


def test_a_convolution_that_would_damage_memory_is_refused() -> None:
    line = r"^trainer\.channels_last=true: layer2\.0\.downsample\.0 is a 1 x 1 convolution with a s"
    with pytest.raises(ConfigError, match=line):
        to_channels_last(resnet18(classes=2, width=4))
    to_channels_last(resnet18(classes=2, width=8))


class Net(nn.Module):
    """A weight of each kind of product, one that is used twice, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.first = nn.Conv1d(3, 7, 3), nn.Linear(8, 10)
        self.twice, self.frozen = nn.Linear(10, 10), nn.Linear(10, 10).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(self.conv(inputs)).tanh()
        return self.twice(self.frozen(self.twice(hidden))) @ self.first.weight


def made(mode: str, half: str, compute: str, saving: Any) -> tuple[Net, Precision]:
    model, precision = Net(), Precision(mode, half, compute=compute)
    precision.use_shards(model, {}, saving)
    precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model, precision


def casts_of(weights: nn.Module) -> Living:
    """Casts that live, of tensors in the shapes of the weights."""
    shapes = {weight.shape for weight in weights.parameters()}
    cast = torch.ops.aten._to_copy.default
    return Living(lambda func, made: func is cast and made.shape in shapes)


def step(precision: Precision, model: nn.Module, order: int = 1) -> tuple[list[Tensor], int]:
    """The gradients of a backward pass, and how many casts the forward pass has left."""
    torch.manual_seed(1)
    watch, inputs = casts_of(model), torch.randn(2, 3, 10, requires_grad=True)
    with precision.cast(), watch:
        loss = model(inputs).float().square().sum()
    alive = len(watch.alive())
    if order == 2:  # A second derivative goes through the cast.
        (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
        loss = slope.square().sum()
    loss.backward()
    return [weight.grad for weight in model.parameters() if weight.grad is not None], alive


@pytest.mark.parametrize(("mode", "half", "compute"), [
    ("amp", "bfloat16", "native"), ("amp", "float16", "emulated"), ("mixed", "float16", "emulated"),
])  # fmt: skip
def test_weights_are_cast_again_to_the_same_values(mode: str, half: str, compute: str) -> None:
    found = []
    for saving in (nullcontext, cast_again):  # Autograd saves casts by itself.
        model, precision = made(mode, half, compute, saving)
        found.append(step(precision, model, order=1 if mode == "mixed" else 2))
    (plain, kept), (again, left) = found
    assert same_bits(plain, again)
    # `conv`, `first` and `frozen` once and again, `twice` twice; their biases need no cast.
    assert kept == 6
    assert left == 0


def test_others_decide_what_is_saved() -> None:
    """A module that runs again keeps nothing, and torch.func takes no hooks at all."""
    model, precision = made("amp", "bfloat16", "native", cast_again)
    plain, _ = step(precision, model)
    model.zero_grad()
    seen: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        assert step(precision, model)[1] > 0
    assert any(saved.dtype == torch.bfloat16 for saved in seen)
    model.zero_grad()
    recompute(model, [""])
    again, left = step(precision, model)
    assert left == 0
    assert same_bits(plain, again)
    with precision.cast():
        slope = torch.func.grad(lambda inputs: Net.forward(model, inputs).float().sum())
        assert slope(torch.ones(2, 3, 10)).any()


def casts_left(comm: Comm, half: str) -> int:
    """How many casts of a divided GPT's weights live when its backward pass begins."""
    watch = casts_of(parts("gpt")[0].get_submodule("blocks"))
    trainer, train, _ = setup("amp", comm, {"name": "gpt", "fsdp": True, "half": half})
    with trainer.precision.cast(), watch:
        output = trainer.model(next(iter(train.epoch(0)))[0])
    left = len(watch.alive())
    output.float().sum().backward()
    assert watch.most > 0
    return left


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_ranks_keep_no_casts_of_gathered_weights(two: Ranks, half: str) -> None:
    assert two(in_group, casts_left, half) == [0, 0]
