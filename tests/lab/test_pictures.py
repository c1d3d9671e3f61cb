"""Pictures of ranges, and a run that records and draws them."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import Patch
from in_process import StartRun, events
from test_ranges import made

from mpframe.lab import pictures
from mpframe.lab.exponents import Limits
from mpframe.lab.pictures import draw_layers, draw_time
from mpframe.lab.product_noise import NAMES
from mpframe.lab.range_watch import RangeWatch
from mpframe.lab.ranges import KINDS, read_ranges
from mpframe.tracking.tags import meaning_of

HALF = torch.float16


@pytest.fixture
def drawn(monkeypatch: Patch) -> list[Any]:
    """The axes of every picture, which is not written."""
    axes: list[Any] = []
    monkeypatch.setattr(pictures, "_finish", lambda figure, own, *_: axes.append(own))
    return axes


def test_only_layers_in_half_are_drawn_against_its_limits(drawn: list[Any], tmp_path: Path) -> None:
    draw_layers(made(7, layers=6), "weights", HALF, tmp_path)
    (axes,) = drawn
    rows = [label.get_text().split()[1:-1] for label in axes.get_yticklabels()]
    assert rows == [[], ["fp32"], [], ["fp32"], [], ["fp32"]]
    middles = {(a[1] + b[1]) / 2 for lines in axes.collections for a, b in lines.get_segments()}
    assert middles == {0.0, 2.0, 4.0}
    assert [text.get_text() for text in axes.texts] == ["lost", "fewer\nbits", "inf"]
    for layer, lines in zip(made(7).layers, (3, 0), strict=True):  # Over time, likewise.
        draw_time([made(7)] * 4, "weights", layer, HALF, tmp_path)
        shown = [own for own in drawn[-1].patches if np.isfinite(own.get_data().values).all()]
        assert len(shown) == len(drawn[-1].texts) == lines
    many = made(7, layers=60)
    assert np.allclose(many.headroom("weights", Limits.of(HALF)), np.log2(65504) - 3)
    many.rows[:] = 0
    assert not draw_layers(many, "weights", HALF, tmp_path)


def test_limits_over_time_reach_the_edges(drawn: list[Any], tmp_path: Path) -> None:
    reports = [made(step, scale=2.0**step) for step in range(1, 5)]
    draw_time(reports, "gradients", reports[0].layers[0], HALF, tmp_path)
    (axes,) = drawn
    for line in axes.patches:
        edges, values = line.get_data().edges, line.get_data().values
        assert (edges[0], edges[-1]) == axes.get_xlim()
        assert np.diff(values).tolist() == [-1.0, -1.0, -1.0]


def test_a_resumed_run_shows_all(start_run: StartRun, tmp_path: Path, monkeypatch: Patch) -> None:
    on = ["numerics=on", "numerics.every=2", "callbacks.ranges.layers=[head]"]
    products = ["dtype=mixed_bf16", "dtype/products=fp8_tensorwise", "trainer.accumulate=2"]
    options = ["model=mlp", "model.hidden=32", *products, *on]
    with monkeypatch.context() as patched:
        patched.setattr(RangeWatch, "draw", lambda self: None)  # It takes seconds.
        start_run(tmp_path, *options, "trainer.max_steps=2")
    start_run(tmp_path, *options, "trainer.max_steps=4", "resume=auto")
    assert [report.step for report in read_ranges(tmp_path)] == [2, 4]
    with (tmp_path / "numerics" / "products.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows][:: len(rows) // 2] == [2, 4]
    counted = {(row["layer"], row["operand"]): int(row["values"]) for row in rows}
    first, second = ({n: counted.get((f"hidden{k}.linear", n)) for n in NAMES} for k in (1, 2))
    # Two micro-batches of 64 of 64 inputs, and the weight once for each. Inputs get no gradient.
    assert first["forward.x"] == first["dw.x"] == 2 * 64 * 64
    assert first["dx.dy"] is first["dx.w"] is None
    assert second["forward.w"] == second["dx.w"]
    assert second["dx.dy"] == second["dw.dy"] == first["dw.dy"]
    found = events(tmp_path)
    kinds = {kind: set(found.Tags()[kind]) for kind in ("scalars", "images", "histograms")}
    figures = [f"products/{name}" for name in ("snr_db", "saturated", "lost", "scale_spread")]
    for name in [*figures, *(f"{kind}/headroom_bits" for kind in KINDS)]:
        assert any(tag.startswith(f"numerics/{name}/") for tag in kinds["scalars"])
    assert "numerics/products/signal_to_noise" in kinds["images"]
    for kind in KINDS:
        assert f"numerics/{kind}/layers_by_exponent" in kinds["images"]
        assert f"numerics/{kind}/exponents_by_step/head" in kinds["images"]
        assert f"numerics/{kind}/exponents/head" in kinds["histograms"]
    for tag in set().union(*kinds.values()):
        assert found.SummaryMetadata(tag).summary_description == meaning_of(tag).markdown
    for name in (*KINDS, "products"):
        assert (tmp_path / "numerics" / f"{name}.png").stat().st_size > 5000
    steps = [event.step for event in found.Scalars("numerics/weights/headroom_bits/head")]
    assert steps == [2, 4]
    counts = found.Histograms("numerics/weights/exponents/head")[-1].histogram_value
    assert counts.num == read_ranges(tmp_path)[-1].bins("weights")[-1].sum()
