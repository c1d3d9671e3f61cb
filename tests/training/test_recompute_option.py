"""`trainer.recompute`: less memory, and the same numbers bit for bit."""

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from vocabulary import same_bits

from mpframe import Backoff, OpLists, Precision, Trainer
from mpframe.core.errors import ConfigError
from mpframe.core.objective import supervised
from mpframe.training.memory import recompute
from mpframe.training.plan import Plan


def block() -> nn.Module:
    """Everything that a second forward pass might do otherwise: chance, statistics, casts."""
    return nn.Sequential(
        spectral_norm(nn.Linear(8, 8)), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.5)
    )


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), block(), block(), nn.Linear(8, 3))


def trained(
    patterns: list[str], mode: str, half: str, plan: Plan, pins: dict[str, str], model: nn.Module
) -> dict[str, Tensor]:
    """Weights and buffers after three steps, the second of which overflows."""
    recompute(model, patterns)
    precision = Precision(mode, half, ops=replace(OpLists.named(), modules=pins))
    model, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    objective = supervised(nn.CrossEntropyLoss())
    scaler = None if mode == "fp32" else Backoff()
    trainer = Trainer(model, optimizer, objective, precision, scaler=scaler, plan=plan)
    torch.manual_seed(1)
    for scale in (1.0, float("inf"), 1.0):
        inputs = torch.randn(4, 8) * scale
        trainer.train_step(*[(inputs, torch.tensor([0, 1, 2, 0]))] * plan.accumulate)
    trainer.read_verdicts()
    return {**trainer.weights(), "next random number": torch.rand(1)}


@pytest.mark.parametrize(
    ("mode", "half", "pins", "accumulate"),
    [
        ("fp32", "float16", {}, 1),
        ("amp", "bfloat16", {"1": "fp32", "2.0": "half"}, 1),
        ("mixed", "float16", {}, 2),
    ],
)
def test_weights_buffers_and_chance_are_the_same(
    mode: str, half: str, pins: dict[str, str], accumulate: int
) -> None:
    plan = Plan(accumulate=accumulate)
    plain = trained([], mode, half, plan, pins, net())
    again = trained(["1", "2*"], mode, half, plan, pins, net())
    assert plain.keys() == again.keys()
    assert same_bits(plain.values(), again.values())


class Counting(nn.Module):
    """Counts its calls in a buffer that it replaces, and adds the count to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, factor: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
        self.calls = self.calls + 1
        return self.layer(x) * self.calls, {"scaled": self.layer(x).tanh() * factor}


def test_a_module_may_replace_its_buffers_and_return_any_tree() -> None:
    def gradients(model: Any) -> list[Tensor]:
        first, other = model(torch.ones(2, 4), factor=3.0)
        (first.sum() + other["scaled"].sum()).backward()
        return [*(p.grad for p in model.parameters()), model.calls]

    plain = Counting()
    again = copy.deepcopy(plain)
    recompute(again, [""])
    assert same_bits(gradients(plain), gradients(again))
    assert again.calls == 1


def test_two_backward_passes_through_one_graph_get_the_same() -> None:
    model, x = net(), torch.randn(4, 8)
    recompute(model, ["1"])
    weights, loss = list(model.parameters()), model(x).square().sum()
    first = torch.autograd.grad(loss, weights, retain_graph=True)
    second = torch.autograd.grad(loss, weights)
    assert same_bits(list(first), list(second))


CALLS: Counter[nn.Module] = Counter()  # What a module counts in itself is counted once.


class Leaf(nn.Module):
    """Its calls are counted."""

    @property
    def calls(self) -> int:
        return CALLS[self]

    def forward(self, x: Tensor) -> Tensor:
        CALLS[self] += 1
        return x.sin()


def test_what_matches_is_computed_twice_and_what_is_within_it_no_third_time() -> None:
    inner, outer = Leaf(), Leaf()
    model = nn.Sequential(nn.Sequential(nn.Sequential(inner)), outer)
    recompute(model, ["0*"])
    model(torch.randn(4, requires_grad=True)).sum().backward()
    assert (inner.calls, outer.calls) == (2, 1)
    assert [name for name, own in model.named_modules() if "forward" in vars(own)] == ["0"]


def test_without_gradients_or_in_evaluation_nothing_is_computed_twice() -> None:
    leaf, x = Leaf(), torch.randn(4, requires_grad=True)
    model = nn.Sequential(leaf)
    recompute(model, ["0"])
    model.eval()(x).sum().backward()
    assert leaf.calls == 1
    model.train()
    with torch.no_grad():
        model(x)
    assert leaf.calls == 2
    # As a compiler or an export does: no checkpoint is in the graph.
    assert "checkpoint" not in str(torch.export.export(model.eval(), (x.detach(),)))


def test_fewer_activations_are_kept() -> None:
    def kept(model: nn.Module) -> int:
        sizes: list[int] = []
        pack: Any = lambda tensor: sizes.append(tensor.numel()) or tensor  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.randn(64, 8))
        return sum(sizes)

    again = net()
    recompute(again, ["1", "2"])
    assert kept(again) < kept(net()) / 2


def test_names_and_copies_are_those_of_the_plain_model() -> None:
    plain, model = net(), net()
    recompute(model, ["1"])
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    twin, leaf = copy.deepcopy(model), Leaf()
    model[1][2] = leaf  # The copy runs modules of its own.
    twin(torch.randn(4, 8)).sum().backward()
    assert leaf.calls == 0


def test_a_pattern_that_matches_no_module_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        recompute(net(), ["1", "blocks.*"])
    assert str(refused.value) == (
        "trainer.recompute=[blocks.*]: matches no module; the names are 0, 1, 1.0, "
        "1.0.parametrizations, ..."
    )
