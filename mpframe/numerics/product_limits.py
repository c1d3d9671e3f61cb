"""What the formats of a recipe hold at the scales of one step, for the pictures of ranges.

If blocks have scales of their own, so does each limit: that of the block with the smallest scale,
and that of the block with the largest. Below the lowest limit of all a value becomes zero in any
block; with stochastic rounding, more often than not. A Hadamard transform leaves no values that
could be held against limits.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mpframe.numerics.product_noise import Noises
from mpframe.precision.policy import Policy

OPERANDS = {"weights": "forward.w", "activation_gradients": "dx.dy"}
"""Kinds of ranges that are operands of products."""
GRADIENTS = ("dx.dy", "dw.dy")
"""The operands that are gradients of outputs."""


@dataclass(frozen=True)
class OperandLimits:
    """What an operand's format holds, each at the smallest and the largest scale that there is.

    Attributes:
        lost: log2 of half the format's smallest number: what is not above it rounds to zero.
        largest: log2 of the format's largest number.
    """

    lost: tuple[float, float]
    largest: tuple[float, float]


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
    operand = OPERANDS.get(kind, "")
    octaves = math.log2(loss_scale) if operand in GRADIENTS else 0.0
    return {
        layer: (own.lost[0] - octaves, own.largest[1] - octaves)
        for layer, own in _by_layer(noises, policy, operand)
    }


def gradient_limits(noises: Noises, policy: Policy) -> Mapping[str, OperandLimits]:
    """By operand, as `dx.dy`, the lowest and the highest limits of all layers.

    They are those of gradients as they were quantised, multiplied by the loss scale. An operand
    that is quantised nowhere, or only after a Hadamard transform, is not there.

    Args:
        noises: of the step.
        policy: that was in force.
    """
    found = {}
    for operand in GRADIENTS:
        layers = [own for _, own in _by_layer(noises, policy, operand)]
        if layers:
            lost, largest = [own.lost for own in layers], [own.largest for own in layers]
            found[operand] = OperandLimits(_ends(lost), _ends(largest))
    return found


def _by_layer(noises: Noises, policy: Policy, operand: str) -> Iterator[tuple[str, OperandLimits]]:
    """Layers in which the operand has finite scales and no transform."""
    product, _, role = operand.partition(".")
    for (layer, name), noise in noises.items():
        if name != operand:
            continue
        pin = policy.pin_of(layer)
        recipe = policy.recipe_of(pin[1] if pin else None)
        how = recipe.products[product][role] if recipe else None
        scales = noise.lowest_scale, noise.highest_scale
        # Of zeros alone the ends are inf and -inf, beside inf and nan they are nan.
        if how is None or how.hadamard or not scales[0] <= scales[1]:
            continue
        lost, largest = math.log2(how.format.smallest / 2), math.log2(how.format.max)
        yield (
            layer,
            OperandLimits(
                (lost + scales[0], lost + scales[1]), (largest + scales[0], largest + scales[1])
            ),
        )


def _ends(spans: list[tuple[float, float]]) -> tuple[float, float]:
    return min(low for low, _ in spans), max(high for _, high in spans)
