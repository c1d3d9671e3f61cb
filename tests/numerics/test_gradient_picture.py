"""The gradient picture: limits of products at planted scales, drawn where they are."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mpframe import Precision
from mpframe.numerics import gradient_picture
from mpframe.numerics.exponents import BINS
from mpframe.numerics.gradient_picture import ScaledGradients, draw
from mpframe.numerics.product_limits import OperandLimits, gradient_limits
from mpframe.numerics.product_noise import Noises, ProductProbe

FP16, BF16 = "float16", "bfloat16"


def noises_of(precision: Precision, *gradients: Tensor) -> Noises:
    """Of layers of 32 inputs and 32 outputs, each with these gradients of its outputs."""
    layers = nn.ModuleList(nn.Linear(32, 32) for _ in gradients)
    precision.prepare(layers, torch.optim.SGD(layers.parameters()))
    probe = ProductProbe(precision)
    for layer, dy in zip(layers, gradients, strict=True):
        with precision.cast():
            y = layer(torch.randn(32, 32, requires_grad=True))
        y.backward(dy.to(y.dtype))
    return probe.noises()


def rows(first: float, second: float) -> Tensor:
    """32 samples of 32 outputs: the first half of the samples, and the second."""
    return torch.tensor([[first]] * 16 + [[second]] * 16).expand(32, 32)


@pytest.mark.parametrize("half", [FP16, BF16])
def test_limits_are_those_of_planted_scales(half: str) -> None:
    """mxfp8: 448 times 2^k has the scale 2^k. Blocks of dx are samples, those of dw run across."""
    precision = Precision("mixed", half=half, products="mxfp8")
    noises = noises_of(precision, rows(448 * 2.0**-10, 448 * 2.0**3), rows(448 * 2.0**5, 448.0))
    limits = gradient_limits(noises, precision.policy)
    top = math.log2(448)
    # The smallest number of e4m3 is 2^-9, and half of it is lost.
    assert limits["dx.dy"] == OperandLimits((-10.0 - 10, -10.0 + 5), (top - 10, top + 5))
    assert limits["dw.dy"] == OperandLimits((-10.0 + 3, -10.0 + 5), (top + 3, top + 5))


def test_a_planted_recipe_with_a_transform_has_no_limits_there() -> None:
    precision = Precision("mixed", half=BF16, products="nvfp4")
    noises = noises_of(precision, rows(6.0, 6 * 2.0**-2))
    limits = gradient_limits(noises, precision.policy)
    # The tensor's scale is 6 / 2688, by which the larger blocks have the scale 448, the others 112.
    assert list(limits) == ["dx.dy"]
    assert limits["dx.dy"].largest == pytest.approx((math.log2(1.5), math.log2(6)), abs=1e-6)
    assert limits["dx.dy"].lost == pytest.approx((math.log2(1 / 16), -2), abs=1e-6)
    precision = Precision("mixed", half=BF16, products="mxfp4")
    assert gradient_limits(noises_of(precision, rows(1.0, 1.0)), precision.policy) == {}


def test_zeros_and_an_overflow_have_no_limits() -> None:
    precision = Precision("mixed", half=BF16, products="fp8_rows")
    noises = noises_of(precision, rows(0.0, 0.0), rows(math.inf, 1.0))
    assert gradient_limits(noises, precision.policy) == {}


@pytest.fixture
def panels(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The axes of what is drawn."""
    seen: list[Any] = []
    panel = gradient_picture._panel

    def recorded(axes: Any, *rest: Any) -> None:
        seen.append(axes)
        panel(axes, *rest)

    monkeypatch.setattr(gradient_picture, "_panel", recorded)
    return seen


def at(scale: float, products: dict[str, OperandLimits] | None = None) -> ScaledGradients:
    bins = np.where(np.arange(BINS) % 120 < 5, 1.0, 0.0)
    return ScaledGradients("a scale", scale, bins, 0.0, 0.0, 0.0, products or {})


LIMITS = {
    "dx.dy": OperandLimits((-20.0, -5.0), (-1.0, 13.0)),
    "dw.dy": OperandLimits((-70.0, -7.0), (12.0, 12.0)),
}


def test_the_panel_of_the_present_scale_has_the_limits(panels: list[Any], tmp_path: Path) -> None:
    draw([at(1.0), at(8.0, LIMITS), at(16.0)], torch.float16, 7, tmp_path / "a.png", "mxfp8")
    plain, present, best = panels
    drawn = [(tuple(own.get_xdata()), own.get_linestyle()) for own in present.lines[:-1]]
    # A bar of exponent e reaches from e - 0.5 to e + 0.5, and holds 2^e to 2^(e + 1).
    assert drawn == [
        ((-20.5, -5.5), ":"),
        ((-1.5, 12.5), "-"),
        ((-70.5, -7.5), ":"),
        ((11.5, 11.5), "-"),
    ]
    assert not plain.lines
    assert not best.lines
    # The shares end at 1, all limits are above, and none is out of sight.
    heights = [own.get_ydata()[0] for own in present.lines[:-1]]
    assert heights == sorted(heights)
    assert heights[0] > 1
    assert heights[-1] < present.get_ylim()[1]
    assert present.get_xlim()[0] < -70.5
    assert [own.get_text() for own in present.get_yticklabels(minor=True)] == list(LIMITS)
    assert present.figure.get_suptitle().endswith("in float16, products in mxfp8")
    labels = [own.get_text() for own in present.figure.legends[0].get_texts()]
    assert labels[-2:] == ["lost in products", "largest in products"]


def test_without_a_recipe_there_is_nothing_of_products(panels: list[Any], tmp_path: Path) -> None:
    draw([at(1.0), at(8.0)], torch.float16, 7, tmp_path / "a.png")
    for axes in panels:
        assert not axes.lines
        assert axes.get_ylim() == (1e-6, 1.0)
        assert axes.get_xlim()[0] == -45.5
    labels = [own.get_text() for own in panels[0].figure.legends[0].get_texts()]
    assert labels == ["lost", "fewer bits", "kept", "inf"]
    assert panels[0].figure.get_suptitle() == "gradients after 7 steps, in float16"


def test_limits_in_words() -> None:
    assert at(8.0, LIMITS).product_lines() == [
        "a scale                  dx.dy   lost up to 2^-20.0 to 2^-5.0   largest 2^-1.0 to 2^13.0",
        "a scale                  dw.dy   lost up to 2^-70.0 to 2^-7.0   largest 2^12.0 to 2^12.0",
    ]
    assert at(8.0).product_lines() == []
