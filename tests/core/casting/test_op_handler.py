"""The door for ops that run in another way, and when products below 16 bits are imported."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpframe.lowbit  # noqa: F401  # A recipe is named.
from mpframe import Precision
from mpframe.core.casting.handlers import Args, Handler, Kwargs, OpHandler

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


def test_handlers_are_asked_in_turn_and_may_replace_an_op() -> None:
    with Precision("amp", op_handlers=[Count(), HardSigmoid()]).cast():
        assert torch.equal(X.sigmoid(), nn.functional.hardsigmoid(X))
    assert not torch.equal(X.sigmoid(), nn.functional.hardsigmoid(X))


def test_a_handler_comes_before_a_recipe_whose_name_it_is_told() -> None:
    count, layer = Count(), nn.Linear(4, 4)
    precision = Precision("amp", products="fp8_tensorwise", op_handlers=[count])
    precision.attach(layer)
    with precision.cast():
        layer(X)
    assert count.seen == 1
    assert ("linear", "fp8_tensorwise") in count.asked


def test_a_handler_is_compiled_into_the_graph() -> None:
    layer, precision = (
        nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()),
        Precision("amp", op_handlers=[HardSigmoid()]),
    )

    def step(x: Tensor) -> Tensor:
        with precision.cast():
            y: Tensor = layer(x)
            return y

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    assert torch.equal(compiled(X), step(X))


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


NAMED = [("mxfp8", "none"), ("none", "mxfp8")]
CODE = """
import sys, torch
from mpframe import OpLists, Precision
{imported}
lists = OpLists.from_mapping({{"allow": ["linear"], "modules": {{"0": {pin!r}}}}})
precision = Precision("mixed", ops=lists, products={products!r})
model, optimizer = precision.prepare(
    torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.optim.SGD([torch.zeros(1)], 0.1)
)
with precision.cast():
    model(torch.zeros(2, 4))
print(any(name.startswith("mpframe.lowbit") for name in sys.modules))
"""


@pytest.mark.parametrize(
    ("products", "pin", "imported"),
    [("none", "fp32", ""), *((*two, "import mpframe.lowbit") for two in NAMED)],
)
def test_a_recipe_that_is_named_is_run_once_products_are_imported(
    products: str, pin: str, imported: str
) -> None:
    code = CODE.format(products=products, pin=pin, imported=imported)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == str(bool(imported))


@pytest.mark.parametrize(("products", "pin"), NAMED)
def test_without_the_import_a_line_names_it(products: str, pin: str) -> None:
    code = CODE.format(products=products, pin=pin, imported="")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == (
        "mpframe.core.errors.ConfigError: dtype.products or ops.modules: mxfp8: recipes are in "
        "mpframe.lowbit; import it first. Other words for a module are fp32, half and none"
    )
