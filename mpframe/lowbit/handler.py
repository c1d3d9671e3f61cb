"""Products below 16 bits as an `OpHandler`, and the recipes that a policy names."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from mpframe.core.comm import Comm
from mpframe.core.errors import ConfigError
from mpframe.core.handlers import Handler, OpHandler, Readers
from mpframe.core.op_lists import PINS
from mpframe.core.policy import NO_PRODUCTS, Policy
from mpframe.core.precision import Precision
from mpframe.core.tree import device_of
from mpframe.lowbit.kernels import Quantizer
from mpframe.lowbit.layers import products_of
from mpframe.lowbit.native import refusals, refused
from mpframe.lowbit.ops import OPS, ProductOp, quantises
from mpframe.lowbit.recipe import Recipe, shipped
from mpframe.lowbit.state import ProductState, Watch


class ProductHandler(OpHandler):
    """The `OpHandler` that runs the products of every recipe that a policy names."""

    def __init__(self, policy: Policy) -> None:
        self.state, self._policy = ProductState(), policy
        half = None if policy.mode == "fp32" else policy.half_dtype
        self._ops = {
            (op, name): ProductOp(op, quantizer, half)
            for name, recipe in policy.recipes.items()
            for quantizer in [Quantizer(recipe, self.state, policy.compute)]
            for op in OPS
            if quantises(recipe, op, policy)
        }

    def handler_of(self, op: str, recipe: str | None) -> Handler | None:
        return None if recipe is None else self._ops.get((op, recipe))

    def attach(self, model: nn.Module) -> None:
        policy, device = self._policy, device_of(model)
        names = (policy.products, *policy.ops.modules.values())
        recipes = [policy.recipes[name] for name in names if name in policy.recipes]
        for recipe in recipes if policy.compute == "native" else []:
            for product, why in refusals(recipe, device).items():
                raise refused(recipe, product, device, why)
        self.state.learn_names(model)

    def describe(self, name: str, module: nn.Module, op: str | None, readers: Readers) -> str:
        return products_of(name, module, op, readers, self._policy)

    def sync(self, comm: Comm) -> None:
        length = max(recipe.history for recipe in self._policy.recipes.values())
        if comm.size > 1 and length:
            self.state.agree(comm, length)

    def state_dict(self) -> dict[str, Any]:
        return self.state.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state.load_state_dict(state)


def watch_products(precision: Precision, watch: Watch | None) -> None:
    """Have `watch` count what quantisation takes from each operand, or nobody if it is None."""
    for handler in precision.op_handlers:
        if isinstance(handler, ProductHandler):
            handler.state.watch = watch


def find_recipes(policy: Policy) -> tuple[Policy, OpHandler]:
    """Return a policy with all recipes that it names, and the handler that runs them.

    ConfigError: a name is neither a recipe nor a pin, or there is no op to quantise.
    """
    policy = replace(policy, recipes=_read_recipes(policy))
    return policy, ProductHandler(policy)


def _read_recipes(policy: Policy) -> Mapping[str, Recipe]:
    """Return the user's recipes of a policy, and the shipped ones that it names."""
    recipes = dict(policy.recipes)
    for name in (*PINS, NO_PRODUCTS):
        if name in recipes:
            raise ConfigError(f"dtype.recipes.{name}: is the name of a pin; choose another")
    if policy.products not in (NO_PRODUCTS, *recipes):
        recipes[policy.products] = Recipe.named(policy.products)
    for pattern, pin in policy.ops.modules.items():
        if pin in (*PINS, NO_PRODUCTS, *recipes):
            continue
        if pin not in shipped():
            names, known = ", ".join((*PINS, NO_PRODUCTS)), sorted({*recipes, *shipped()})
            raise ConfigError(
                f"ops.modules[{pattern!r}]={pin}: choose {names} or a recipe: {', '.join(known)}"
            )
        recipes[pin] = Recipe.named(pin)
    if policy.products != NO_PRODUCTS and not policy.ops.allow:
        raise ConfigError(
            f"dtype.products={policy.products}: has no op to act on, as ops.allow is empty; "
            "choose other ops, or dtype.products=none"
        )
    return recipes
