"""predict: a row for each sample, from the numbers that evaluate measures."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fixtures import Shown
from in_process import csv_rows, train
from torch import Tensor

from mpframe import checkpoint
from mpframe.cli.commands.evaluate import evaluate
from mpframe.cli.commands.predict import main
from mpframe.data import digits as digits_task

Table = list[dict[str, str]]
SMALL = ["dtype=mixed", "trainer.max_steps=4", "model.width=4", "loss_scaling=none"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an average, made once."""
    folder = tmp_path_factory.mktemp("digits")
    train(folder, *SMALL, "trainer.ema_decay=0.9", "dataset.batch_size=200")
    return folder


@pytest.fixture(scope="module")
def images(tiny_data: Path) -> Path:
    return tiny_data / "image_folder" / "test"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory, images: Path) -> Path:
    """A checkpoint of a run on a folder of images."""
    folder = tmp_path_factory.mktemp("pictures")
    data = ["dataset=image_folder", f"dataset.root={images.parent}", "dataset.batch_size=8"]
    train(folder, *SMALL, *data, "model.channels=3")
    return checkpoint.newest(folder)


def predicted(run: Path, out: Path, *words: str) -> Table:
    main([f"checkpoint={run}", f"out={out}", *words])
    return csv_rows(out)


def numbers(rows: Table, start: str = "output_") -> Tensor:
    return torch.tensor([[float(row[n]) for n in row if n.startswith(start)] for row in rows])


def refused(capsys: Shown, *words: str) -> str:
    with pytest.raises(SystemExit):
        main([*words])
    return capsys.readouterr().err.removeprefix("mpframe: ").removesuffix("\n")


def test_the_accuracy_is_that_of_evaluate(digits: Path, tmp_path: Path, capsys: Shown) -> None:
    rows = predicted(digits, tmp_path / "a.csv")
    done = evaluate(digits, [])
    right = sum(row["class"] == row["target"] for row in rows) / len(rows)
    assert right == done.evaluation.metrics["accuracy"]
    assert [row["index"] for row in rows] == [str(n) for n in range(done.samples)]
    part: Any = getattr(digits_task(), done.split)
    assert [row["target"] for row in rows] == [str(int(part[n][1])) for n in range(len(part))]
    assert capsys.readouterr().out == (
        f"{digits}, step {done.step}: {done.samples} predictions of {done.split} (mixed(float16) "
        f"on cpu, weights ema); written to {tmp_path / 'a.csv'}\n"
    )


@pytest.mark.slow
def test_class_probabilities_and_raw_outputs_agree(digits: Path, tmp_path: Path) -> None:
    raw = predicted(digits, tmp_path / "raw.csv", "outputs=raw", "split=train")
    shares = predicted(digits, tmp_path / "p.csv", "outputs=probabilities", "split=train")
    logits = numbers(raw)
    assert logits.shape[1] == 10
    assert torch.equal(numbers(shares, "probability_"), logits.softmax(1))
    assert [int(row["class"]) for row in shares] == logits.argmax(1).tolist()
    assert len(raw) == len({row["index"] for row in raw}) > 1000  # No incomplete batch is dropped.
    for word in ("weights=trained", "dtype=fp32"):
        rows = predicted(digits, tmp_path / f"{word}.csv", "outputs=raw", "split=train", word)
        assert not torch.equal(numbers(rows), logits)


@pytest.mark.slow
def test_a_folder_of_images_is_read_alike(pictures: Path, images: Path, tmp_path: Path) -> None:
    labelled = predicted(pictures, tmp_path / "a.csv", "split=test", "outputs=raw")
    rows = predicted(pictures, tmp_path / "b.csv", f"folder={images}", "outputs=raw")
    assert torch.equal(numbers(rows), numbers(labelled))
    names = sorted(str(path.relative_to(images)) for path in images.rglob("*.jpg"))
    assert [row["name"] for row in rows] == names
    assert "target" not in rows[0]
    named = predicted(pictures, tmp_path / "c.csv", f"folder={images}")
    assert {row["class_name"] for row in named} <= {path.name for path in images.iterdir()}


def test_folders_need_neither(pictures: Path, images: Path, tmp_path: Path, capsys: Shown) -> None:
    """Neither data nor dataset: the run came from somebody else, whose classes are not here."""
    snapshot = checkpoint.read(pictures)
    options = yaml.safe_load(snapshot.config)
    options["dataset"] |= {"_target_": "his_code.pictures", "root": "/nowhere"}
    options["trainer"]["monitor"] = "his"
    options["objective"] = {"_target_": "his_code.objective"}
    options["metrics"] = {"his": {"_target_": "his_code.Metric"}}
    his = checkpoint.save(tmp_path, replace(snapshot, config=yaml.safe_dump(options)))
    words = [f"folder={images}", "outputs=probabilities"]
    ours = predicted(pictures, tmp_path / "b.csv", *words)
    assert predicted(his, tmp_path / "a.csv", *words) == ours
    said = refused(capsys, f"checkpoint={his}", f"out={tmp_path / 'c.csv'}")
    assert "add dataset._target_=his_code.pictures" in said


def test_training_samples_are_not_augmented(pictures: Path, tmp_path: Path) -> None:
    assert "augment: crop_flip" in (pictures / "config.yaml").read_text()
    words = ["split=train", "outputs=raw"]
    first = predicted(pictures, tmp_path / "a.csv", *words)
    plain = predicted(pictures, tmp_path / "b.csv", *words, "dataset.augment=none")
    assert torch.equal(numbers(first), numbers(plain))


def test_nothing_is_overwritten_unless_it_is_asked_for(digits: Path, capsys: Shown) -> None:
    main([f"checkpoint={digits}", "split=val"])
    (out,) = digits.glob("predictions_val_step_*.csv")  # The default file lies in the run.
    out.write_text("old")
    line = f"out={out}: exists; choose another file, or give overwrite=true"
    for word in ("split=val", f"out={out}"):
        assert refused(capsys, f"checkpoint={digits}", word) == line
        assert out.read_text() == "old"
    assert len(predicted(digits, out, "overwrite=true")) > 100


@pytest.mark.usefixtures("here")
def test_a_mistake_is_one_line(digits: Path, images: Path, capsys: Shown) -> None:
    Path("EMPTY").mkdir()
    for words, line in {
        "split=test folder=x": "folder=x: cannot be combined with split; give only one",
        "split=tset": "split=tset: choose train, val, test; nearest: test",
        "out=a.txt": "out=a.txt: must end in .csv; for Parquet convert that file, for example with pandas",
        "overwrite=yes": "overwrite=yes: choose true, false",
        "folder=/nonexistent": "/nonexistent: cannot be listed (No such file or directory)",
        "folder=EMPTY": "EMPTY: has no .jpg or .jpeg or .png or .webp or .bmp; name a folder with images",
    }.items():
        assert refused(capsys, f"checkpoint={digits}", *words.split()) == line
    Path("EMPTY/out").symlink_to(images)
    assert "a link that leaves" in refused(capsys, f"checkpoint={digits}", "folder=EMPTY")


UNSAID = (
    "the checkpoint does not say how an image is prepared, as the Task of its dataset did not "
    "(preprocessing with size, mean and std)"
)


@pytest.mark.slow
def test_other_inputs_are_told(digits: Path, images: Path, tmp_path: Path, capsys: Shown) -> None:
    good = {"size": [8, 8], "mean": [0.0], "std": [1.0]}
    other = "the model takes something other than only images of 1 x 8 x 8"
    inputs = [{"name": "images", "shape": [None, 1, 9, 9], "dtype": "float32"}]
    snapshot = checkpoint.read(checkpoint.newest(digits))
    bad = [
        {},
        *({"preprocessing": good | wrong} for wrong in ({"std": [0.0]}, {"size": ["8"] * 2})),
    ]
    unfit = [{"preprocessing": good}, {"preprocessing": good, "inputs": inputs}]
    for number, usage in enumerate([*bad, *unfit]):
        (tmp_path / str(number)).mkdir()
        changed = replace(snapshot, state={**snapshot.state, "usage": usage})
        step = checkpoint.save(tmp_path / str(number), changed)
        why = other if usage in unfit else UNSAID
        assert refused(capsys, f"checkpoint={step}", f"folder={images}") == (
            f"folder={images}: {why}; use split, with a dataset over the folder"
        )
