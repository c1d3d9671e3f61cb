"""Tables and masks: trained, resumed, evaluated, predicted and exported."""

import csv
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from in_process import train
from PIL import Image
from sameness import assert_same_run, cut
from tiny_experiments import tiny

from mpframe.cli.commands import export, predict
from mpframe.cli.commands.evaluate import evaluate
from mpframe.core.errors import DataError
from mpframe.tracking.summary import Summary

# 12 steps are more than an epoch of each; the cut after the fourth is in the first one.
SHORT = [
    "device=cpu", "dataset.batch_size=8", "trainer.max_steps=12", "trainer.epochs=9",
    "trainer.checkpoint_every=4", "trainer.keep_last=100", "trainer.eval_every=12",
]  # fmt: skip
SMALL = {
    "bikes": ["model.hidden=[8]"],
    "shapes_unet_small": [],
    "photographs_unet_small": ["dataset.crops_per_image=64"],
}


@pytest.fixture(scope="module", params=["fp32", "mixed"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=SMALL)
def options(request: pytest.FixtureRequest, dtype: str, tiny_data: Path) -> list[str]:
    name = request.param
    return [*tiny(name, tiny_data), *SHORT, *SMALL[name], f"dtype={dtype}"]


@pytest.fixture(scope="module")
def run(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each, made once."""
    folder = tmp_path_factory.mktemp("run")
    train(folder, *options)
    return folder


def test_a_resumed_run_equals_the_undisturbed_one(
    run: Path, options: list[str], tmp_path: Path
) -> None:
    resumed = cut(run, tmp_path / "resumed")
    train(resumed, *options, "resume=auto")
    assert_same_run(run, resumed)


in_half = pytest.mark.parametrize("dtype", ["mixed"], indirect=True)


@in_half
def test_an_evaluation_measures_what_the_run_measured(run: Path) -> None:
    summary = Summary.read(run)
    measured = evaluate(run, [], split="val" if summary.test_metric is None else "test")
    assert summary.metric in ("rmspe", "dice")
    own = summary.best if summary.test_metric is None else summary.test_metric
    assert measured.evaluation.metrics[summary.metric] == own


@in_half
def test_a_prediction_is_in_the_targets_unit(run: Path, options: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    predict.main([f"checkpoint={run}", f"out={out}", "split=val", "outputs=raw"])
    with out.open() as file:
        rows = list(csv.DictReader(file))
    if "experiment=bikes" in options:
        assert set(rows[0]) == {"index", "target", "output"}
        outputs, targets = (torch.tensor([float(r[k]) for r in rows]) for k in ("output", "target"))
        assert targets.min() >= 1  # riders, not their logarithm
        rmspe = ((outputs.double() - targets) / targets).square().mean().sqrt()
        measured = evaluate(run, [], split="val").evaluation.metrics["rmspe"]
        assert rmspe.item() == pytest.approx(measured, rel=1e-6)  # outputs are written as float32
    else:
        assert "output_0_0_0" in rows[0]  # a logit of each class and pixel


@pytest.mark.parametrize("dtype", ["fp32"], indirect=True)
def test_an_export_is_the_same_model(run: Path, options: list[str], tmp_path: Path) -> None:
    out = tmp_path / "model.pt2"
    export.main([f"checkpoint={run}", f"out={out}", "format=torch_export"])
    graph = torch.export.load(out).module()
    if "experiment=bikes" in options:
        outputs = graph(categorical=torch.ones(3, 7).long(), continuous=torch.zeros(3, 5))
        assert outputs.shape == (3, 1)
    else:
        channels = 1 if "experiment=photographs_unet" in options else 3
        assert graph(torch.zeros(3, channels, 16, 16)).shape[2:] == (16, 16)


@in_half
def test_other_data_are_not_read_with_other_numbers(
    run: Path, options: list[str], tiny_data: Path, tmp_path: Path
) -> None:
    if "experiment=bikes" in options:
        shutil.copytree(tiny_data / "bikes", tmp_path / "bikes")
        (table,) = (tmp_path / "bikes").iterdir()
        table.write_text(table.read_text().replace(".1428571", ".9"))
        with pytest.raises(DataError, match=r"^dataset: continuous, as measured on the training"):
            evaluate(run, [f"dataset.root={tmp_path}/bikes"])
    elif "experiment=photographs_unet" in options:
        shutil.copytree(tiny_data / "mask_folder", tmp_path / "dark")
        for path in tmp_path.glob("dark/*/images/*"):
            Image.open(path).point(lambda value: value // 2).save(path)
        dark = f"dataset.root={tmp_path}/dark"
        with pytest.raises(DataError, match=r"^dataset: its images are normalised by") as refused:
            evaluate(run, [dark])
        given = shlex.split(str(refused.value).partition("; give ")[2])
        assert evaluate(run, [dark, *given]).samples > 0
        assert evaluate(run, given).evaluation == evaluate(run, []).evaluation


@in_half
def test_training_photographs_are_predicted_in_tiles(
    run: Path, options: list[str], tmp_path: Path
) -> None:
    if "experiment=photographs_unet" not in options:
        pytest.skip("the other datasets do not choose their samples at random")
    out = tmp_path / "out.csv"
    predict.main([f"checkpoint={run}", f"out={out}", "split=train"])
    with out.open() as file:
        assert len(list(csv.reader(file))) == 1 + 3 * 4  # A photograph of 40 x 64 in 16 x 16.
