"""A run that reports its ranges: curves, histograms, pictures, after a resume too; the picture."""

import csv
import math
from pathlib import Path

import pytest
from conftest import StartRun
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mpframe import checkpoint
from mpframe.cli.commands import gradient_picture as gradient_command
from mpframe.numerics.product_noise import NAMES
from mpframe.numerics.range_record import read_ranges
from mpframe.numerics.ranges import KINDS

OPTIONS = ("numerics=on", "numerics.every=5", "model=mlp", "numerics.layers=[head,hidden1.linear]")


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


def test_the_picture_of_the_gradients(
    start_run: StartRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    start_run(run, "model=mlp", "dtype=mixed", "trainer.epochs=1", "loss_scaling=Backoff")
    capsys.readouterr()
    gradient_command.main([f"run={run}", f"out={tmp_path / 'picture.png'}"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:3] == ["present", "scale", "2^16"]
    lost = [float(line.split("lost")[1].split("%")[0]) for line in lines[:3]]
    assert lost[0] > lost[1] >= lost[2]
    assert all(line.endswith("inf   0.000%") for line in lines[:3])
    assert (tmp_path / "picture.png").stat().st_size > 5000


def test_the_picture_has_the_limits_of_products_by_their_histories(
    start_run: StartRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, products = tmp_path / "run", "dtype/products=fp8_delayed"
    start_run(run, "model=mlp", "dtype=mixed", products, "trainer.epochs=1", "loss_scaling=Backoff")
    capsys.readouterr()
    gradient_command.main([f"run={run}", f"out={tmp_path / 'picture.png'}"])
    lines = capsys.readouterr().out.splitlines()
    amax = checkpoint.read(run).state["trainer"]["products"]["amax"]
    largest = [
        math.log2(max(float(own["past"].max()), float(own["present"])))
        for name, own in amax.items()
        if name.endswith(" dy")
    ]
    # The scale of the next step is the largest value so far over the format's, and holds just it.
    held = f"largest 2^{min(largest):.1f} to 2^{max(largest):.1f}"
    assert lines[4].split()[:3] == ["present", "scale", "dw.dy"]
    assert lines[4].endswith(held)
    assert lines[3].split()[:3] == ["present", "scale", "dx.dy"]
    assert lines[5].startswith("picture: ")
    gradient_command.main([f"run={run}", f"out={tmp_path / 'p.png'}", "dtype.products=mxfp4"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].startswith("no limits of mxfp4: ")


def test_the_picture_of_bfloat16_has_a_best_scale_that_fp32_holds(
    start_run: StartRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    start_run(
        run, "model=mlp", "dtype=mixed_bf16", "dtype/products=fp8_tensorwise", "trainer.epochs=1"
    )
    capsys.readouterr()
    gradient_command.main([f"run={run}"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-4].startswith("best scale               2^127 ")
    # Without a loss scale the limits belong to the first panel.
    assert lines[-3].startswith("no loss scaling          dx.dy ")


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
