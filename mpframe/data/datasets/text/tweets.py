"""The tweet task's table: textID, text, selected_text and sentiment; and made ones in its form.

The competition's file (Tweet Sentiment Extraction) is a user's own download. `made_tweets` are no
tweets: two short clauses, one of them with a word of feeling, which is the answer. They show that
the parts fit together, and what a model without knowledge of language can learn.
"""

import csv
import io
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mpframe.data.keyed_random import keyed_uniform
from mpframe.errors import DataError
from mpframe.files import read_regular

log = logging.getLogger(__name__)

_MOST_BYTES = 2**28
_COLUMNS = ("textID", "text", "selected_text", "sentiment")

_SUBJECTS = ("the coffee", "my phone", "this song", "our team", "the weather", "her cake", "work")
_WORDS = {
    "positive": ("lovely", "great", "so good", "the best", "really fun", "amazing", "perfect"),
    "negative": ("awful", "so bad", "broken", "the worst", "really sad", "boring", "too late"),
    "neutral": ("here", "next", "as usual", "the same", "still on", "new", "on my list"),
}
_TIMES = ("today", "this morning", "again", "right now", "at last", "on monday", "tonight")


class Tweet(NamedTuple):
    """A text, the part of it that was selected, and its sentiment."""

    text: str
    selected: str
    sentiment: str


def read_tweets(path: Path) -> list[Tweet]:
    """The rows of a table. Rows without a text, of which the published file has one, are left out.

    Raises:
        DataError: the file cannot be read, lacks a column, or the selected part of a row is not in
            its text.
    """
    try:
        content = read_regular(path, _MOST_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"dataset.root={path}: cannot be read ({getattr(error, 'strerror', 'not UTF-8')}); "
            "give the tweet task's train.csv, or null for made texts"
        ) from None
    rows = csv.DictReader(io.StringIO(content, newline=""))
    missing = next((name for name in _COLUMNS if name not in (rows.fieldnames or ())), None)
    if missing:
        raise DataError(f"{path}: has no column {missing}; needed are {', '.join(_COLUMNS)}")
    listed = list(rows)
    tweets = [
        _checked(path, number, row) for number, row in enumerate(listed, 1) if row["text"].strip()
    ]
    if not tweets:
        raise DataError(f"{path}: has no row with a text; give the tweet task's train.csv")
    if len(tweets) < len(listed):
        left = len(listed) - len(tweets)
        log.info("%s: %d of %d rows have no text and are left out", path, left, len(listed))
    return tweets


def _checked(path: Path, number: int, row: Mapping[str, str | None]) -> Tweet:
    text, selected, sentiment = (row[name] or "" for name in _COLUMNS[1:])
    if not selected.strip() or selected not in text or not sentiment:
        what = "its sentiment" if selected.strip() and selected in text else "its selected_text"
        raise DataError(
            f"{path}, row {number}: {what} is missing or not in its text; mend or remove the row"
        )
    return Tweet(text, selected, sentiment)


def made_tweets(count: int = 3000) -> list[Tweet]:
    """Made texts, always the same ones; of a neutral one all of the text is selected."""
    drawn = keyed_uniform(7, 14, range(count))
    return [_made(list(row), number) for number, row in enumerate(drawn)]


def _made(drawn: list[float], number: int) -> Tweet:
    def one_of(words: tuple[str, ...]) -> str:
        return words[int(drawn.pop() * len(words))]

    sentiment = ("positive", "negative", "neutral")[number % 3]
    words = [one_of(_WORDS[sentiment]), one_of(_WORDS["neutral"])]
    clauses = [f"{one_of(_SUBJECTS)} is {word} {one_of(_TIMES)}" for word in words]
    text = " and ".join(clauses if drawn.pop() < 0.5 else clauses[::-1])
    return Tweet(text, text if sentiment == "neutral" else words[0], sentiment)
