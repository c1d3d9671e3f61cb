"""Spans of tweets: the table, the tokens of an answer, the batch, and the made texts."""

import csv
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from mpframe.core.errors import ConfigError, DataError
from mpframe.data import Loader
from mpframe.workloads.text.tweets import make_tweets, read_tweets, tweet_spans

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


def test_tables_that_are_wrong_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    fine = ("good day", "good", "positive")
    cases: list[tuple[list[tuple[str, str, str]], str]] = [
        ([fine, ("a b", "c", "neutral")], "row 2: its selected_text is missing or not in its text"),
        ([("a b", " ", "neutral")], "row 1: its selected_text is missing"),
        ([("a b", "b", "")], "row 1: its sentiment is missing"),
        ([(" ", "", "neutral")], "has no row with a text"),
    ]
    for rows, message in cases:
        with pytest.raises(DataError, match=rf"^{path}.*{message}"):
            read_tweets(table(path, *rows))
    with pytest.raises(DataError, match=r"has no column sentiment; needed are textID, text, sel"):
        read_tweets(table(path, head=HEAD[:3]))
    with pytest.raises(DataError, match=r"^dataset.root=.*none: cannot be read \(No such file"):
        read_tweets(tmp_path / "none")


def test_made_texts_are_always_the_same() -> None:
    tweets = make_tweets(60)
    assert tweets == make_tweets(60) == make_tweets()[:60]
    for tweet in tweets:
        assert tweet.text.count(tweet.selected) == 1
        assert (tweet.selected == tweet.text) == (tweet.sentiment == "neutral")
    counts = {of: sum(t.sentiment == of for t in tweets) for of in ("positive", "negative")}
    assert counts == {"positive": 20, "negative": 20}
    # The answer is in the first clause as often as in the second: its place alone tells nothing.
    asked = [t for t in make_tweets() if t.sentiment != "neutral"]
    first = sum(t.selected in t.text.partition(" and ")[0] for t in asked) / len(asked)
    assert first == pytest.approx(0.5, abs=0.05)


# Samples and batches


@pytest.fixture(scope="module")
def task() -> Any:
    pytest.importorskip("tokenizers", reason="needs pip install mpframe[text]")
    return tweet_spans(vocab_size=512)


def test_the_tokens_of_the_answer_are_its_text(task: Any) -> None:
    for number in range(20):
        sample = task.train[number]
        arguments, offsets = sample["arguments"], sample["offsets"]
        first, last = arguments["start_positions"], arguments["end_positions"]
        begin, end = int(offsets[first, 0]), int(offsets[last, 1])
        assert sample["text"][begin:end] == sample["selected"]


def test_the_question_comes_before_the_text(task: Any) -> None:
    pieces = task.preprocessing["vocab"].splitlines()
    for number in range(6):
        sample = task.train[number]
        types, offsets = sample["arguments"]["token_type_ids"], sample["offsets"]
        words = [pieces[piece] for piece in sample["arguments"]["input_ids"].tolist()]
        assert words[0] == "[CLS]"
        assert words[words.index("[SEP]") - 1] in ("positive", "negative", "neutral")
        assert (types == 1).nonzero()[0] == words.index("[SEP]") + 1
        of_text = types == 1
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


def test_a_split_of_every_sentiment(task: Any) -> None:
    assert [len(part) for part in (task.train, task.val, task.test)] == [2400, 300, 300]


def test_answers_of_odd_signs(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs pip install mpframe[text]")
    rows = [("hm \u0007 yes", "\u0007", "neutral"), ("nice!!", "ice!", "positive")] * 5
    path = table(tmp_path / "train.csv", *rows)
    task: Any = tweet_spans(str(path), vocab_size=60)
    answers = {
        (sample["text"], tuple(sample["offsets"][[
            sample["arguments"]["start_positions"], sample["arguments"]["end_positions"]
        ]][[0, 1], [0, 1]].tolist()))
        for sample in task.train
    }  # fmt: skip
    # A sign that the tokenizer drops is no token, and all of the text takes its place; a part of a
    # word is its whole tokens.
    assert answers == {("hm \u0007 yes", (0, 8)), ("nice!!", (0, 5))}


def test_texts_that_are_too_long_or_empty_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs pip install mpframe[text]")
    with pytest.raises(ConfigError, match=r"^dataset.max_tokens=10: a text has more tokens \('"):
        tweet_spans(vocab_size=512, max_tokens=10)
    rows = [("fine", "fine", "neutral"), ("\u0007", "\u0007", "neutral")] * 5
    with pytest.raises(DataError, match=r"^dataset: '\\x07' has no token; remove the row"):
        tweet_spans(str(table(tmp_path / "train.csv", *rows)), vocab_size=60)
