"""Ops that run in another way: what an OpHandler sees, replaces and remembers."""

import pytest
import torch
from torch import Tensor, nn
from vocabulary import inside, same_bits

import mpframe.lowbit  # noqa: F401  # A recipe is named.
from mpframe import OpLists, Precision
from mpframe.core.casting.handlers import OpHandler
from mpframe.core.errors import ConfigError

X = torch.arange(12.0).reshape(3, 4)


class Count(OpHandler):
    def __init__(self) -> None:
        self.asked, self.seen = set(), 0

    def handler_of(self, op, recipe):
        self.asked.add((op, recipe))
        return self.count if op == "linear" else None

    def count(self, func, args, kwargs):
        self.seen += 1
        return NotImplemented

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state) -> None:
        self.seen = state.get("seen", 0)


@pytest.mark.parametrize("mode", ["fp32", "mixed", "amp"])
def test_a_handler_sees_its_ops_and_leaves_them_to_the_lists(mode) -> None:
    count, model = Count(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    precision = Precision(mode, op_handlers=[count])
    precision.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    expected, y = inside(Precision(mode), model)(X), inside(precision, model)(X)
    assert precision.state_dict() == {"seen": 2}
    assert same_bits([y], [expected])
    with precision.preserve_state(), precision.cast():
        model(X)
    assert count.seen == 2
    precision.load_state_dict({"seen": 7})
    assert count.seen == 7


def test_handlers_are_asked_in_turn_and_may_replace_an_op() -> None:
    hard, replacement = OpHandler(), lambda func, args, kwargs: nn.functional.hardsigmoid(*args)
    hard.handler_of = lambda op, recipe: replacement if op == "sigmoid" else None
    precision = Precision("amp", op_handlers=[Count(), hard])
    run = inside(precision, Tensor.sigmoid)
    for call in (run, torch.compile(run, fullgraph=True, backend="eager")):
        assert torch.equal(call(X), nn.functional.hardsigmoid(X))


@pytest.mark.parametrize(  # for all, or for a module
    ("products", "pin"), [("fp8_tensorwise", "none"), ("none", "fp8_tensorwise")]
)
def test_a_handler_comes_before_a_recipe_whose_name_it_is_told(products, pin, monkeypatch) -> None:
    def naming(count):
        ops = OpLists.from_mapping({"allow": ["linear"], "modules": {"0": pin}})
        return Precision("amp", ops=ops, products=products, op_handlers=[count])

    count, model = Count(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    precision = naming(count)
    precision.attach(model)
    inside(precision, model)(X)
    assert count.seen == 2
    assert {recipe for op, recipe in count.asked if op == "linear"} == {"fp8_tensorwise", None}
    monkeypatch.setattr("mpframe.core.precision.find_recipes", None)  # lowbit is not imported.
    with pytest.raises(ConfigError, match=r"^dtype\.products or ops\.modules: fp8_tensorwise: r"):
        naming(Count())
