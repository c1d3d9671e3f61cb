"""Text folders: classes, parts, batches, and what is refused."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from mpframe.core.errors import ConfigError, DataError
from mpframe.data import Loader
from mpframe.workloads.text.classification import text_folder

pytest.importorskip("tokenizers", reason="needs pip install mpframe[text]")

SIZES: dict[str, Any] = {"classes": 2, "vocab_size": 100, "max_tokens": 12}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty texts in each of two classes; the number of words of a text is its own number."""
    root = tmp_path_factory.mktemp("texts")
    for name in ("sport", "art"):
        (root / name).mkdir()
        for number in range(20):
            (root / name / f"{number:02}.txt").write_text(f"{name} " * number + "end")
    (root / "empty").mkdir()
    (root / "readme.txt").write_text("of no class")
    return root


def test_classes_are_the_folders_with_texts(tree: Path) -> None:
    task = text_folder(str(tree), **SIZES)
    assert task.class_names == ["art", "sport"]
    parts: Any = (task.train, task.val, task.test)
    assert [len(part) for part in parts] == [32, 4, 4]
    for part in parts:
        assert sum(sample["labels"] for sample in part) * 2 == len(part)


def test_no_text_is_in_two_parts(tree: Path) -> None:
    task = text_folder(str(tree), **{**SIZES, "max_tokens": 64})
    parts: Any = (task.train, task.val, task.test)
    found = sorted(
        (int(sample["labels"]), len(sample["input_ids"])) for part in parts for sample in part
    )
    # A word is a piece or more, and so all lengths of a class differ.
    assert len(found) == len(set(found)) == 40


def test_a_batch_is_what_bert_is_called_with(tree: Path) -> None:
    task = text_folder(str(tree), **SIZES, pad_to=16)
    loader = Loader(task.train, 8, shuffle=True, collate=task.collate)
    for batch in loader.epoch(0):
        assert set(batch) == {"input_ids", "attention_mask", "labels"}
        assert batch["input_ids"].shape == batch["attention_mask"].shape == (8, 16)
        assert (batch["attention_mask"].sum(1) <= 12).all()
        assert torch.equal(batch["input_ids"] == 0, batch["attention_mask"] == 0)


def test_the_vocabulary_knows_the_training_texts_alone(tmp_path: Path) -> None:
    for name, first in (("a", 0x4E00), ("b", 0x4F00)):  # each text has a character of its own
        (tmp_path / name).mkdir()
        for number in range(20):
            (tmp_path / name / f"{number}.txt").write_text(chr(first + number), "utf-8")
    task: Any = text_folder(str(tmp_path), **SIZES)
    unknown = task.preprocessing["vocab"].splitlines().index("[UNK]")
    for part, known in ((task.train, True), (task.val, False), (task.test, False)):
        for sample in part:
            assert (unknown not in sample["input_ids"].tolist()) == known


def test_bytes_that_are_not_utf8_are_latin1(tmp_path: Path, caplog: Any) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(5):
            (tmp_path / name / f"{number}.txt").write_bytes("costs £5".encode("latin-1"))
    (tmp_path / "a" / "0.txt").write_bytes("costs £5".encode())
    with caplog.at_level(logging.INFO):
        task: Any = text_folder(str(tmp_path), **SIZES)
    assert "9 of 10 texts are not UTF-8 and read as Latin-1" in caplog.text
    samples = {tuple(s["input_ids"].tolist()) for part in (task.train, task.val) for s in part}
    assert len(samples) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": 3}, r"dataset.classes=3: .* has 2; set dataset.classes=2"),
        ({"pad_to": 0}, r"dataset.pad_to=0: must be a whole number >= 1"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    tree: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        text_folder(str(tree), **{**SIZES, **options})


def test_trees_without_texts_are_refused(tree: Path, tmp_path: Path) -> None:
    for root, count in ((tree / "none", 0), (tree / "art", 0)):
        message = rf"dataset.root={root}: needs a folder of \*.txt .* and has {count}; set"
        with pytest.raises(DataError, match=message):
            text_folder(str(root))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "link.txt").symlink_to(tree / "readme.txt")
    with pytest.raises(DataError, match=r"link.txt: cannot be read \(A link, which is not"):
        text_folder(str(tmp_path))
