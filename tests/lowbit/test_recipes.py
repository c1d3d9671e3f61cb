"""Recipes: what is shipped, a user's own, what is refused; and which products stay in half."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from fixtures import refused
from in_process import composed
from low_bits import A3, B3, A, B, C, Note, made, prepared, run
from torch import Tensor, nn

from mpframe import OpLists, Precision
from mpframe.config import CONF
from mpframe.config.command_line import check_config
from mpframe.config.schema import Config
from mpframe.core.errors import ConfigError
from mpframe.precision.lowbit.recipe import Recipe, list_recipes
from mpframe.run.parts import build_precision, in_fp32
from mpframe.tracking.dtype_map import describe, dtype_map

ALL = "forward.x forward.w dx.dy dx.w dw.x dw.dy"
NO_DY, DY = "forward.x forward.w dx.w dw.x", "dx.dy dw.dy"
PER_TENSOR, BLOCKS = "/ fp32 scale per tensor", "/ e8m0 scale per block of 32 x 1"
FP4 = "e2m1 / e4m3 scale per block of 16 x"
SHIPPED = {
    "fp8_blocks": {"e4m3fn / e8m0 scale per block of 128 x 1": "forward.x dx.dy dw.x dw.dy",
                   "e4m3fn / e8m0 scale per block of 128 x 128": "forward.w dx.w"},
    "fp8_rows": {"e4m3fn / fp32 scale per row": ALL},
    "fp8_tensorwise": {f"e4m3fn {PER_TENSOR}": NO_DY, f"e5m2 {PER_TENSOR}": DY},
    "mxfp4": {f"e2m1 {BLOCKS} / Hadamard 32 / stochastic": "dx.dy dx.w dw.x dw.dy"},
    "mxfp6_e2m3": {f"e2m3 {BLOCKS}": ALL},
    "mxfp6_e3m2": {f"e3m2 {BLOCKS}": ALL},
    "mxfp8": {f"e4m3fn {BLOCKS}": ALL},
    # arXiv 2509.25149: random rounding of gradients alone, the transform in dw alone.
    "nvfp4": {f"{FP4} 1": "forward.x", f"{FP4} 16": "forward.w dx.w",
              f"{FP4} 1 / stochastic": "dx.dy", f"{FP4} 1 / Hadamard 16": "dw.x",
              f"{FP4} 1 / Hadamard 16 / stochastic": "dw.dy"},
    "tf32": {"tf32": ALL},
}  # fmt: skip
E2M1, X = {"format": "e2m1"}, "forward.x."


def pinned(**modules: str) -> OpLists:
    return replace(OpLists.named(), modules=modules)


def test_a_shipped_file_holds_what_it_is_named_after_and_this_is_what_it_says() -> None:
    said: dict[str, dict[str, str]] = {}
    for name in list_recipes():
        text = (CONF / "dtype" / "products" / f"{name}.yaml").read_text()
        node = yaml.safe_load(text)
        assert text.startswith("# @package dtype\n# ")
        assert (node["products"], [*node["recipes"]]) == (name, [name])
        own = said.setdefault(name, {})
        for product, pair in Recipe.named(name).products.items():
            for operand, how in pair.items():
                own[str(how)] = f"{own.get(str(how), '')} {product}.{operand}".strip()
    assert said == SHIPPED
    half = {name for name in said if Recipe.named(name).half}
    assert half == {"fp8_tensorwise", "nvfp4"}  # its heads


def test_a_recipe_as_a_group_as_an_option_with_a_format_of_its_own_and_none_in_fp32() -> None:
    def config_of(*words: str) -> Config:
        return check_config(composed("dtype=mixed_bf16", *words))

    def of(*words: str) -> Precision:
        return build_precision(config_of(*words))

    by_group, by_option = of("dtype/products=mxfp8"), of("dtype.products=mxfp8")
    by_hand = Precision("mixed", "bfloat16", products="mxfp8")
    assert by_group.policy == by_option.policy == by_hand.policy
    assert str(by_group) == "mixed(bfloat16, mxfp8)"
    policy = of("dtype/products=mxfp8", "dtype.recipes.mxfp8.every.rule=floor").policy
    assert policy.recipes["mxfp8"].products["dx"]["w"].rule == "floor"
    words = "{every:{format:{exponent_bits:3,mantissa_bits:4},per:row},dx:null,attention:true}"
    own = [f"+dtype.recipes.mine={words}", "ops.modules={a:mine}"]
    recipe = of("dtype.products=mine", *own).policy.recipes["mine"]
    assert (set(recipe.products), recipe.attention) == ({"forward", "dw"}, True)
    assert str(recipe.products["forward"]["x"]) == "e3m4 / fp32 scale per row"
    assert not build_precision(in_fp32(config_of("dtype/products=mxfp8"))).policy.casts
    asked = Precision("fp32", products="tf32")
    assert (str(asked), asked.policy.casts) == ("fp32(tf32)", True)


def test_a_recipe_is_refused_and_a_mode_that_cannot_have_it() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, f"{X}format=None: choose tf32, e4m3fn, "),
        ({"every": {"format": "e4m3"}},
         f"{X}format=e4m3: choose tf32, e4m3fn, e5m2, e2m3, e3m2, e2m1, or give"),
        ({"every": {"format": {"exponent_bits": 4}}},
         "format e4m0: mantissa_bits=0: must be a whole number >= 1 and <= 10"),
        ({"every": {**E2M1, "blok": 3}}, f"{X}blok: no such option; choose format, per, block"),
        ({"every": {**E2M1, "hadamard": 12}}, f"{X}hadamard=12: must be 0 or a power of two"),
        ({"every": {**E2M1, "across": 16}}, f"{X}across=16: does nothing with per=tensor"),
        ({"every": {**E2M1, "hadamard": 16, "per": "block", "block": 24}},
         f"{X}hadamard=16: block=24 must be a multiple of it"),
        ({"evry": {}}, "evry: no such option; choose every, forward, dx, dw, half, attention; "),
        ({"every": E2M1, "dw": {"x": {"hadamard": 16}}},
         "dw: hadamard=0 and 16: give both operands the same"),
        ({"every": E2M1, "forward": "half"}, "forward=half: must be a mapping"),
    ]  # fmt: skip
    for node, says in cases:
        said = refused(ConfigError, Recipe.from_mapping, "mine", node)
        of_all = says.startswith("format")  # Any reader of a format says it.
        assert said.startswith(says if of_all else "dtype.recipes.mine." + says)
    for mode, given, says in (
        ("amp", {"products": "mxfp9"}, "products=mxfp9: choose none, fp8_blocks, "),
        (
            "amp",
            {"recipes": {"none": Recipe("none", {})}},
            "recipes.none: is the name of a pin",
        ),
        ("mixed", {"products": "mxfp8", "ops": OpLists()}, "products=mxfp8: has no op to act on"),
    ):
        assert refused(ConfigError, Precision, mode, **given).startswith(f"dtype.{says}")
    said = refused(ConfigError, Precision, "amp", ops=pinned(head="float32"))
    assert "ops.modules['head']=float32: choose none, fp8_blocks, " in said


def test_the_map_says_what_stays_in_half_and_why() -> None:
    """A pin to a recipe leaves formats as they are."""
    text = ""

    def rows(products: str = "mxfp8", **modules: str) -> dict[str, Any]:
        nonlocal text
        model = nn.ModuleDict({
            "whole": nn.Linear(64, 32), "classes": nn.Linear(64, 10), "head": nn.Linear(64, 64),
            "images": nn.Conv2d(3, 64, 3), "grouped": nn.ConvTranspose2d(64, 64, 3, groups=4),
            "norm": nn.LayerNorm(64), "slopes": nn.PReLU(), "cells": nn.LSTM(40, 32),
            "attention": nn.MultiheadAttention(32, 1),
        })  # fmt: skip
        precision = prepared(model, products, ops=pinned(**modules))
        text = describe(precision, model)
        return {row.module: row for row in dtype_map(precision, model)}

    found, no_multiple = rows(whole="nvfp4", norm="nvfp4"), "in half: {} is no multiple of 32"
    assert {name: row.products for name, row in found.items()} == {
        "whole": "nvfp4",
        "classes": "mxfp8; dx " + no_multiple.format(10),
        "images": "mxfp8; forward " + no_multiple.format(3),
        "grouped": "mxfp8; forward {0}; dx {0}".format(no_multiple.format(16)),
        "cells": "in half",
        **dict.fromkeys(("norm", "slopes"), "-"),
        **dict.fromkeys(("attention", "attention.out_proj", "head"), "mxfp8"),
    }
    for line in ("mxfp8 forward: x e4m3fn / e8m0 scale per block of 32 x 1, w", "nvfp4 dw: x"):
        assert f"\n{line}" in text
    plain = rows("none")
    assert "products" not in text
    for name, row in found.items():
        assert replace(row, products="") == plain[name]
    found = rows("nvfp4", whole="half", classes="none", images="fp32")
    for name, pin in (("head", "none"), ("whole", "half"), ("classes", "none")):
        assert found[name].products == f"in half: '{name}' is pinned to {pin}"
    assert found["images"].products == "-"


IN_HALF: list[Any] = [
    (F.linear, made(32, 33), made(32, 33)),  # no multiple of 32 inputs
    (partial(torch.einsum, "bij,bjk->bik"), A3, B3),
    (torch.addbmm, C, A3, B3),
    (F.conv2d, made(32, 3, 5, 5), made(32, 3, 3, 3)),
    (partial(F.conv2d, groups=32), made(32, 32, 5, 5), made(32, 1, 3, 3)),
]


def test_what_stays_in_half_is_what_it_is_without_a_recipe_each_product_by_itself() -> None:
    for case in IN_HALF:
        ours, plain = (run(*case, products=own, compute="emulated") for own in ("mxfp8", "none"))
        assert torch.equal(ours[0], plain[0])
    # 10 outputs: dx sums over them and stays in half. mxfp4 leaves the forward product out.
    x, w = made(32, 64), made(10, 64, seed=1)
    plain = run(F.linear, x, w, products="none", compute="emulated")
    for products, same in (("mxfp8", [False, True, False]), ("mxfp4", [True, True, False])):
        found = run(F.linear, x, w, products=products)
        assert [torch.equal(*both) for both in zip(found, plain, strict=True)] == same
    seen: list[str] = []  # Neither do forms in place and other formats take part.
    with Precision("amp", half="bfloat16", products="mxfp8").cast(), Note(seen):
        C.clone().addmm_(A, B)
        torch.mm(A, B, out=torch.empty(64, 96))
        assert (A.double() @ B.double()).dtype == torch.float64
        assert (A.long() @ B.long()).dtype == torch.long
    with Precision("fp32", products="mxfp8").cast(), Note(seen):
        assert (A.bfloat16() @ B.bfloat16()).dtype == torch.bfloat16
    assert seen == []


def test_nothing_has_a_product_all_the_same_and_beta_0_ignores_what_is_added() -> None:
    """An expert without a row."""
    for products in ("fp8_tensorwise", "nvfp4"):
        precision = prepared(layer := nn.Linear(32, 32), products)
        with precision.cast():
            y = layer(made(0, 32))
        y.sum().backward()
        assert (y.shape, layer.weight.grad.any()) == ((0, 32), False)
    y = run(lambda c, a, b: torch.addmm(c, a, b, beta=0), C * math.nan, A, B)[0]
    assert torch.equal(y, run(torch.mm, A, B)[0])


def test_a_second_derivative_is_refused() -> None:
    x = A.clone().requires_grad_()
    with Precision("amp", half="bfloat16", products="mxfp8").cast():
        y = x @ B
    (dx,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="matmul_gradient"):
        dx.sum().backward()


def outputs(products: str = "mxfp8", **modules: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.LayerNorm(32))
    precision = prepared(model, products, mode="amp", ops=pinned(**modules), compute="emulated")
    with precision.cast():
        first = model[0](made(32, 32))
        return [first, second := model[1](first), model[2](second)]


def test_pins_to_half_and_none_switch_products_off_and_a_recipe_is_for_one_module() -> None:
    everywhere = outputs()
    for pin in ("half", "none"):
        first, *_ = outputs(**{"0": pin})
        assert not torch.equal(first, everywhere[0])
        assert first.dtype == torch.bfloat16
    assert torch.equal(outputs(**{"1": "none"})[0], everywhere[0])
    by_pin = outputs(**{"*": "none", "0": "fp8_rows"})
    assert torch.equal(by_pin[0], outputs("fp8_rows")[0])
    assert by_pin[2].dtype == torch.float32  # The lists go on inside a pin to a recipe.
    recipe = Recipe.from_mapping("mine", {"every": E2M1, "half": ["0"]})
    for ops, pin in ((None, "none"), (pinned(**{"0": "mine"}), "mine")):  # The user's come last.
        policy = Precision("amp", "bfloat16", products=recipe, ops=ops).policy
        assert policy.pin_of("0") == ("0", pin)


def test_a_pin_to_a_recipe_casts_nothing() -> None:
    """A module pinned to half gets half inputs, one pinned to a recipe what it was given."""
    for pin, dtype in (("half", torch.bfloat16), ("mxfp8", torch.float32)):
        model = nn.Sequential(nn.Identity())
        precision = Precision("amp", half="bfloat16", ops=pinned(**{"0": pin}))
        precision.attach(model)
        with precision.cast():
            assert model(A).dtype == dtype
