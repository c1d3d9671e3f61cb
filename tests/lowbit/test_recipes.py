"""Recipes: what is shipped, a user's own, what is refused, and what the dtype map says of them."""

from typing import Any

import pytest
import torch
import yaml
from torch import nn

from mpframe import OpLists, Precision
from mpframe.config.command_line import check_config, compose_named, without_hydra
from mpframe.config.locations import CONF
from mpframe.config.schema import Config
from mpframe.core.errors import ConfigError
from mpframe.lowbit.formats import FORMATS
from mpframe.lowbit.recipe import OPERANDS, Recipe, list_recipes
from mpframe.lowbit.scaling import Quantization
from mpframe.run.parts import build_precision, in_fp32
from mpframe.tracking.dtype_map import describe, dtype_map

MXFP8 = Quantization(FORMATS["e4m3fn"], per="block", block=32, scale="e8m0", rule="rceil")


def of(*words: str) -> Precision:
    """The precision of a command line."""
    return build_precision(config_of("dtype=mixed_bf16", *words))


def config_of(*words: str) -> Config:
    return check_config(without_hydra(compose_named(list(words))[1]))


class TestShipped:
    def test_the_names(self) -> None:
        assert list_recipes() == [
            *("fp8_blocks", "fp8_delayed", "fp8_rows", "fp8_tensorwise"),
            *("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8", "nvfp4", "tf32"),
        ]

    def test_a_file_chooses_and_holds_what_it_is_named_after(self) -> None:
        for name in list_recipes():
            text = (CONF / "dtype" / "products" / f"{name}.yaml").read_text()
            node = yaml.safe_load(text)
            assert text.startswith("# @package dtype\n# ")
            assert (node["products"], [*node["recipes"]]) == (name, [name])

    def test_as_a_group_and_as_an_option(self) -> None:
        by_group, by_option = of("dtype/products=mxfp8"), of("dtype.products=mxfp8")
        assert by_group.policy == by_option.policy
        assert by_group.policy == Precision("mixed", "bfloat16", products="mxfp8").policy
        assert str(by_group) == "mixed(bfloat16, mxfp8)"
        assert str(of()) == "mixed(bfloat16)"

    def test_mxfp8(self) -> None:
        recipe = Recipe.named("mxfp8")
        assert all(how == MXFP8 for pair in recipe.products.values() for how in pair.values())
        assert {p: tuple(pair) for p, pair in recipe.products.items()} == OPERANDS
        assert not recipe.half

    def test_nvfp4(self) -> None:
        """arXiv 2509.25149: random rounding of gradients alone, the transform in dw alone, weights
        in squares."""
        recipe = Recipe.named("nvfp4").products
        hows = {(p, o): how for p, pair in recipe.items() for o, how in pair.items()}

        def those(**values: Any) -> set[tuple[str, str]]:
            ((name, value),) = values.items()
            return {key for key, how in hows.items() if getattr(how, name) == value}

        assert {how.format.name for how in hows.values()} == {"e2m1"}
        assert those(rounding="stochastic") == {("dx", "dy"), ("dw", "dy")}
        assert those(hadamard=16) == {("dw", "x"), ("dw", "dy")}
        assert those(across=16) == {("forward", "w"), ("dx", "w")}

    def test_fp8_gradients_are_e5m2(self) -> None:
        for name in ("fp8_tensorwise", "fp8_delayed"):
            for pair in Recipe.named(name).products.values():
                for operand, how in pair.items():
                    assert how.format.name == ("e5m2" if operand == "dy" else "e4m3fn")
        assert Recipe.named("fp8_delayed").history == 1024
        assert Recipe.named("fp8_tensorwise").history == 0
        assert set(Recipe.named("mxfp4").products) == {"dx", "dw"}  # Half forward.


class TestOwn:
    def test_a_value_changed_on_the_command_line(self) -> None:
        policy = of("dtype/products=mxfp8", "dtype.recipes.mxfp8.every.rule=floor").policy
        assert policy.recipes["mxfp8"].products["dx"]["w"].rule == "floor"

    def test_a_recipe_with_a_format_of_its_own(self) -> None:
        words = "{every:{format:{exponent_bits:3,mantissa_bits:4},per:row},dx:null,attention:true}"
        own = [f"+dtype.recipes.mine={words}", "ops.modules={a:mine}"]
        recipe = of("dtype.products=mine", *own).policy.recipes["mine"]
        assert set(recipe.products) == {"forward", "dw"}
        assert recipe.attention
        how = recipe.products["forward"]["x"]
        assert (how.format.exponent_bits, how.format.mantissa_bits) == (3, 4)
        assert (how.format.name, how.per) == ("e3m4", "row")

    def test_fp32_has_no_products_unless_asked(self) -> None:
        config = config_of("dtype=mixed", "dtype/products=mxfp8")
        assert not build_precision(in_fp32(config)).policy.casts
        assert Precision("fp32", products="tf32").policy.casts
        assert str(Precision("fp32", products="tf32")) == "fp32(tf32)"


BLOCKS = {"per": "block", "block": 24}
X = "dtype.recipes.mine.forward.x."


@pytest.mark.parametrize(
    ("every", "says"),
    [
        ({}, f"{X}format=None: give a format's name, or its bits"),
        ({"format": "e4m3"}, "format=e4m3: choose tf32, e4m3fn, e5m2, e2m3, e3m2, e2m1, or give"),
        ({"format": {"exponent_bits": 4}}, "format e4m0: mantissa_bits=0: choose 1 to 10"),
        ({"blok": 3}, f"{X}blok: no such option; choose format, per, block"),
        ({"per": "column"}, f"{X}per=column: choose tensor, row, block"),
        ({"block": 0}, f"{X}block=0: must be a whole number >= 1"),
        ({"hadamard": 12}, f"{X}hadamard=12: must be 0 or a power of two"),
        ({"across": 16}, f"{X}across=16: does nothing with per=tensor"),
        ({"history": 4, "per": "row"}, f"{X}history=4: only works with per=tensor"),
        ({"hadamard": 16, **BLOCKS}, f"{X}hadamard=16: block=24 must be a multiple of it"),
    ],
)
def test_an_entry_is_refused(every: dict[str, Any], says: str) -> None:
    refused({"every": {"format": "e2m1", **every} if every else {}}, says)


@pytest.mark.parametrize(
    ("node", "says"),
    [
        ({"evry": {}}, "evry: no such option; choose every, forward, dx, dw, half, attention; "),
        ({"dw": {"x": {"hadamard": 16}}}, "dw: hadamard=0 and 16: give both operands the same"),
        ({"dw": {"w": {}}}, "dw.w: no such option; choose x, dy"),
        ({"forward": "half"}, "forward=half: must be a mapping"),
    ],
)
def test_a_recipe_is_refused(node: dict[str, Any], says: str) -> None:
    refused({"every": {"format": "e2m1"}, **node}, "dtype.recipes.mine." + says)


def refused(node: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        Recipe.from_mapping("mine", node)
    assert str(error.value).startswith(says)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["fp32", "none"])
def test_a_recipe_has_a_name_of_its_own(name: str) -> None:
    recipe = Recipe.from_mapping(name, {"every": {"format": "e2m1"}})
    with pytest.raises(
        ConfigError, match=f"dtype.recipes.{name}: is the name of a pin; choose another"
    ):
        Precision("amp", recipes={name: recipe})


class TestMap:
    def rows(self, products: str = "mxfp8", **modules: str) -> dict[str, Any]:
        model = nn.ModuleDict(
            {
                "whole": nn.Linear(64, 32),
                "classes": nn.Linear(64, 10),
                "images": nn.Conv2d(3, 64, 3),
                "grouped": nn.ConvTranspose2d(64, 64, 3, groups=4),
                "norm": nn.LayerNorm(64),
                "cells": nn.LSTM(40, 32),
                "slopes": nn.PReLU(),
                "attention": nn.MultiheadAttention(32, 1),
                "head": nn.Linear(64, 64),
            }
        )
        named = OpLists.named()
        ops = OpLists(named.allow, named.deny, named.infer, modules)
        precision = Precision("mixed", "bfloat16", products=products, ops=ops)
        precision.prepare(model, torch.optim.SGD(model.parameters()))
        self.text = describe(precision, model)
        return {row.module: row for row in dtype_map(precision, model)}

    def test_says_what_stays_in_half_and_why(self) -> None:
        said = {name: row.products for name, row in self.rows(whole="nvfp4").items()}
        assert said == {
            "whole": "nvfp4",
            "classes": "mxfp8; dx in half: 10 is no multiple of 32",
            "images": "mxfp8; forward in half: 3 is no multiple of 32",
            "grouped": "mxfp8; forward in half: 16 is no multiple of 32; dx in half: 16 is no "
            "multiple of 32",
            "norm": "-",
            "cells": "mxfp8; forward of weight_ih_l0 in half: 40 is no multiple of 32",
            "slopes": "-",
            "attention": "mxfp8",
            "attention.out_proj": "mxfp8",
            "head": "mxfp8",
        }
        for line in ("mxfp8 forward: x e4m3fn / e8m0 scale per block of 32 x 1, w", "nvfp4 dw: x"):
            assert f"\n{line}" in self.text

    def test_says_which_pin_keeps_a_module_in_half(self) -> None:
        rows = self.rows("nvfp4", whole="half", classes="none", images="fp32")
        assert rows["head"].products == "in half: 'head' is pinned to none"
        assert rows["whole"].products == "in half: 'whole' is pinned to half"
        assert rows["classes"].products == "in half: 'classes' is pinned to none"
        assert rows["images"].products == "-"

    def test_a_pin_to_a_recipe_leaves_formats_as_they_are(self) -> None:
        pinned, plain = self.rows(norm="nvfp4", head="none"), self.rows()
        for name in ("norm", "head"):
            formats = [(own.storage, own.compute, own.why) for own in (pinned[name], plain[name])]
            assert formats[0] == formats[1]

    def test_a_tied_weight_by_where_it_is_read(self) -> None:
        """An embedding that the head multiplies with: the head's pin decides."""
        model = nn.Sequential(nn.Embedding(32, 32), nn.Linear(32, 32, bias=False))
        model[1].weight = model[0].weight
        for pin, says in (("none", "in half"), ("mxfp8", "mxfp8")):
            named = OpLists.named()
            ops = OpLists(named.allow, named.deny, named.infer, {"1": pin})
            precision = Precision("mixed", "bfloat16", products="mxfp8", ops=ops)
            precision.trace(model, torch.zeros(2, dtype=torch.long))
            assert dtype_map(precision, model)[0].products == says

    def test_has_no_such_column_without_products(self) -> None:
        assert self.rows("none")["head"].products == ""
        assert "products" not in self.text
