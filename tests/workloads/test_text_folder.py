"""Text folders and BERT's tokenizer: vocabulary, classes, parts, batches, and what is refused."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT
from refusal import refused
from vocabulary import differing

from mpframe.core.errors import ConfigError, DataError
from mpframe.data import Loader
from mpframe.workloads.text.classification import pad_batch, text_folder, word_piece


def test_the_longest_sample_decides() -> None:
    rows = [torch.tensor([2, 7, 3], dtype=torch.int32), torch.tensor([2, 3], dtype=torch.int32)]
    samples = [{"input_ids": row, "labels": torch.tensor(1)} for row in rows]
    assert not differing(pad_batch(samples), {
        "input_ids": torch.tensor([[2, 7, 3], [2, 3, 0]]),
        "labels": torch.tensor([1, 1]),
        "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
    })  # fmt: skip
    for multiple, length in ((2, 4), (3, 3), (8, 8)):
        batch = pad_batch(samples, multiple)
        assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, length)
        assert batch["attention_mask"].sum(1).tolist() == [3, 2]
        assert not batch["input_ids"][:, 3:].any()


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert refused(ConfigError, word_piece, TEXTS, None, 200, 16) == (
        "dataset: tokenizers is not installed; get it with pip install mpframe[text]"
    )


WORDS = "a naïve fox, boxes of foxes and Boxers; 3 taxis! wax, mixes, fixed vexed taxes axes exits"
TEXTS = [f"{WORDS} {WORDS[number:]} {WORDS[::-1]}" for number in range(60)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.fixture
def needs_tokenizers() -> None:
    pytest.importorskip("tokenizers", reason="needs pip install mpframe[text]")


tokenizes = pytest.mark.usefixtures("needs_tokenizers")


def vocabulary(path: Path, *pieces: str) -> str:
    path.write_text("\n".join([*SPECIAL, *pieces]) + "\n")
    return str(path)


@tokenizes
def test_the_same_texts_give_the_same_pieces_in_every_process() -> None:
    code = (
        "from test_text_folder import TEXTS; "
        "from mpframe.workloads.text.classification import word_piece; "
        "print(word_piece(TEXTS, None, 200, 16).pieces)"
    )
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests/helpers"), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == str(word_piece(TEXTS, None, 200, 16).pieces)


@tokenizes
def test_characters_come_first_and_frequent_pieces_after() -> None:
    pieces = word_piece(["abab ab b"] * 2, None, 100, 8).pieces
    assert pieces == [*SPECIAL, "a", "b", "##a", "##b", "ab", "##ab", "abab"]
    few, more = (len(word_piece(TEXTS, None, size, 8).pieces) for size in (100, 110))
    assert few <= 100 < more <= 110


@tokenizes
def test_a_text_as_bert_reads_it(tmp_path: Path) -> None:
    vocab = vocabulary(tmp_path / "vocab.txt", "fox", "##es", "naive", "!", "un")
    tokenizer = word_piece([], vocab, 10, 7)
    encoding = tokenizer.encode("Naïve foxes! unknown")
    assert encoding.ids == [2, 7, 5, 6, 8, 1, 3]
    assert encoding.offsets[1:4] == [(0, 5), (6, 9), (9, 11)]
    assert word_piece([], vocab, 10, 4).encode("fox fox fox").ids == [2, 5, 5, 3]
    pair = tokenizer.encode("fox", "un !")
    assert (pair.ids, pair.type_ids) == ([2, 5, 3, 9, 8, 3], [0, 0, 0, 1, 1, 1])
    described = tokenizer.described()
    assert described["vocab"] == Path(vocab).read_text().rstrip("\n")
    assert described["max_tokens"] == 7


@tokenizes
@pytest.mark.parametrize(
    ("content", "size", "length", "text"),
    [
        ("fox box", 6, 8, "dataset.vocab_size=6: FILE has 7 pieces; set it to 7"),
        (None, 8, 8, "dataset.vocab_size=8: the texts have 2 different"),
        (None, 80, 2, "dataset.max_tokens=2: must be a whole number >= 3"),
        ("a a", 7, 8, "FILE: has a piece twice; give BERT's vocab.txt, or null to train one"),
        (b"[PAD]\n[UNK]\nfox\n", 7, 8, "FILE: has no [CLS]; give BERT's"),
        (b"\xff\xfe", 7, 8, "FILE: cannot be read (not UTF-8); give a vocabulary with one piece a"),
        ("", 7, 8, "FILE: cannot be read (No such file or directory)"),
    ],
)
def test_what_is_no_vocabulary_is_refused(
    tmp_path: Path, content: Any, size: int, length: int, text: str
) -> None:
    path = tmp_path / "vocab.txt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        vocabulary(path, *content.split())
    error = DataError if text.startswith("FILE") else ConfigError
    text = text.replace("FILE:", f"dataset.vocab={path}:").replace("FILE", f"{path}")
    given = ["ab"], None if content is None else str(path), size, length
    assert text in refused(error, word_piece, *given)


SIZES: dict[str, Any] = {"classes": 2, "vocab_size": 100, "max_tokens": 12}


def write(root: Path, count: int, content: Any) -> Path:
    """As many texts in each of two classes, made by a function of class and number."""
    for name in ("art", "sport"):
        (root / name).mkdir()
        for number in range(count):
            (root / name / f"{number:02}.txt").write_bytes(content(name, number))
    return root


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The number of words of a text is its own number."""
    root = tmp_path_factory.mktemp("texts")
    (root / "empty").mkdir()
    (root / "readme.txt").write_text("of no class")
    return write(root, 20, lambda name, number: (f"{name} " * number + "end").encode())


@tokenizes
def test_no_text_is_in_two_parts_and_a_batch_is_what_bert_is_called_with(tree: Path) -> None:
    task: Any = text_folder(str(tree), **{**SIZES, "max_tokens": 64})
    assert task.class_names == ["art", "sport"]
    parts = (task.train, task.val, task.test)
    assert [len(part) for part in parts] == [32, 4, 4]
    assert all(sum(sample["labels"] for sample in part) * 2 == len(part) for part in parts)
    found = {(int(s["labels"]), len(s["input_ids"])) for part in parts for s in part}
    assert len(found) == 40  # A word is a piece or more, and so all lengths of a class differ.
    task = text_folder(str(tree), **SIZES, pad_to=16)
    batch = next(Loader(task.train, 8, shuffle=True, collate=task.collate).epoch(0))
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (8, 16)
    assert (batch["attention_mask"].sum(1) <= 12).all()
    assert torch.equal(batch["input_ids"] == 0, batch["attention_mask"] == 0)


@tokenizes
def test_the_vocabulary_knows_the_training_texts_alone(tmp_path: Path) -> None:
    firsts = {"art": 0x4E00, "sport": 0x4F00}  # each text has a character of its own
    write(tmp_path, 20, lambda name, number: chr(firsts[name] + number).encode())
    task: Any = text_folder(str(tmp_path), **SIZES)
    unknown = task.preprocessing["vocab"].splitlines().index("[UNK]")
    for part, known in ((task.train, True), (task.val, False), (task.test, False)):
        for sample in part:
            assert (unknown not in sample["input_ids"].tolist()) == known


@tokenizes
def test_bytes_that_are_not_utf8_are_latin1(tmp_path: Path, caplog: Any) -> None:
    write(tmp_path, 5, lambda name, number: "costs £5".encode("latin-1"))
    (tmp_path / "art" / "00.txt").write_bytes("costs £5".encode())
    with caplog.at_level(logging.INFO):
        task: Any = text_folder(str(tmp_path), **SIZES)
    assert "9 of 10 texts are not UTF-8 and read as Latin-1" in caplog.text
    samples = {tuple(s["input_ids"].tolist()) for part in (task.train, task.val) for s in part}
    assert len(samples) == 1


@tokenizes
def test_trees_and_options_that_do_not_fit(tree: Path, tmp_path: Path) -> None:
    text = refused(ConfigError, text_folder, str(tree), **{**SIZES, "classes": 3})
    assert text.startswith("dataset.classes=3: ")
    assert "has 2; set dataset.classes=2" in text
    text = refused(ConfigError, text_folder, str(tree), **SIZES, pad_to=0)
    assert text.startswith("dataset.pad_to=0: must be a whole number >= 1")
    for root in (tree / "none", tree / "art"):
        text = refused(DataError, text_folder, str(root))
        assert text.startswith(f"dataset.root={root}: needs a folder of *.txt")
    write(tmp_path, 0, None)
    for name in ("art", "sport"):
        (tmp_path / name / "link.txt").symlink_to(tree / "readme.txt")
    text = refused(DataError, text_folder, str(tmp_path))
    assert "link.txt: cannot be read (A link, which is not" in text
