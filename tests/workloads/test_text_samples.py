"""Text folders, BERT's tokenizer, spans of tweets: samples, batches, and what is refused."""

import csv
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT
from fixtures import refused
from vocabulary import differing

from mpframe.core.errors import ConfigError, DataError
from mpframe.data import Loader
from mpframe.workloads.text.classification import pad_batch, text_folder, word_piece
from mpframe.workloads.text.tweets import WordJaccard, best_spans, jaccard, read_tweets, tweet_spans


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
        "from test_text_samples import TEXTS; "
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


HEAD = ["textID", "text", "selected_text", "sentiment"]


def table(path: Path, *rows: tuple[str, str, str], head: list[str] = HEAD) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        writer.writerows([f"id{n}", *row] for n, row in enumerate(rows))
    return path


def test_rows_of_a_table(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        ('so "good", today', '"good"', "positive"),
        ("", "", "neutral"),
        ("two\nlines", "two\nlines", "neutral"),
    ]
    with caplog.at_level(logging.INFO):
        tweets = read_tweets(table(tmp_path / "train.csv", *rows))
    assert [tuple(tweet) for tweet in tweets] == [rows[0], rows[2]]
    assert "1 of 3 rows have no text and are left out" in caplog.text


@pytest.mark.parametrize(
    ("row", "head", "text"),
    [
        (("a b", "c", "neutral"), HEAD, "row 2: its selected_text is missing or not in its text"),
        (("a b", " ", "neutral"), HEAD, "row 2: its selected_text is missing"),
        (("a b", "b", ""), HEAD, "row 2: its sentiment is missing"),
        (
            ("", "", ""),
            ["textID", "text"],
            "has no column selected_text; needed are textID, text, ",
        ),
    ],
)
def test_tables_that_are_wrong_are_refused(tmp_path: Path, row: Any, head: Any, text: str) -> None:
    path = table(tmp_path / "train.csv", ("good day", "good", "positive"), row, head=head)
    assert text in refused(DataError, read_tweets, path)
    empty = table(tmp_path / "empty.csv", (" ", "", "neutral"))
    assert "has no row with a text" in refused(DataError, read_tweets, empty)
    none = refused(DataError, read_tweets, tmp_path / "none")
    assert none.startswith(f"dataset.root={tmp_path}/none: cannot be read (No such file")


@pytest.fixture(scope="module")
def task() -> Any:
    pytest.importorskip("tokenizers", reason="needs pip install mpframe[text]")
    return tweet_spans(vocab_size=512)


def test_the_tokens_of_the_answer_are_its_text_and_the_question_comes_before(task: Any) -> None:
    pieces = task.preprocessing["vocab"].splitlines()
    for number in range(20):
        sample = task.train[number]
        arguments, offsets = sample["arguments"], sample["offsets"]
        first, last = arguments["start_positions"], arguments["end_positions"]
        begin, end = int(offsets[first, 0]), int(offsets[last, 1])
        assert sample["text"][begin:end] == sample["selected"]
        words = [pieces[piece] for piece in arguments["input_ids"].tolist()]
        question = words.index("[SEP]")
        assert words[0] == "[CLS]"
        assert words[question - 1] in ("positive", "negative", "neutral")
        of_text = arguments["token_type_ids"] == 1
        assert of_text.nonzero()[0] == question + 1
        of_text[-1] = False  # the last [SEP]
        assert torch.equal(offsets[:, 0] >= 0, of_text)


def test_a_batch_is_arguments_and_what_the_metric_needs(task: Any) -> None:
    loader = Loader(task.train, 16, shuffle=True, collate=task.collate)
    arguments, targets = next(loader.epoch(0))
    shape = arguments["input_ids"].shape
    assert shape[1] % 8 == 0
    assert arguments["token_type_ids"].shape == arguments["attention_mask"].shape == shape
    assert arguments["start_positions"].shape == arguments["end_positions"].shape == (16,)
    assert targets["offsets"].shape == (*shape, 2)
    assert (targets["offsets"][arguments["attention_mask"] == 0] == -1).all()
    assert len(targets["text"]) == len(targets["selected"]) == 16
    assert [len(part) for part in (task.train, task.val, task.test)] == [2400, 300, 300]


def test_answers_of_odd_signs(task: Any, tmp_path: Path) -> None:
    rows = [("hm \u0007 yes", "\u0007", "neutral"), ("nice!!", "ice!", "positive")] * 5
    own = tweet_spans(str(table(tmp_path / "train.csv", *rows)), vocab_size=60)
    answers = set()
    for sample in own.train:
        first, last = (sample["arguments"][f"{end}_positions"] for end in ("start", "end"))
        offsets = sample["offsets"]
        answers.add((sample["text"], int(offsets[first, 0]), int(offsets[last, 1])))
    # A sign that the tokenizer drops is no token, and all of the text takes its place; a part of a
    # word is its whole tokens.
    assert answers == {("hm \u0007 yes", 0, 8), ("nice!!", 0, 5)}
    text = refused(ConfigError, tweet_spans, vocab_size=512, max_tokens=10)
    assert text.startswith("dataset.max_tokens=10: a text has more tokens ('")
    empty = table(
        tmp_path / "train.csv", *[("fine", "fine", "neutral"), ("\u0007",) * 2 + ("bad",)] * 5
    )
    text = refused(DataError, tweet_spans, str(empty), vocab_size=60)
    assert text.startswith("dataset: '\\x07' has no token; remove the row")


@pytest.mark.parametrize(
    ("found", "true", "value"),
    [
        ("Good  DAY", "good day", 1.0),
        ("a good day", "good", 1 / 3),
        ("no no no", "no way", 1 / 2),
        ("", "two", 0.0),
        ("", " ", 1.0),
    ],
)
def test_jaccard(found: str, true: str, value: float) -> None:
    assert jaccard(found, true) == value


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_best_span_begins_before_it_ends(dtype: torch.dtype) -> None:
    # Apart the best are start 2 and end 1; of the pairs s <= e, 1 to 1 has 3 + 5, 2 to 3 has 4 + 2.
    start = torch.tensor([[9.0, 3.0, 4.0, 0.0], [0.0, 1.0, 0.0, 0.0]], dtype=dtype)
    end = torch.tensor([[9.0, 5.0, 0.0, 2.0], [0.0, 0.0, 0.0, 1.0]], dtype=dtype)
    allowed = torch.tensor([[False, True, True, True], [True, True, True, False]])
    # In row 2 token 3 is not the text's; 1 to 1 and 1 to 2 are equal, and the first one counts.
    assert best_spans(start, end, allowed).tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_mean_over_uneven_batches(dtype: torch.dtype) -> None:
    metric = WordJaccard()
    assert math.isnan(metric.compute().item())
    offsets = torch.tensor([[[-1, -1], [0, 1], [2, 6], [7, 10]]]).expand(3, 4, 2)
    start, end = torch.zeros(3, 4, dtype=dtype), torch.zeros(3, 4, dtype=dtype)
    start[:, 1], end[0, 1], end[1, 2], end[2, 3] = 2.0, 2.0, 2.0, 2.0  # a | a good | a good day
    texts = ["a good day"] * 3
    for rows in (slice(0, 1), slice(1, 3)):
        metric.update(
            {"start_logits": start[rows], "end_logits": end[rows]},
            {"offsets": offsets[rows], "text": texts[rows], "selected": texts[rows]},
        )
    # The sum of 1/3, 2/3 and 1 in float64.
    assert metric.compute().item() == pytest.approx(2 / 3, rel=1e-15)
    assert metric.compute().dtype == torch.float64
