"""Ops that run in another way: what an OpHandler sees, replaces and remembers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpframe.lowbit  # noqa: F401  # A recipe is named.
from mpframe import OpLists, Precision
from mpframe.core.casting.handlers import Args, Handler, Kwargs, OpHandler
from mpframe.core.errors import ConfigError

X = torch.arange(12.0).reshape(3, 4)


class Count(OpHandler):
    """Counts linear layers, and leaves them to the lists."""

    def __init__(self) -> None:
        self.asked: set[tuple[str, str | None]] = set()
        self.seen = 0

    def handler_of(self, op: str, recipe: str | None) -> Handler | None:
        self.asked.add((op, recipe))
        return self.count if op == "linear" else None

    def count(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        self.seen += 1
        return NotImplemented

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state.get("seen", 0)


class HardSigmoid(OpHandler):
    """Replaces an op by another."""

    def handler_of(self, op: str, recipe: str | None) -> Handler | None:
        return self.run if op == "sigmoid" else None

    def run(self, func: Any, args: Args, kwargs: Kwargs) -> Tensor:
        return nn.functional.hardsigmoid(*args, **kwargs)


@pytest.mark.parametrize("mode", ["fp32", "mixed", "amp"])
def test_a_handler_sees_its_ops_and_leaves_them_to_the_lists(mode: str) -> None:
    count, model = Count(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    precision = Precision(mode, op_handlers=[count])
    precision.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    with Precision(mode).cast():
        expected = model(X)
    with precision.cast():
        y = model(X)
    assert count.seen == 2
    assert ("linear", None) in count.asked
    assert y.dtype == expected.dtype
    assert torch.equal(y, expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_handlers_are_asked_in_turn_and_may_replace_an_op(compiled: bool) -> None:
    precision = Precision("amp", op_handlers=[Count(), HardSigmoid()])

    def run(x: Tensor) -> Tensor:
        with precision.cast():
            return x.sigmoid()

    if compiled:
        run = torch.compile(run, fullgraph=True, backend="eager")
    assert torch.equal(run(X), nn.functional.hardsigmoid(X))
    assert not torch.equal(X.sigmoid(), nn.functional.hardsigmoid(X))


def test_its_state_is_part_of_the_precisions() -> None:
    count = Count()
    precision = Precision("amp", op_handlers=[count])
    with precision.cast():
        nn.Linear(4, 4)(X)
    assert precision.state_dict() == {"seen": 1}
    with precision.preserve_state(), precision.cast():
        nn.Linear(4, 4)(X)
    assert count.seen == 1
    precision.load_state_dict({"seen": 7})
    assert count.seen == 7


NAMED = [("fp8_tensorwise", "none"), ("none", "fp8_tensorwise")]  # for all, or for a module


def naming(products: str, pin: str, count: Count) -> Precision:
    ops = OpLists.from_mapping({"allow": ["linear"], "modules": {"0": pin}})
    return Precision("amp", ops=ops, products=products, op_handlers=[count])


@pytest.mark.parametrize(("products", "pin"), NAMED)
def test_a_handler_comes_before_a_recipe_whose_name_it_is_told(products: str, pin: str) -> None:
    count, model = Count(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    precision = naming(products, pin, count)
    precision.attach(model)
    with precision.cast():
        model(X)
    assert count.seen == 2
    told = {recipe for op, recipe in count.asked if op == "linear"}
    assert told == {"fp8_tensorwise", None}


@pytest.mark.parametrize(("products", "pin"), NAMED)
def test_without_the_import_of_products_a_line_names_it(
    products: str, pin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpframe.core.precision.find_recipes", None)
    with pytest.raises(ConfigError) as refused:
        naming(products, pin, Count())
    assert str(refused.value) == (
        "dtype.products or ops.modules: fp8_tensorwise: recipes are in mpframe.lowbit; import it "
        "first. Other words for a module are fp32, half and none"
    )
