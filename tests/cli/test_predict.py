"""predict: a row for each sample, from the numbers that evaluate measures."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from in_process import train
from torch import Tensor

from mpframe import checkpoint
from mpframe.cli.commands.evaluate import evaluate
from mpframe.cli.commands.predict import main
from mpframe.data import digits as digits_task

Table = list[dict[str, str]]
SMALL = ["dtype=mixed", "trainer.max_steps=4", "trainer.log_every=100", "loss_scaling=none"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an average, made once."""
    folder = tmp_path_factory.mktemp("digits")
    train(folder, *SMALL, "model.width=4", "trainer.ema_decay=0.9", "dataset.batch_size=200")
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Path:
    """A run on a folder of images."""
    folder = tmp_path_factory.mktemp("pictures")
    data = ["dataset=image_folder", f"dataset.root={tiny_data / 'image_folder'}"]
    train(folder, *SMALL, *data, "model.width=4", "dataset.batch_size=8", "model.channels=3")
    return folder


def predicted(run: Path, out: Path, *words: str) -> Table:
    main([f"checkpoint={run}", f"out={out}", *words])
    with out.open(newline="") as file:
        return list(csv.DictReader(file))


def numbers(rows: Table, start: str) -> Tensor:
    return torch.tensor([[float(row[n]) for n in row if n.startswith(start)] for row in rows])


def test_the_accuracy_and_the_checkpoint_are_those_of_evaluate(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_class_probabilities_and_raw_outputs_agree(digits: Path, tmp_path: Path) -> None:
    raw = predicted(digits, tmp_path / "raw.csv", "outputs=raw", "split=train")
    shares = predicted(digits, tmp_path / "p.csv", "outputs=probabilities", "split=train")
    logits = numbers(raw, "output_")
    assert logits.shape[1] == 10
    assert torch.equal(numbers(shares, "probability_"), logits.softmax(1))
    assert [int(row["class"]) for row in shares] == logits.argmax(1).tolist()
    assert len(raw) == len({row["index"] for row in raw}) > 1000  # No incomplete batch is dropped.


def test_other_weights_and_formats_give_other_numbers(digits: Path, tmp_path: Path) -> None:
    first = numbers(predicted(digits, tmp_path / "a.csv", "outputs=raw"), "output")
    for number, word in enumerate(["weights=trained", "dtype=fp32"]):
        rows = predicted(digits, tmp_path / f"{number}.csv", "outputs=raw", word)
        assert not torch.equal(numbers(rows, "output"), first)


def test_a_folder_of_images_gives_what_the_dataset_gives(
    pictures: Path, tiny_data: Path, tmp_path: Path
) -> None:
    labelled = predicted(pictures, tmp_path / "a.csv", "split=test", "outputs=raw")
    folder = tiny_data / "image_folder" / "test"
    step = checkpoint.newest(pictures)
    if len(list((pictures / "checkpoints").iterdir())) > 1:  # The same one for both.
        step = pictures
    rows = predicted(step, tmp_path / "b.csv", f"folder={folder}", "outputs=raw")
    assert torch.equal(numbers(rows, "output"), numbers(labelled, "output"))
    assert [row["name"] for row in rows] == sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*.jpg")
    )
    assert "target" not in rows[0]
    named = predicted(pictures, tmp_path / "c.csv", f"folder={folder}")
    assert {row["class_name"] for row in named} <= {path.name for path in folder.iterdir()}


def test_a_folder_needs_neither_the_data_nor_the_dataset_of_the_run(
    pictures: Path, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run came from somebody else, whose data and classes are not here."""
    step = checkpoint.newest(pictures)
    snapshot = checkpoint.read(step)
    options = yaml.safe_load(snapshot.config)
    options["dataset"] |= {"_target_": "his_code.pictures", "root": "/nowhere"}
    options["trainer"]["monitor"] = "his"
    options["objective"] = {"_target_": "his_code.objective"}
    options["metrics"] = {"his": {"_target_": "his_code.Metric"}}
    his = checkpoint.save(tmp_path, replace(snapshot, config=yaml.safe_dump(options)))
    words = [f"folder={tiny_data / 'image_folder' / 'test'}", "outputs=probabilities"]
    assert predicted(his, tmp_path / "a.csv", *words) == predicted(step, tmp_path / "b.csv", *words)
    with pytest.raises(SystemExit):
        main([f"checkpoint={his}", f"out={tmp_path / 'c.csv'}"])
    assert "add dataset._target_=his_code.pictures" in capsys.readouterr().err


def test_training_samples_are_not_augmented(
    pictures: Path, tiny_data: Path, tmp_path: Path
) -> None:
    step = checkpoint.newest(pictures)
    config = (step / "config.yaml").read_text()
    assert "augment: crop_flip" in config
    first = predicted(step, tmp_path / "a.csv", "split=train", "outputs=raw")
    plain = predicted(
        step, tmp_path / "b.csv", "split=train", "outputs=raw", "dataset.augment=none"
    )
    assert torch.equal(numbers(first, "output"), numbers(plain, "output"))


def test_nothing_is_overwritten_unless_it_is_asked_for(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([f"checkpoint={digits}", "split=val"])
    (out,) = digits.glob("predictions_val_step_*.csv")  # The default file lies in the run.
    out.write_text("old")
    for words in (["split=val"], [f"out={out}"]):
        with pytest.raises(SystemExit):
            main([f"checkpoint={digits}", *words])
        assert capsys.readouterr().err == (
            f"mpframe: out={out}: exists; choose another file, or give overwrite=true\n"
        )
        assert out.read_text() == "old"
    assert len(predicted(digits, out, "overwrite=true")) > 100


def test_a_mistake_is_one_line(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("EMPTY").mkdir()
    for words, line in {
        "split=test folder=x": "folder=x: cannot be combined with split; give only one",
        "split=tset": "split=tset: choose train, val, test; nearest: test",
        "outputs=logits": "outputs=logits: choose class, probabilities, raw",
        "out=a.txt": "out=a.txt: must end in .csv or .parquet",
        "overwrite=yes": "overwrite=yes: choose true, false",
        "folder=/nonexistent": "/nonexistent: cannot be listed (No such file or directory)",
        "folder=EMPTY": "EMPTY: has no .jpg, .jpeg, .png, .webp or .bmp; name a folder with images",
    }.items():
        with pytest.raises(SystemExit):
            main([f"checkpoint={digits}", *words.split()])
        assert capsys.readouterr().err == f"mpframe: {line}\n"


def test_an_image_folders_link_may_not_leave_it(
    pictures: Path, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").symlink_to(tiny_data / "image_folder")
    with pytest.raises(SystemExit):
        main([f"checkpoint={pictures}", f"folder={tmp_path}"])
    assert "a link that leaves" in capsys.readouterr().err


def test_a_folder_is_refused_by_a_model_of_other_inputs(
    digits: Path, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"size": [8, 8], "mean": [0.0], "std": [1.0]}
    unsaid = (
        "the checkpoint does not say how an image is prepared, as the Task of its dataset did not "
        "(preprocessing with size, mean and std)"
    )
    other = "the model takes something else than images of 1 x 8 x 8 alone"
    inputs = [{"name": "images", "shape": [None, 1, 9, 9], "dtype": "float32"}]
    snapshot = checkpoint.read(checkpoint.newest(digits))
    folder = tiny_data / "image_folder" / "test"
    for number, (usage, why) in enumerate(
        [
            ({}, unsaid),
            ({"preprocessing": good | {"std": [0.0]}}, unsaid),
            ({"preprocessing": good | {"size": ["8", "8"]}}, unsaid),
            ({"preprocessing": good}, other),
            ({"preprocessing": good, "inputs": inputs}, other),
        ]
    ):
        state = {**snapshot.state, "usage": usage}
        (tmp_path / str(number)).mkdir()
        step = checkpoint.save(tmp_path / str(number), replace(snapshot, state=state))
        with pytest.raises(SystemExit):
            main([f"checkpoint={step}", f"folder={folder}"])
        assert capsys.readouterr().err == (
            f"mpframe: folder={folder}: {why}; use split, with a dataset over the folder\n"
        )
