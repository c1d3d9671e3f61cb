"""Predictions as columns, and tables that appear whole and read back as the same numbers."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import refused

from mpframe.cli.commands.predict import _table
from mpframe.core.errors import ConfigError
from mpframe.data.prediction import Predictions

LOGITS = torch.tensor([[0.1, 2.0, -1.0], [3.0, 0.0, 3.0]])
PAIR = {"a": LOGITS, "b": LOGITS}


def columns(given: Any, targets: Any = None, **options: Any) -> dict[str, Any]:
    written: list[dict[str, Any]] = []
    Predictions(written.append, **options).update(given, targets)
    return written[0]


def test_what_fits_is_chosen_and_raw_outputs_are_a_flattened_tree() -> None:
    made = columns(LOGITS, torch.tensor([1, 2]), class_names=["a", "b", "c"])
    assert list(made) == ["index", "target", "class", "class_name"]
    # Of equal ones the first, as the accuracy counts.
    assert (made["class"].tolist(), made["class_name"]) == ([1, 0], ["b", "a"])
    assert made["target"].tolist() == [1, 2]
    made = columns(LOGITS, outputs="probabilities")
    shares = torch.stack([torch.from_numpy(made[f"probability_{n}"]) for n in range(3)], 1)
    assert torch.equal(shares, LOGITS.softmax(1))
    for outputs, targets, names in (
        (torch.zeros(2), None, "output"),
        (torch.zeros(2, 2), None, "output_0 output_1"),
        ({"a": LOGITS, "b": (torch.zeros(2, 1, 2),)}, None, "a_0 a_1 a_2 b[0]_0_0 b[0]_0_1"),
        (LOGITS, torch.tensor([1, 2]), "target class"),
        (LOGITS, torch.zeros(2, 3), "output_0 output_1 output_2"),
        (torch.zeros(2, 1), torch.tensor([1, 0]), "target output"),
        (PAIR, torch.tensor([1, 0]), "target a_0 a_1 a_2 b_0 b_1 b_2"),
    ):
        made = columns(outputs, targets, outputs="raw" if targets is None else None)
        assert list(made) == ["index", *names.split()]
        assert all(len(column) == 2 for column in made.values())


def test_samples_are_numbered_over_batches_of_one_width_or_named() -> None:
    written: list[dict[str, Any]] = []
    predictions = Predictions(written.append, outputs="raw")
    for logits in (LOGITS, LOGITS[:1]):
        predictions.update(logits, None)
    assert [own["index"].tolist() for own in written] == [[0, 1], [2]]
    # Other columns would stand under the names of the first batch's.
    text = refused(ConfigError, predictions.update, torch.zeros(2, 4), None)
    assert "a batch has 5 columns and the one before it 4" in text
    assert columns(LOGITS, samples=["x.png", "y.png"])["name"] == ["x.png", "y.png"]


SEVERAL = "needs one number for each of several classes, and the model gives"
FOUND = [{"boxes": torch.zeros(5, 4), "scores": torch.zeros(5)} for _ in range(2)]


@pytest.mark.parametrize(("outputs", "kind", "line"), [
    (torch.zeros(2), "class", f"outputs=class: {SEVERAL} a tensor (2,); use outputs=raw"),
    (PAIR, "probabilities", f"{SEVERAL} a (2, 3), b (2, 3); use outputs=raw"),
    (torch.zeros(()), "raw", "outputs: the model gives a tensor (), which is not a row for each"),
    (FOUND, None, "which is not a row for each"),  # Two images with five boxes each.
])  # fmt: skip
def test_other_outputs_are_refused(outputs: Any, kind: str, line: str) -> None:
    assert line in refused(ConfigError, columns, outputs, outputs=kind)


NUMBERS = np.array([0.1, 1e-40, 16777217.0, -0.0, np.inf, np.nan], dtype=np.float32)


def test_csv_reads_back_as_the_same_numbers_and_one_that_fails_leaves_it(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    names = ["plain", 'a "quoted", one', "two\nlines", "é", "", "="]
    with _table(path) as write:
        write({"name": names, "value": NUMBERS, "wide": NUMBERS.astype(np.float64)})
        write({"name": ["last"], "value": NUMBERS[:1], "wide": np.array([1 / 3])})
    with path.open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert header == ["name", "value", "wide"]
    assert [row[0] for row in rows] == [*names, "last"]
    read = np.array([row[1] for row in rows], dtype=np.float32)
    assert read.tobytes() == np.append(NUMBERS, NUMBERS[:1]).tobytes()
    assert float(rows[-1][2]) == 1 / 3
    whole = path.read_bytes()
    with pytest.raises(ValueError, match="in the middle"), _table(path) as write:  # noqa: PT012
        write({"value": NUMBERS})
        raise ValueError("in the middle")
    assert [own.name for own in tmp_path.iterdir()] == ["a.csv"]
    assert path.read_bytes() == whole
