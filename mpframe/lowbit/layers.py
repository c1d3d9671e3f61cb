"""The words about the formats of a layer's products, for the dtype map."""

from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mpframe.core.casting.policy import Compute, Policy
from mpframe.core.tree import device_of
from mpframe.lowbit.kernels import misfit, weight_operand
from mpframe.lowbit.native import is_wanted, refusals
from mpframe.lowbit.ops import ATTENTION, OPS, quantises
from mpframe.lowbit.recipe import Recipe
from mpframe.lowbit.recurrent import RECURRENT

# Ops that multiply two matrices, neither batches nor convolutions.
_OF_MATRICES = {"linear", "matmul", "mm", "addmm", *RECURRENT}


def products_of(
    name: str,
    module: nn.Module,
    op: str | None,
    readers: Iterable[tuple[str, str | None]],
    policy: Policy,
) -> str:
    """Name the recipe of a layer's products, and which of them stay in half and why, or `-`.

    Blocks must divide the lengths of the weight. Whether `dw` has whole blocks depends on the
    number of samples, which is unknown here. `op` is what the module runs. `readers` are ops that
    read its weights, each with the pin that holds there.
    """
    pin = policy.pin_of(name)
    pinned = pin[1] if pin else None
    ops = [op, "linear"] if op == ATTENTION else [op]  # The projections before and after.
    calls = [*((op, pinned) for op in ops if op), *readers]
    recipes = ((op, policy.recipes.get(policy.recipe_name(pin) or "")) for op, pin in calls)
    by, recipe = next((r for r in recipes if r[1] and quantises(r[1], r[0], policy)), ("", None))
    if recipe is not None:
        native = _say_native(recipe, by, module, policy)
        return "; ".join([recipe.name + native, *_list_half(recipe, module)])
    # prelu is in ops.allow, as under autocast, but multiplies element by element.
    halves = [
        call[0] for call in calls if policy.compute_of(*call) is Compute.HALF and call[0] != "prelu"
    ]
    if not halves:
        return "-"
    if pin is not None:
        return f"in half: {pin[0]!r} is pinned to {pin[1]}"
    return "in half" if halves[0] in OPS else f"in half: {halves[0]} is never quantised"


def _say_native(recipe: Recipe, op: str, module: nn.Module, policy: Policy) -> str:
    """Say which products of a layer an instruction computes, or nothing if nobody asked for one."""
    device = device_of(module)
    if not is_wanted(policy.compute, device):
        return ""
    if op not in _OF_MATRICES:
        return ", emulated"
    reasons = refusals(recipe, device)
    if len(reasons) == len(recipe.products):
        return f", emulated: {next(iter(reasons.values()))}"
    return ", native" + f" but for {', '.join(reasons)}" * bool(reasons)


def _list_half(recipe: Recipe, module: nn.Module) -> list[str]:
    weights = dict(_matrices(module))
    found: dict[tuple[str, str], list[str]] = {}
    for name, weight in weights.items():
        for product, reason in _reasons(recipe, module, weight):
            found.setdefault((product, reason), []).append(name)
    return [
        product + f" of {', '.join(names)}" * (len(names) < len(weights)) + f" in half: {reason}"
        for (product, reason), names in found.items()
    ]


def _matrices(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the weights of a layer: recurrent layers have several."""
    many = isinstance(module, (nn.RNNBase, nn.RNNCellBase))
    for name, weight in module.named_parameters(recurse=False):
        known = name.startswith("weight_") if many else name == "weight"
        if known and not is_lazy(weight) and weight.dim() > 1:
            yield name, weight


def _reasons(recipe: Recipe, module: nn.Module, weight: Tensor) -> Iterator[tuple[str, str]]:
    """Yield products that stay in half, and why."""
    groups = getattr(module, "groups", 1)
    over = 0 if getattr(module, "transposed", False) else 1
    for product, axis in (("forward", over), ("dx", 1 - over)):
        if product not in recipe.products:
            yield product, "by the recipe"
        elif reason := misfit(recipe, product, weight_operand(weight, axis, groups)):
            yield product, reason
