"""Text folders, BERT's tokenizer, spans of tweets: samples, batches, and what is refused."""

import csv
import logging
import math
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT
from fixtures import Log, Patch, refused
from vocabulary import differing

from mpframe.core.errors import ConfigError, DataError
from mpframe.data import Loader
from mpframe.workloads.text import tweets
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


SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = "a naïve fox, boxes of foxes and Boxers; 3 taxis! wax, mixes, fixed vexed taxes axes exits"
TEXTS = [f"{WORDS} {WORDS[number:]} {WORDS[::-1]}" for number in range(60)]
PIECES = "\n".join([*SPECIAL, ""]).encode()
NEEDED = "needs pip install mpframe[text]"
tokenizes = pytest.mark.skipif(not find_spec("tokenizers"), reason=NEEDED)


@tokenizes
def test_the_same_texts_give_the_same_pieces_in_every_process_frequent_ones_last() -> None:
    code = (
        "from mpframe.workloads.text.classification import word_piece; "
        f"print(word_piece({TEXTS!r}, None, 200, 16).pieces)"
    )
    printed = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    assert printed.strip() == str(word_piece(TEXTS, None, 200, 16).pieces)
    pieces = word_piece(["abab ab b"] * 2, None, 100, 8).pieces
    assert pieces == [*SPECIAL, "a", "b", "##a", "##b", "ab", "##ab", "abab"]
    few, more = (len(word_piece(TEXTS, None, size, 8).pieces) for size in (100, 110))
    assert few <= 100 < more <= 110


@tokenizes
def test_a_text_as_bert_reads_it(tmp_path: Path) -> None:
    vocab = str(tmp_path / "vocab.txt")
    Path(vocab).write_bytes(PIECES + b"fox\n##es\nnaive\n!\nun\n")
    tokenizer = word_piece([], vocab, 10, 7)
    encoding = tokenizer.encode("Naïve foxes! unknown")
    assert encoding.ids == [2, 7, 5, 6, 8, 1, 3]
    assert encoding.offsets[1:4] == [(0, 5), (6, 9), (9, 11)]
    assert word_piece([], vocab, 10, 4).encode("fox fox fox").ids == [2, 5, 5, 3]
    pair = tokenizer.encode("fox", "un !")
    assert (pair.ids, pair.type_ids) == ([2, 5, 3, 9, 8, 3], [0, 0, 0, 1, 1, 1])
    told = {"vocab": Path(vocab).read_text().rstrip("\n"), "max_tokens": 7}
    assert tokenizer.described().items() >= told.items()


@tokenizes
def test_a_vocabulary_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: Patch) -> None:
    path = tmp_path / "vocab.txt"
    path.write_bytes(PIECES + b"fox\nbox")
    for texts, vocab, size, length, text in (
        ([], str(path), 6, 8, "dataset.vocab_size=6: the vocabulary has 7 pieces; set it to 7"),
        (["ab"], None, 8, 8, "dataset.vocab_size=8: the vocabulary has 9 pieces; set it to 9"),
        ([], str(path), 7, 2, "dataset.max_tokens=2: must be a whole number >= 3"),
    ):
        assert text in refused(ConfigError, word_piece, texts, vocab, size, length)
    path.write_bytes(b"[PAD]\n[UNK]\nfox\n")
    assert "not found in the vocabulary" in refused(TypeError, word_piece, [], str(path), 7, 8)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert refused(ConfigError, word_piece, TEXTS, None, 200, 16) == (
        "dataset: tokenizers is not installed; get it with pip install mpframe[text]"
    )


SIZES: dict[str, Any] = {"classes": 2, "vocab_size": 100, "max_tokens": 12}


def write(root: Path, count: int, content: Any) -> Path:
    """As many texts in each of two classes, made by a function of class and number."""
    for name in ("art", "sport"):
        (root / name).mkdir()
        for number in range(count):
            (root / name / f"{number:02}.txt").write_bytes(content(name, number))
    return root


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (root := tmp_path / "texts").mkdir()
    (root / "empty").mkdir()
    (root / "readme.txt").write_text("of no class")
    write(root, 20, lambda name, number: (f"{name} " * number + "end").encode())
    for hidden in (".ipynb_checkpoints/00.txt", "art/.00.txt"):
        (root / hidden).parent.mkdir(exist_ok=True)
        (root / hidden).write_text("an editor's copy")
    return root


@tokenizes
def test_no_text_is_in_two_parts_and_a_batch_is_what_bert_is_called_with(tree: Path) -> None:
    task: Any = text_folder(str(tree), **{**SIZES, "max_tokens": 64})
    assert task.class_names == ["art", "sport"]
    parts = (task.train, task.val, task.test)
    labels = [[int(sample["labels"]) for sample in part] for part in parts]
    assert [(len(part), sum(part)) for part in labels] == [(32, 16), (4, 2), (4, 2)]
    found = {(int(s["labels"]), len(s["input_ids"])) for part in parts for s in part}
    assert len(found) == 40  # A word is a piece or more, and so all lengths of a class differ.
    task = text_folder(str(tree), **SIZES, pad_to=16)
    batch = next(Loader(task.train, 8, shuffle=True, collate=task.collate).epoch(0))
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (8, 16)
    assert (batch["attention_mask"].sum(1) <= 12).all()
    assert torch.equal(batch["input_ids"] == 0, batch["attention_mask"] == 0)


@tokenizes
def test_the_vocabulary_knows_the_training_texts_alone(tmp_path: Path, caplog: Log) -> None:
    firsts = {"art": 0x4E00, "sport": 0x4F00}  # each text has a character of its own
    write(tmp_path, 20, lambda name, number: chr(firsts[name] + number).encode())
    task: Any = text_folder(str(tmp_path), **SIZES)
    unknown = task.preprocessing["vocab"].splitlines().index("[UNK]")
    for part, known in ((task.train, True), (task.val, False), (task.test, False)):
        for sample in part:
            assert (unknown not in sample["input_ids"].tolist()) == known
    texts = {"art": "costs £5".encode(), "sport": "costs £5".encode("latin-1")}
    for path in tmp_path.glob("*/*.txt"):
        path.write_bytes(texts[path.parent.name])
    with caplog.at_level(logging.INFO):
        task = text_folder(str(tmp_path), **SIZES)
    assert "20 of 40 texts are not UTF-8 and read as Latin-1" in caplog.text
    assert len({tuple(sample["input_ids"].tolist()) for sample in task.train}) == 1


@tokenizes
def test_trees_and_options_that_do_not_fit(tree: Path) -> None:
    for changed, text in (
        ({"classes": 3}, f"dataset.classes=3: {tree} has 2; set dataset.classes=2"),
        ({"pad_to": 0}, "dataset.pad_to=0: must be a whole number >= 1"),
    ):
        assert text in refused(ConfigError, text_folder, str(tree), **{**SIZES, **changed})
    for root in (tree / "none", tree / "art"):
        text = refused(DataError, text_folder, str(root))
        assert text.startswith(f"dataset.root={root}: needs a folder of *.txt")
    (tree / "art" / "link.txt").symlink_to(tree / "readme.txt")
    assert "A link, which is not followed" in refused(OSError, text_folder, str(tree))


HEAD = ["textID", "text", "selected_text", "sentiment"]


def table(path: Path, *rows: tuple[str, str, str], head: list[str] = HEAD) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        writer.writerows([f"id{n}", *row] for n, row in enumerate(rows))
    return path


def test_rows_of_a_table_are_read_or_refused(tmp_path: Path) -> None:
    first, last = ('so "good", today', '"good"', "positive"), (*["two\nlines"] * 2, "neutral")
    tweets = read_tweets(table(tmp_path / "train.csv", first, ("", "", "neutral"), last))
    assert [tuple(tweet) for tweet in tweets] == [first, last]
    for row, head, text in (
        (
            ("a b", "c", "neutral"),
            HEAD,
            "row 2: must have a sentiment, and a selected_text that is",
        ),
        (("a b", "b", ""), HEAD, "row 2: must have a sentiment"),
        (("", "", ""), HEAD[:2], "has no column selected_text; give"),
    ):
        path = table(tmp_path / "train.csv", ("good day", "good", "positive"), row, head=head)
        assert text in refused(DataError, read_tweets, path)


@pytest.fixture(scope="module")
def task() -> Any:
    pytest.importorskip("tokenizers", reason=NEEDED)
    return tweet_spans(vocab_size=512)


def test_the_tokens_of_the_answer_share_a_character_with_it_behind_the_question(task: Any) -> None:
    offsets = torch.tensor([[-1, -1], [0, 2], [2, 4], [4, 6], [6, 8]])
    for begin, end, tokens in ((2, 6, (2, 3)), (3, 5, (2, 3)), (2, 4, (2, 2)), (8, 9, (1, 4))):
        assert tweets._tokens_between(offsets, begin, end) == tokens
    pieces = task.preprocessing["vocab"].splitlines()
    for sample in map(task.train.__getitem__, range(20)):
        arguments, offsets = sample["arguments"], sample["offsets"]
        first, last = arguments["start_positions"], arguments["end_positions"]
        answer = sample["text"][int(offsets[first, 0]) : int(offsets[last, 1])]
        assert answer == sample["selected"]
        words = [pieces[piece] for piece in arguments["input_ids"].tolist()]
        question = words.index("[SEP]")
        assert words[0] == "[CLS]"
        assert words[question - 1] in ("positive", "negative", "neutral")
        of_text = arguments["token_type_ids"] == 1
        assert of_text.nonzero()[0] == question + 1
        of_text[-1] = False  # the last [SEP]
        assert torch.equal(offsets[:, 0] >= 0, of_text)
    loader = Loader(task.train, 16, shuffle=True, collate=task.collate)
    arguments, targets = next(loader.epoch(0))
    shapes = {name: own.shape for name, own in arguments.items()}
    assert shapes.pop("start_positions") == shapes.pop("end_positions") == (16,)
    assert {*shapes.values()} == {targets["offsets"].shape[:2]}
    assert (targets["offsets"][arguments["attention_mask"] == 0] == -1).all()
    assert [len(part) for part in (task.train, task.val, task.test)] == [2400, 300, 300]


def test_answers_of_odd_signs(task: Any, tmp_path: Path) -> None:
    rows = [("hm \u0007 yes", "\u0007", "neutral"), ("nice!!", "ice!", "positive")] * 5
    own = tweet_spans(str(table(tmp_path / "train.csv", *rows)), vocab_size=60)
    answers = set()
    for sample in own.train:
        first, last = (int(sample["arguments"][f"{end}_positions"]) for end in ("start", "end"))
        begin, end = sample["offsets"][first, 0], sample["offsets"][last, 1]
        answers.add((sample["text"], int(begin), int(end)))
    # A sign that the tokenizer drops is no token, and all of the text takes its place; a part of a
    # word is its whole tokens.
    assert answers == {("hm \u0007 yes", 0, 8), ("nice!!", 0, 5)}
    text = refused(ConfigError, tweet_spans, vocab_size=512, max_tokens=10)
    assert text.startswith("dataset.max_tokens=10: a text has more tokens ('")
    rows = [("fine", "fine", "neutral"), ("\u0007", "\u0007", "bad")] * 5
    empty = str(table(tmp_path / "train.csv", *rows))
    assert "'\\x07' has no token; rem" in refused(DataError, tweet_spans, empty, vocab_size=60)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_best_span_begins_before_it_ends(dtype: torch.dtype) -> None:
    # Apart the best are start 2 and end 1; of the pairs s <= e, 1 to 1 has 3 + 5, 2 to 3 has 4 + 2.
    start = torch.tensor([[9.0, 3.0, 4.0, 0.0], [0.0, 1.0, 0.0, 0.0]], dtype=dtype)
    end = torch.tensor([[9.0, 5.0, 0.0, 2.0], [0.0, 0.0, 0.0, 1.0]], dtype=dtype)
    allowed = torch.tensor([[False, True, True, True], [True, True, True, False]])
    # In row 2 token 3 is not the text's; 1 to 1 and 1 to 2 are equal, and the first one counts.
    assert best_spans(start, end, allowed).tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_words_in_common_by_hand_and_their_mean_over_uneven_batches(dtype: torch.dtype) -> None:
    metric = WordJaccard()
    assert math.isnan(metric.compute().item())
    offsets = torch.tensor([[[-1, -1], [0, 1], [2, 6], [7, 10]]]).expand(3, 4, 2)
    start, end = torch.zeros(3, 4, dtype=dtype), torch.zeros(3, 4, dtype=dtype)
    start[:, 1], end[0, 1], end[1, 2], end[2, 3] = 2.0, 2.0, 2.0, 2.0  # a | a good | a good day
    texts = ["a good day"] * 3
    for rows in (slice(0, 1), slice(1, 3)):
        targets = {"offsets": offsets[rows], "text": texts[rows], "selected": texts[rows]}
        metric.update({"start_logits": start[rows], "end_logits": end[rows]}, targets)
    # The sum of 1/3, 2/3 and 1 in float64.
    assert metric.compute().item() == pytest.approx(2 / 3, rel=1e-15)
    assert metric.compute().dtype == torch.float64
    assert jaccard("Good  DAY", "good day") == jaccard("", " ") == 1.0
    assert (jaccard("no no no", "no way"), jaccard("", "two")) == (1 / 2, 0.0)
