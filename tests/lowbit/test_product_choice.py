"""Which products are quantised, and which stay in half: shapes, recipes, pins, overflow."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from low_bits import A3, B3, MX, ROWS, A, B, C, Note, V, half, made, prepared, run
from torch import Tensor, nn

from mpframe import OpLists, Precision
from mpframe.core.errors import ConfigError
from mpframe.lowbit.recipe import Recipe
from mpframe.lowbit.scaling import quantize


class TestInHalf:
    """What stays in half is what it is without a recipe, bit for bit."""

    @pytest.mark.parametrize(
        ("op", "tensors"),
        [
            (F.linear, (made(32, 33), made(32, 33))),  # no multiple of 32 inputs
            (lambda *own: torch.einsum("i,j->ij", *own), (V, V)),
            (lambda *own: torch.einsum("...ij,...jk", *own), (A3[:1], B3)),
            (lambda *own: torch.einsum("ij,jk,k->i", *own), (A, B, made(96))),
            (F.conv2d, (made(32, 3, 5, 5), made(32, 3, 3, 3))),
            (partial(F.conv2d, groups=32), (made(32, 32, 5, 5), made(32, 1, 3, 3))),
        ],
    )
    def test_the_forward_product(self, op: Any, tensors: tuple[Tensor, ...]) -> None:
        ours = run(op, *tensors, products="mxfp8", compute="emulated")
        assert torch.equal(ours[0], run(op, *tensors, products="none", compute="emulated")[0])

    def test_each_product_by_itself(self) -> None:
        """10 outputs: dx sums over them and stays in half. A recipe may leave a product out."""
        x, w = made(32, 64), made(10, 64, seed=1)
        y, dx, dw = run(F.linear, x, w)
        half_y, half_dx, half_dw = run(F.linear, x, w, products="none", compute="emulated")
        assert torch.equal(dx, half_dx)
        assert not torch.equal(dw, half_dw)
        forward = quantize(half(x), ROWS, MX) @ quantize(half(w), ROWS, MX).t()
        assert torch.equal(y, forward.bfloat16())
        y, _, dw = run(F.linear, x, w, products="mxfp4")
        assert torch.equal(y, half_y)
        assert not torch.equal(dw, half_dw)

    def test_in_place_out_and_other_formats(self) -> None:
        seen: list[str] = []
        with Precision("amp", half="bfloat16", products="mxfp8").cast(), Note(seen):
            C.clone().addmm_(A, B)
            torch.mm(A, B, out=torch.empty(64, 96))
            assert (A.double() @ B.double()).dtype == torch.float64
            assert (A.long() @ B.long()).dtype == torch.long
        with Precision("fp32", products="mxfp8").cast(), Note(seen):
            assert (A.bfloat16() @ B.bfloat16()).dtype == torch.bfloat16
        assert seen == []

    @pytest.mark.parametrize("products", ["fp8_delayed", "nvfp4"])
    def test_nothing(self, products: str) -> None:
        """An expert without a row has a product of its own all the same."""
        precision = prepared(layer := nn.Linear(32, 32), products)
        with precision.cast():
            y = layer(made(0, 32))
        y.sum().backward()
        assert y.shape == (0, 32)
        assert not layer.weight.grad.any()


def test_beta_0_ignores_what_is_added() -> None:
    y = run(lambda c, a, b: torch.addmm(c, a, b, beta=0), C * math.nan, A, B)[0]
    assert torch.equal(y, run(torch.mm, A, B)[0])


@pytest.mark.parametrize(
    ("products", "bad"),
    [("fp8_delayed", math.inf), ("mxfp8", math.nan), ("nvfp4", math.inf), ("tf32", math.nan)],
)
def test_an_overflow_reaches_the_gradients(products: str, bad: float) -> None:
    """A gradient that overflowed is no large one: the loss scaler must see it."""
    precision = prepared(layer := nn.Linear(32, 32), products, half="float16")
    with precision.cast():
        y = layer(made(32, 32))
    dy = torch.ones_like(y)
    dy[3, 5] = bad
    y.backward(dy)
    assert not layer.weight.grad.isfinite().all()


def test_a_second_derivative_is_refused() -> None:
    x = A.clone().requires_grad_()
    with Precision("amp", half="bfloat16", products="mxfp8").cast():
        y = x @ B
    (dx,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="matmul_gradient"):
        dx.sum().backward()


def pinned(**modules: str) -> OpLists:
    return replace(OpLists.named(), modules=modules)


class TestPins:
    def outputs(self, products: str = "mxfp8", **modules: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.LayerNorm(32))
        precision = prepared(model, products, mode="amp", ops=pinned(**modules), compute="emulated")
        with precision.cast():
            first = model[0](made(32, 32))
            return [first, second := model[1](first), model[2](second)]

    def test_half_and_none_switch_products_off_and_a_recipe_is_for_one_module(self) -> None:
        everywhere = self.outputs()
        for pin in ("half", "none"):
            first, *_ = self.outputs(**{"0": pin})
            assert not torch.equal(first, everywhere[0])
            assert first.dtype == torch.bfloat16
        assert torch.equal(self.outputs(**{"1": "none"})[0], everywhere[0])
        by_pin = self.outputs(**{"*": "none", "0": "fp8_rows"})
        assert torch.equal(by_pin[0], self.outputs("fp8_rows")[0])
        assert by_pin[2].dtype == torch.float32  # The lists go on inside a pin to a recipe.

    def test_a_pin_to_a_recipe_casts_nothing(self) -> None:
        """A module pinned to half gets half inputs, one pinned to a recipe what it was given."""
        seen = {}
        for pin in ("half", "mxfp8"):
            model = nn.Sequential(nn.Identity())
            precision = Precision("amp", half="bfloat16", ops=pinned(**{"0": pin}))
            precision.prepare(model, torch.optim.SGD(nn.Linear(1, 1).parameters()))
            with precision.cast():
                seen[pin] = model(A).dtype
        assert seen == {"half": torch.bfloat16, "mxfp8": torch.float32}

    def test_those_of_the_recipe_come_before_the_users(self) -> None:
        recipe = Recipe.from_mapping("mine", {"every": {"format": "e2m1"}, "half": ["0"]})
        for given, pin in (({}, "none"), ({"ops": pinned(**{"0": "mine"})}, "mine")):
            policy = Precision("amp", "bfloat16", products=recipe, **given).policy  # type: ignore
            assert policy.pin_of("0") == ("0", pin)


@pytest.mark.parametrize(
    ("mode", "given", "says"),
    [
        ("amp", {"products": "mxfp9"}, r"dtype.products=mxfp9: choose none, fp8_blocks.*mxfp8"),
        ("amp", {"recipes": {"none": Recipe("none", {})}},
         "dtype.recipes.none: is the name of a pin; choose another"),
        ("mixed", {"products": "mxfp8", "ops": OpLists()}, "mxfp8: has no op to act on"),
        ("amp", {"products": "mxfp8", "ops": pinned(head="float32")},
         r"ops.modules\['head'\]=float32: choose fp32, half, none or a recipe: fp8_blocks, "),
    ],
)  # fmt: skip
def test_refused(mode: str, given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Precision(mode, **given).attach(nn.ModuleDict({"head": nn.Linear(32, 32)}))
