"""Emulated half against its definition, bit for bit, forward and backward.

    y  = round_to_half(op(fp32(x_half), ...))
    dx = round_to_half(d op(fp32(x_half), ...) . fp32(dy_half))

The reference below is written in plain fp32 torch with explicit roundings; it shares nothing with
the package.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from op_table import TABLE, Spelling
from test_cast_ops import LISTS
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from vocabulary import HALVES, same_bits, tensors

from mpframe import Precision
from mpframe.precision.casting.emulation import half_values, rounded

ALLOWED = sorted(set().union(*(lists.allow for lists in LISTS.values())))
# 1; small enough for subnormal results; large enough for results beyond the range of float16.
SCALES = [1.0, 2.0**-12, 2.0**9]


def scaled(inputs: Any, factor: float, dtype: torch.dtype) -> Any:
    def convert(leaf: Any) -> Any:
        floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return (leaf * factor).to(dtype).requires_grad_() if floating else leaf

    return tree_map(convert, inputs)


def leaves(inputs: Any) -> list[Tensor]:
    return [t for t in tensors(inputs) if t.requires_grad]


def differentiable(result: Any) -> list[Tensor]:
    return [t for t in tensors(result) if t.requires_grad]


def seeds_for(results: Sequence[Tensor], half: torch.dtype) -> list[Tensor]:
    """Incoming gradients, exact in half."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(r.shape, generator=generator).to(half) for r in results]


def reference(
    spelling: Spelling, inputs: Any, half: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Results and gradients by definition; `inputs` hold values of `half`, as fp32."""
    results = differentiable(spelling(*inputs))
    incoming = [seed.float() for seed in seeds_for(results, half)]
    gradients = torch.autograd.grad(results, leaves(inputs), incoming, allow_unused=True)
    return [r.to(half) for r in results], [g.to(half) for g in gradients if g is not None]


def emulated(
    spelling: Spelling, inputs: Any, precision: Precision
) -> tuple[list[Tensor], list[Tensor]]:
    with precision.cast():
        results = differentiable(spelling(*inputs))
    incoming = seeds_for(results, precision.policy.half_dtype)
    gradients = torch.autograd.grad(results, leaves(inputs), incoming, allow_unused=True)
    return results, [g for g in gradients if g is not None]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("op", ALLOWED)
def test_every_half_op_is_what_the_definition_says(op: str, half: str) -> None:
    dtype, row = HALVES[half], TABLE[op]
    lists = next(lists for lists in LISTS.values() if op in lists.allow)
    for mode, factor in (("mixed", SCALES[0]), *(("amp", factor) for factor in SCALES)):
        precision = Precision(mode, half, ops=lists, compute="emulated")
        exact = scaled(row.inputs, factor, dtype)
        as_fp32 = scaled(exact, 1.0, torch.float32)
        given = exact if mode == "mixed" else scaled(row.inputs, factor, torch.float32)
        for spelling in row.spellings:
            results, gradients = emulated(spelling, given, precision)
            by_definition, their_gradients = reference(spelling, as_fp32, dtype)
            assert same_bits(results, by_definition)
            # fp32 weights get the rounded gradient, widened.
            weights = leaves(given)[0].dtype
            assert same_bits(gradients, [g.to(weights) for g in their_gradients])


def test_results_beyond_the_range_overflow() -> None:
    """65520 is the first number that rounds to inf in float16; 65519 rounds to 65504."""
    one = torch.ones(1, 1)
    with Precision("amp", compute="emulated").cast():
        assert (torch.full((1, 1), 1.0) @ torch.full((1, 1), 65519.0)).item() == 65504
        assert torch.isinf(torch.full((1, 1), 65520.0) @ one)
        assert torch.isinf(torch.full((1, 2), 40000.0) @ torch.ones(2, 1))


def test_sums_are_taken_in_fp32() -> None:
    """4096 ones: in float16 the running sum would stop at 2048, for 2048 + 1 rounds to 2048."""
    ones = torch.ones(1, 4096)
    with Precision("amp", compute="emulated").cast():
        assert (ones @ ones.T).item() == 4096


def test_small_results_are_subnormal_and_then_zero() -> None:
    """The least float16 is 2^-24; half of it rounds to even, to 0."""
    with Precision("amp", compute="emulated").cast():
        least = torch.full((1, 1), 2.0**-12) @ torch.full((1, 1), 2.0**-12)
        nothing = torch.full((1, 1), 2.0**-12) @ torch.full((1, 1), 2.0**-13)
    assert least.item() == 2.0**-24
    assert nothing.item() == 0


@pytest.mark.parametrize("half", HALVES)
def test_rounding_helpers(half: str) -> None:
    x = torch.tensor([1 + 2.0**-12, 1e-3, -70000.0, float("nan")])
    dtype = HALVES[half]
    assert same_bits([half_values(x, dtype)], [x.to(dtype).float()])
    assert same_bits([rounded(x, dtype)], [x.to(dtype)])
    assert rounded(torch.arange(3), dtype).dtype == torch.int64


@pytest.mark.parametrize("half", HALVES)
def test_a_whole_network_is_emulated(half: str) -> None:
    """Conv, BatchNorm and linear together, against roundings by hand between them."""
    dtype = HALVES[half]
    torch.manual_seed(0)
    conv, linear = nn.Conv2d(1, 3, 3), nn.Linear(3 * 6 * 6, 5)
    x = torch.randn(2, 1, 8, 8)
    with Precision("amp", half, compute="emulated").cast():
        result = linear(conv(x).relu().flatten(1))
    with torch.no_grad():
        for module in (conv, linear):
            for parameter in module.parameters():
                parameter.copy_(parameter.to(dtype))
        hidden = conv(x.to(dtype).float()).to(dtype).relu().flatten(1)
        expected = linear(hidden.float()).to(dtype)
    assert same_bits([result], [expected])
