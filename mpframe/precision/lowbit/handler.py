"""Products below 16 bits as an `OpHandler`, the recipes that a policy names, and the dtype map."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from mpframe.core.errors import ConfigError
from mpframe.core.tree import device_of
from mpframe.precision.handlers import Handler, OpHandler, Readers
from mpframe.precision.lowbit.kernels import ProductState, Quantizer, Watch, weight_operand
from mpframe.precision.lowbit.native import is_wanted, refusals
from mpframe.precision.lowbit.ops import ATTENTION, OPS, quantises, run_op
from mpframe.precision.lowbit.recipe import Recipe
from mpframe.precision.op_lists import PINS
from mpframe.precision.policy import NO_PRODUCTS, Compute, Policy


class ProductHandler(OpHandler):
    """The `OpHandler` that runs the products of every recipe that a policy names."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.state = ProductState()
        half = None if policy.mode == "fp32" else policy.half_dtype
        self._ops = {
            (op, name): partial(run_op, op, quantizer, half)
            for name, recipe in policy.recipes.items()
            for quantizer in [Quantizer(recipe, self.state, policy.compute)]
            for op in OPS
            if quantises(recipe, op, policy)
        }

    def handler_of(self, op: str, recipe: str | None) -> Handler | None:
        return None if recipe is None else self._ops.get((op, recipe))

    def attach(self, model: nn.Module) -> None:
        self.state.learn_names(model)

    def describe(self, name: str, module: nn.Module, op: str | None, readers: Readers) -> str:
        """Name the recipe of a layer's products, and which of them stay in half and why, or `-`."""
        policy = self._policy
        pin = policy.pin_of(name)
        ops = [op, "linear"] if op == ATTENTION else [op]  # The projections before and after.
        calls = [*((op, pin and pin[1]) for op in ops if op), *readers]
        for op, pinned in calls:
            recipe = policy.recipes.get(policy.recipe_name(pinned) or "")
            if recipe is not None and quantises(recipe, op, policy):
                native = _say_native(recipe, op, module, policy)
                return "; ".join([recipe.name + native, *_list_half(recipe, module)])
        # prelu is in ops.allow, as under autocast, but multiplies element by element.
        products = [call for call in calls if call[0] != "prelu"]
        if not any(policy.compute_of(*call) is Compute.HALF for call in products):
            return "-"
        return "in half" if pin is None else f"in half: {pin[0]!r} is pinned to {pin[1]}"

    def state_dict(self) -> dict[str, Any]:
        return self.state.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state.load_state_dict(state)


def watch_products(op_handlers: Iterable[OpHandler], watch: Watch | None) -> None:
    """Have `watch` count what quantisation takes from each operand, or nobody if it is None."""
    for handler in op_handlers:
        if isinstance(handler, ProductHandler):
            handler.state.watch = watch


def find_recipes(policy: Policy) -> tuple[Policy, OpHandler]:
    """Return a policy with the user's recipes and the shipped ones that it names, and its handler.

    ConfigError: a name is neither a recipe nor a pin, or there is no op to quantise.
    """
    recipes = dict(policy.recipes)
    for name in (*PINS, NO_PRODUCTS):
        if name in recipes:
            raise ConfigError(f"dtype.recipes.{name}: is the name of a pin; choose another")
    pins = {f"ops.modules[{p!r}]": pin for p, pin in policy.ops.modules.items() if pin not in PINS}
    for option, name in {"dtype.products": policy.products, **pins}.items():
        if name not in (NO_PRODUCTS, *recipes):
            recipes[name] = Recipe.named(name, option)
    if policy.products != NO_PRODUCTS and not policy.ops.allow:
        raise ConfigError(
            f"dtype.products={policy.products}: has no op to act on, as ops.allow is empty; "
            "choose other ops, or dtype.products=none"
        )
    policy = replace(policy, recipes=recipes)
    return policy, ProductHandler(policy)


def _say_native(recipe: Recipe, op: str, module: nn.Module, policy: Policy) -> str:
    """Say which products of a layer an instruction computes, or nothing if nobody asked for one."""
    device = device_of(module)
    if not is_wanted(policy.compute, device):
        return ""
    if op not in ("linear", "matmul", "mm", "addmm"):  # It takes no two matrices.
        return ", emulated"
    reasons = refusals(recipe, device)
    if len(reasons) == len(recipe.products):
        return f", emulated: {next(iter(reasons.values()))}"
    return ", native" + f" but for {', '.join(reasons)}" * bool(reasons)


def _list_half(recipe: Recipe, module: nn.Module) -> Iterator[str]:
    """Yield products that stay in half, and why, but not `dw`, which depends on the samples."""
    # A weight that is calculated from others is no parameter, and reading it may change it.
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if weight is None or is_lazy(weight) or weight.dim() < 2:
        return
    over, groups = int(not getattr(module, "transposed", False)), getattr(module, "groups", 1)
    for product, axis in (("forward", over), ("dx", 1 - over)):
        reason = "by the recipe"
        if product in recipe.products:
            operand = weight_operand(weight, axis, groups)
            reason = operand.misfit(recipe.products[product]["w"])
        if reason:
            yield f"{product} in half: {reason}"
