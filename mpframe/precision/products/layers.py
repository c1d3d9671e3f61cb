"""What the products of a layer are computed in, in words: for the dtype map."""

from collections.abc import Iterable

from torch import nn
from torch.nn.parameter import is_lazy

from mpframe.precision.policy import Compute, Policy
from mpframe.precision.products.kernels import Operand, misfit, weight_operand
from mpframe.precision.products.ops import ATTENTION, OPS, recipe_for
from mpframe.precision.products.recipe import Recipe


def products_of(
    name: str,
    module: nn.Module,
    op: str | None,
    readers: Iterable[tuple[str, str | None]],
    policy: Policy,
) -> str:
    """The recipe of a layer's products, and which of them stay in half and why.

    Whether `dw` has whole blocks depends on the number of samples, which is not known here.

    Args:
        name: of the module.
        module: its weight, if there is one, tells the lengths that blocks must divide.
        op: that the module runs.
        readers: ops that read its weights, each with the pin that holds there.
        policy: what decides.

    Returns:
        `-` for a module without products.
    """
    pin = policy.pin_of(name)
    pinned = pin[1] if pin else None
    own = [op, "linear"] if op == ATTENTION else [op]  # The projections before and after.
    calls = [*((op, pinned) for op in own if op), *readers]
    recipes = (recipe_for(policy, *call) for call in calls)
    recipe = next((found for found in recipes if found is not None), None)
    if recipe is not None:
        return "; ".join([recipe.name, *_in_half(recipe, module)])
    halves = [call[0] for call in calls if policy.compute_of(*call) is Compute.HALF]
    if not halves:
        return "-"
    if pin is not None:
        return f"in half: {pin[0]!r} is pinned to {pin[1]}"
    return "in half" if halves[0] in OPS else f"in half: {halves[0]} has its products in one kernel"


def _in_half(recipe: Recipe, module: nn.Module) -> list[str]:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or is_lazy(weight) or weight.dim() < 2:
        return []
    groups = getattr(module, "groups", 1)
    over = 0 if getattr(module, "transposed", False) else 1
    of_weight = {
        "forward": weight_operand(weight, over, groups),
        "dx": weight_operand(weight, 1 - over, groups),
    }
    reasons = {product: _reason(recipe, product, own) for product, own in of_weight.items()}
    return [f"{product} in half: {reason}" for product, reason in reasons.items() if reason]


def _reason(recipe: Recipe, product: str, weight: Operand) -> str:
    return misfit(recipe, product, weight) if product in recipe.products else "by the recipe"
