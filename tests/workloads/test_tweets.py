"""Spans of tweets: the table, the tokens of an answer, the batch, and the words in common."""

import csv
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from refusal import refused

from mpframe.core.errors import ConfigError, DataError
from mpframe.data import Loader
from mpframe.workloads.text.tweets import WordJaccard, best_spans, jaccard, read_tweets, tweet_spans

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
