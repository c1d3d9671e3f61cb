"""A run that reports its ranges: curves, histograms, pictures, after a resume too; the picture."""

import csv
from pathlib import Path

from in_process import StartRun
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mpframe.lab.product_noise import NAMES
from mpframe.lab.ranges import KINDS, read_ranges

OPTIONS = (
    "numerics=on",
    "numerics.every=5",
    "model=mlp",
    "callbacks.ranges.layers=[head,hidden1.linear]",
)


def accumulated(folder: Path) -> EventAccumulator:
    events = EventAccumulator(
        str(folder), size_guidance={"scalars": 0, "images": 0, "histograms": 0}
    )
    events.Reload()
    return events


def test_a_run_shows_its_ranges_and_a_resumed_one_continues(
    start_run: StartRun, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    start_run(run, *OPTIONS, "trainer.epochs=1")
    start_run(run, *OPTIONS, "trainer.epochs=2", "resume=auto")
    assert [report.step for report in read_ranges(run)] == [5, 10, 15, 20, 25, 30, 35, 40]
    events = accumulated(run)
    tags = events.Tags()
    for kind in KINDS:
        assert any(tag.startswith(f"numerics/{kind}/headroom_bits/") for tag in tags["scalars"])
        assert f"numerics/{kind}/layers_by_exponent" in tags["images"]
        assert f"numerics/{kind}/exponents_by_step/head" in tags["images"]
        assert f"numerics/{kind}/exponents/head" in tags["histograms"]
        assert (run / "numerics" / f"{kind}.png").stat().st_size > 5000
    steps = [event.step for event in events.Scalars("numerics/weights/headroom_bits/head")]
    assert steps == sorted(set(steps))
    counted = events.Histograms("numerics/weights/exponents/head")[-1].histogram_value
    assert counted.num == read_ranges(run)[-1].bins("weights")[-1].sum()


def test_nothing_is_attached_when_off(start_run: StartRun, tmp_path: Path) -> None:
    start_run(tmp_path / "run", "trainer.max_steps=3", "model=mlp")
    assert not (tmp_path / "run" / "numerics").exists()


def test_a_run_shows_what_quantisation_takes_and_a_resumed_one_continues(
    start_run: StartRun, tmp_path: Path
) -> None:
    run, products = tmp_path / "run", ["dtype=mixed_bf16", "dtype/products=fp8_tensorwise"]
    start_run(run, *OPTIONS, *products, "trainer.epochs=1", "trainer.accumulate=2")
    start_run(run, *OPTIONS, *products, "trainer.epochs=2", "trainer.accumulate=2", "resume=auto")
    with (run / "numerics" / "products.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows][:: len(rows) // 4] == [5, 10, 15, 20]
    counted = {(row["layer"], row["operand"]): int(row["values"]) for row in rows}
    first, second = ({n: counted.get((f"hidden{k}.linear", n)) for n in NAMES} for k in (1, 2))
    # Two micro-batches of 64 of 64 inputs, and the weight once for each. Inputs get no gradient.
    assert first["forward.x"] == first["dw.x"] == 2 * 64 * 64
    assert first["dx.dy"] is first["dx.w"] is None
    assert second["forward.w"] == second["dx.w"]
    assert second["dx.dy"] == second["dw.dy"] == first["dw.dy"]
    events = accumulated(run)
    tags = events.Tags()
    for figure in ("snr_db", "saturated", "lost", "scale_spread"):
        assert any(tag.startswith(f"numerics/products/{figure}/") for tag in tags["scalars"])
    assert "numerics/products/signal_to_noise" in tags["images"]
    assert (run / "numerics" / "products.png").stat().st_size > 5000
