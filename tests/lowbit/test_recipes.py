"""Recipes: what is shipped, a user's own, what is refused, and what the dtype map says of them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml
from low_bits import prepared
from torch import nn

from mpframe import OpLists, Precision
from mpframe.config.command_line import check_config, compose_named, without_hydra
from mpframe.config.locations import CONF
from mpframe.config.schema import Config
from mpframe.core.errors import ConfigError
from mpframe.lowbit.recipe import Recipe, list_recipes
from mpframe.run.parts import build_precision, in_fp32
from mpframe.tracking.dtype_map import describe, dtype_map


def config_of(*words: str) -> Config:
    return check_config(without_hydra(compose_named(list(words))[1]))


def of(*words: str) -> Precision:
    """The precision of a command line."""
    return build_precision(config_of("dtype=mixed_bf16", *words))


def test_a_shipped_file_chooses_and_holds_what_it_is_named_after() -> None:
    for name in list_recipes():
        text = (CONF / "dtype" / "products" / f"{name}.yaml").read_text()
        node = yaml.safe_load(text)
        assert text.startswith("# @package dtype\n# ")
        assert (node["products"], [*node["recipes"]]) == (name, [name])


ALL = "forward.x forward.w dx.dy dx.w dw.x dw.dy"
NO_DY, DY = "forward.x forward.w dx.w dw.x", "dx.dy dw.dy"
PER_TENSOR, DELAYED = "/ fp32 scale per tensor", "/ fp32 scale per tensor / amax of 1024 steps"
MX, FP4 = "/ e8m0 scale per block of 32 x 1", "e2m1 / e4m3 scale per block of 16 x"
SHIPPED = {
    "fp8_blocks": {"e4m3fn / e8m0 scale per block of 128 x 1": "forward.x dx.dy dw.x dw.dy",
                   "e4m3fn / e8m0 scale per block of 128 x 128": "forward.w dx.w"},
    "fp8_delayed": {f"e4m3fn {DELAYED}": NO_DY, f"e5m2 {DELAYED}": DY},
    "fp8_rows": {"e4m3fn / fp32 scale per row": ALL},
    "fp8_tensorwise": {f"e4m3fn {PER_TENSOR}": NO_DY, f"e5m2 {PER_TENSOR}": DY},
    "mxfp4": {f"e2m1 {MX} / Hadamard 32 / stochastic": "dx.dy dx.w dw.x dw.dy"},
    "mxfp6_e2m3": {f"e2m3 {MX}": ALL},
    "mxfp6_e3m2": {f"e3m2 {MX}": ALL},
    "mxfp8": {f"e4m3fn {MX}": ALL},
    # arXiv 2509.25149: random rounding of gradients alone, the transform in dw alone.
    "nvfp4": {f"{FP4} 1": "forward.x", f"{FP4} 16": "forward.w dx.w",
              f"{FP4} 1 / stochastic": "dx.dy", f"{FP4} 1 / Hadamard 16": "dw.x",
              f"{FP4} 1 / Hadamard 16 / stochastic": "dw.dy"},
    "tf32": {"tf32": ALL},
}  # fmt: skip


def test_what_the_shipped_recipes_say() -> None:
    said: dict[str, dict[str, str]] = {}
    for name in list_recipes():
        own = said.setdefault(name, {})
        for product, pair in Recipe.named(name).products.items():
            for operand, how in pair.items():
                own[str(how)] = f"{own.get(str(how), '')} {product}.{operand}".strip()
    assert said == SHIPPED
    half = {name for name in said if Recipe.named(name).half}
    assert half == {"fp8_delayed", "fp8_tensorwise", "nvfp4"}  # its heads


def test_as_a_group_and_as_an_option() -> None:
    by_group, by_option = of("dtype/products=mxfp8"), of("dtype.products=mxfp8")
    assert by_group.policy == by_option.policy
    assert by_group.policy == Precision("mixed", "bfloat16", products="mxfp8").policy
    assert [str(own) for own in (by_group, of())] == ["mixed(bfloat16, mxfp8)", "mixed(bfloat16)"]
    policy = of("dtype/products=mxfp8", "dtype.recipes.mxfp8.every.rule=floor").policy
    assert policy.recipes["mxfp8"].products["dx"]["w"].rule == "floor"


def test_a_recipe_with_a_format_of_its_own() -> None:
    words = "{every:{format:{exponent_bits:3,mantissa_bits:4},per:row},dx:null,attention:true}"
    own = [f"+dtype.recipes.mine={words}", "ops.modules={a:mine}"]
    recipe = of("dtype.products=mine", *own).policy.recipes["mine"]
    assert set(recipe.products) == {"forward", "dw"}
    assert recipe.attention
    assert str(recipe.products["forward"]["x"]) == "e3m4 / fp32 scale per row"


def test_fp32_has_no_products_unless_asked() -> None:
    config = config_of("dtype=mixed", "dtype/products=mxfp8")
    assert not build_precision(in_fp32(config)).policy.casts
    assert Precision("fp32", products="tf32").policy.casts
    assert str(Precision("fp32", products="tf32")) == "fp32(tf32)"


E2M1, X = {"format": "e2m1"}, "forward.x."


@pytest.mark.parametrize(
    ("node", "says"),
    [
        ({}, f"{X}format=None: give a format's name, or its bits"),
        ({"every": {"format": "e4m3"}},
         "format=e4m3: choose tf32, e4m3fn, e5m2, e2m3, e3m2, e2m1, or give"),
        ({"every": {"format": {"exponent_bits": 4}}},
         "format e4m0: mantissa_bits=0: choose 1 to 10"),
        ({"every": {"format": {"exponent_bits": 9, "mantissa_bits": 3}}},
         "format e9m3: exponent_bits=9: choose 1 to 8"),
        ({"every": {"format": {"exponent_bits": 8, "mantissa_bits": 3}}},
         "format e8m3: specials=none: with 8 exponent bits choose inf"),
        ({"every": {**E2M1, "blok": 3}}, f"{X}blok: no such option; choose format, per, block"),
        ({"every": {**E2M1, "per": "column"}}, f"{X}per=column: choose tensor, row, block"),
        ({"every": {**E2M1, "block": 0}}, f"{X}block=0: must be a whole number >= 1"),
        ({"every": {**E2M1, "hadamard": 12}}, f"{X}hadamard=12: must be 0 or a power of two"),
        ({"every": {**E2M1, "across": 16}}, f"{X}across=16: does nothing with per=tensor"),
        ({"every": {**E2M1, "history": 4, "per": "row"}},
         f"{X}history=4: only works with per=tensor"),
        ({"every": {**E2M1, "hadamard": 16, "per": "block", "block": 24}},
         f"{X}hadamard=16: block=24 must be a multiple of it"),
        ({"evry": {}}, "evry: no such option; choose every, forward, dx, dw, half, attention; "),
        ({"every": E2M1, "dw": {"x": {"hadamard": 16}}},
         "dw: hadamard=0 and 16: give both operands the same"),
        ({"every": E2M1, "dw": {"w": {}}}, "dw.w: no such option; choose x, dy"),
        ({"every": E2M1, "forward": "half"}, "forward=half: must be a mapping"),
    ],
)  # fmt: skip
def test_a_recipe_is_refused(node: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        Recipe.from_mapping("mine", node)
    of_all = says.startswith("format")  # Any reader of a format says it.
    assert str(error.value).startswith(says if of_all else "dtype.recipes.mine." + says)
    assert "\n" not in str(error.value)


class TestMap:
    def rows(self, products: str = "mxfp8", **modules: str) -> dict[str, Any]:
        model = nn.ModuleDict({
            "whole": nn.Linear(64, 32), "classes": nn.Linear(64, 10), "head": nn.Linear(64, 64),
            "images": nn.Conv2d(3, 64, 3), "grouped": nn.ConvTranspose2d(64, 64, 3, groups=4),
            "norm": nn.LayerNorm(64), "slopes": nn.PReLU(), "cells": nn.LSTM(40, 32),
            "attention": nn.MultiheadAttention(32, 1),
        })  # fmt: skip
        ops = replace(OpLists.named(), modules=modules)
        precision = prepared(model, products, ops=ops)
        self.text = describe(precision, model)
        return {row.module: row for row in dtype_map(precision, model)}

    def test_says_what_stays_in_half_and_why(self) -> None:
        said = {name: row.products for name, row in self.rows(whole="nvfp4").items()}
        no_multiple = "in half: {} is no multiple of 32"
        assert said == {
            "whole": "nvfp4",
            "classes": "mxfp8; dx " + no_multiple.format(10),
            "images": "mxfp8; forward " + no_multiple.format(3),
            "grouped": "mxfp8; forward {0}; dx {0}".format(no_multiple.format(16)),
            "cells": "mxfp8; forward of weight_ih_l0 " + no_multiple.format(40),
            **dict.fromkeys(("norm", "slopes"), "-"),
            **dict.fromkeys(("attention", "attention.out_proj", "head"), "mxfp8"),
        }
        for line in ("mxfp8 forward: x e4m3fn / e8m0 scale per block of 32 x 1, w", "nvfp4 dw: x"):
            assert f"\n{line}" in self.text
        assert self.rows("none")["head"].products == ""
        assert "products" not in self.text

    def test_says_which_pin_keeps_a_module_in_half(self) -> None:
        rows = self.rows("nvfp4", whole="half", classes="none", images="fp32")
        for name, pin in (("head", "none"), ("whole", "half"), ("classes", "none")):
            assert rows[name].products == f"in half: '{name}' is pinned to {pin}"
        assert rows["images"].products == "-"

    def test_a_pin_to_a_recipe_leaves_formats_as_they_are(self) -> None:
        pinned, plain = self.rows(norm="nvfp4", head="none"), self.rows()
        for name in ("norm", "head"):
            own, other = ((r.storage, r.compute, r.why) for r in (pinned[name], plain[name]))
            assert own == other

    @pytest.mark.parametrize(("pin", "says"), [("none", "in half"), ("mxfp8", "mxfp8")])
    def test_a_tied_weight_by_where_it_is_read(self, pin: str, says: str) -> None:
        """An embedding that the head multiplies with: the head's pin decides."""
        model = nn.Sequential(nn.Embedding(32, 32), nn.Linear(32, 32, bias=False))
        model[1].weight = model[0].weight
        ops = replace(OpLists.named(), modules={"1": pin})
        precision = Precision("mixed", "bfloat16", products="mxfp8", ops=ops)
        precision.trace(model, torch.zeros(2, dtype=torch.long))
        assert dtype_map(precision, model)[0].products == says
