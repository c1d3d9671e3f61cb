"""What the formats of a recipe hold at the scales of one step, for the pictures of ranges.

If blocks have scales of their own, the limits are the widest: below the first even the block with
the smallest scale makes a zero of a value, and the last is the largest number of the block with the
largest scale. A Hadamard transform leaves no values that could be held against them.
"""

import math
from collections.abc import Mapping

from mpframe.numerics.product_noise import Noises
from mpframe.precision.policy import Policy

OPERANDS = {"weights": ("forward", "w"), "activation_gradients": ("dx", "dy")}
"""Kinds of ranges that are operands of products: the product, and the operand."""


def product_limits(
    noises: Noises, policy: Policy, kind: str, loss_scale: float
) -> Mapping[str, tuple[float, float]]:
    """By layer, log2 of the largest magnitude that is lost in any block, and of the largest number.

    Args:
        noises: of the step.
        policy: that was in force.
        kind: of ranges; empty if it is no operand of a product.
        loss_scale: that gradients were multiplied by; the limits are of unscaled ones.
    """
    if kind not in OPERANDS:
        return {}
    product, operand = OPERANDS[kind]
    octaves = math.log2(loss_scale) if operand == "dy" else 0.0
    found = {}
    for (layer, name), noise in noises.items():
        if name != f"{product}.{operand}":
            continue
        pin = policy.pin_of(layer)
        recipe = policy.recipe_of(pin[1] if pin else None)
        how = recipe.products[product][operand] if recipe else None
        if how is None or how.hadamard or noise.lowest_scale > noise.highest_scale:
            continue
        lost = math.log2(how.format.smallest / 2) + noise.lowest_scale
        largest = math.log2(how.format.max) + noise.highest_scale
        found[layer] = lost - octaves, largest - octaves
    return found
