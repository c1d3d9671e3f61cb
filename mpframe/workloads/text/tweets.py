"""Span extraction: find the part of a text that carries its sentiment.

The rows are the tweet task's table (textID, text, selected_text and sentiment), or made ones in its
form. The metric is the share of words that the found part and the right one have in common.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpframe.core.errors import ConfigError, DataError
from mpframe.core.tree import widest
from mpframe.data.samples import draw_uniforms, hold_out
from mpframe.data.task import Task, require_counts
from mpframe.files.plain_file import read_regular
from mpframe.training.objectives import model_loss
from mpframe.workloads.text.classification import WordPiece, pad_batch, word_piece

_MOST_BYTES = 2**28
_COLUMNS = ("text", "selected_text", "sentiment")

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
    """Read the rows of a table, except those without a text (the published file has one)."""
    content = read_regular(path, _MOST_BYTES).decode("utf-8")
    rows = csv.DictReader(io.StringIO(content, newline=""))
    if missing := set(_COLUMNS) - set(rows.fieldnames or ()):
        raise DataError(f"{path}: has no column {min(missing)}; give the tweet task's train.csv")
    tweets = []
    for number, row in enumerate(rows, 1):
        tweet = Tweet(*(row[name] or "" for name in _COLUMNS))
        if not tweet.text.strip():
            continue
        if not (tweet.sentiment and tweet.selected.strip() and tweet.selected in tweet.text):
            raise DataError(
                f"{path}, row {number}: must have a sentiment, and a selected_text that is in its "
                "text; mend or remove the row"
            )
        tweets.append(tweet)
    return tweets


def make_tweets(count: int = 3000) -> list[Tweet]:
    """Make texts, always the same ones. In a neutral one all of the text is selected."""
    drawn = draw_uniforms(7, 14, range(count))
    return [_make(list(row), number) for number, row in enumerate(drawn)]


def _make(drawn: list[float], number: int) -> Tweet:
    def one_of(words: tuple[str, ...]) -> str:
        return words[int(drawn.pop() * len(words))]

    sentiment = ("positive", "negative", "neutral")[number % 3]
    words = [one_of(_WORDS[sentiment]), one_of(_WORDS["neutral"])]
    clauses = [f"{one_of(_SUBJECTS)} is {word} {one_of(_TIMES)}" for word in words]
    text = " and ".join(clauses if drawn.pop() < 0.5 else clauses[::-1])
    return Tweet(text, text if sentiment == "neutral" else words[0], sentiment)


class WordJaccard:
    """The mean over samples of |A ∩ B| / |A ∪ B|, A and B the words of the found and true strings.

    Words stand between spaces, in lower case. Each counts once, and two strings without words give
    1. The found string lies between the tokens s <= e with the largest start[s] + end[e].
    """

    name = "word_jaccard"
    higher_is_better = True

    def __init__(self) -> None:
        self._found: list[tuple[Tensor, Mapping[str, Any]]] = []

    def update(self, outputs: Mapping[str, Tensor], targets: Mapping[str, Any]) -> None:
        """Choose the tokens of one batch on the device. `compute` compares the strings.

        `outputs` has `start_logits` and `end_logits`, [N, T]. `targets` has `offsets` int64
        [N, T, 2], where each token begins and ends in the text, or -1 for tokens outside of it, and
        lists of N strings, `text` and `selected`.
        """
        allowed = targets["offsets"][..., 0] >= 0
        chosen = best_spans(outputs["start_logits"], outputs["end_logits"], allowed)
        self._found.append((chosen, targets))

    def compute(self) -> Tensor:
        """Return the mean so far, 0-d float64, nan before the first update."""
        values: list[float] = []
        for chosen, targets in self._found:
            rows = torch.arange(len(chosen), device=chosen.device)
            begins = targets["offsets"][rows, chosen[:, 0], 0].tolist()
            ends = targets["offsets"][rows, chosen[:, 1], 1].tolist()
            strings = zip(begins, ends, targets["text"], targets["selected"], strict=True)
            values += [jaccard(text[begin:end], true) for begin, end, text, true in strings]
        return torch.tensor(values, dtype=torch.float64).mean()


def best_spans(start: Tensor, end: Tensor, allowed: Tensor) -> Tensor:
    """Return the allowed tokens s <= e with the largest start[s] + end[e]: int64 [N, 2]."""
    kind = widest(start.device)
    low = torch.finfo(kind).min
    start, end = (logits.to(kind).masked_fill(~allowed, low) for logits in (start, end))
    sums = start[:, :, None] + end[:, None, :]
    behind = torch.ones_like(sums, dtype=torch.bool).tril(-1)
    best = sums.masked_fill(behind, -torch.inf).flatten(1).argmax(1)
    length = start.shape[1]
    return torch.stack((best // length, best % length), dim=1)


def jaccard(found: str, true: str) -> float:
    """Return |A ∩ B| / |A ∪ B| of the words of two strings, in lower case."""
    a, b = set(found.lower().split()), set(true.lower().split())
    return len(a & b) / len(a | b) if a | b else 1.0


Sample = dict[str, Any]  # also what a batch has for the model, and for the metric


def tweet_spans(
    root: str | None = None,
    vocab: str | None = None,
    vocab_size: int = 8192,
    max_tokens: int = 128,
    pad_to: int = 8,
) -> Task:
    """Return rows of the tweet task: the question is the sentiment, the answer a part of the text.

    A tenth of each sentiment validates, a tenth tests. A batch is a pair of the model's arguments,
    which are int64 (`input_ids`, `token_type_ids`, `attention_mask` [N, T], and the first and the
    last token of the answer, `start_positions` and `end_positions` [N]), and of the targets of
    `WordJaccard`. The model computes the loss. See conf/dataset/tweet_spans.yaml.

    ConfigError: an option is out of its range or too small for the texts. DataError: a file holds
    something else. OSError: it cannot be read.
    """
    require_counts(pad_to=pad_to)
    tweets = make_tweets() if root is None else read_tweets(Path(root))
    sentiments = sorted({tweet.sentiment for tweet in tweets})
    targets = torch.tensor([sentiments.index(tweet.sentiment) for tweet in tweets])
    indices = [part.tolist() for part in hold_out(targets, one_in=5, parts=2)]
    parts = [[tweets[index] for index in part] for part in indices]
    learned = [f"{tweet.sentiment} {tweet.text}" for tweet in parts[0]]
    tokenizer = word_piece(learned, vocab, vocab_size, max_tokens)
    sets: list[Any] = [[_encode(tweet, tokenizer) for tweet in part] for part in parts]
    train, val, test = sets
    collate, how = partial(pad_spans, multiple=pad_to), tokenizer.described()
    return Task(train, val, model_loss, WordJaccard, collate, test=test, preprocessing=how)


def pad_spans(samples: Sequence[Sample], multiple: int = 1) -> tuple[Sample, Sample]:
    """Make a batch: the model's arguments and the metric's targets."""
    arguments = pad_batch([sample["arguments"] for sample in samples], multiple)
    offsets = torch.full((*arguments["input_ids"].shape, 2), -1)
    for row, sample in zip(offsets, samples, strict=True):
        row[: len(sample["offsets"])] = sample["offsets"]
    strings = {name: [sample[name] for sample in samples] for name in ("text", "selected")}
    return arguments, {"offsets": offsets, **strings}


def _encode(tweet: Tweet, tokenizer: WordPiece) -> Sample:
    encoding = tokenizer.encode(tweet.sentiment, tweet.text)
    if encoding.overflowing:
        raise ConfigError(
            f"dataset.max_tokens={tokenizer.max_tokens}: a text has more tokens "
            f"({tweet.text[:40]!r}...); use more"
        )
    pairs = zip(encoding.offsets, encoding.sequence_ids, strict=True)
    offsets = torch.tensor([place if of == 1 else (-1, -1) for place, of in pairs])
    if not (offsets[:, 0] >= 0).any():
        raise DataError(f"dataset: {tweet.text!r} has no token; remove the row from the table")
    begin = tweet.text.index(tweet.selected)
    first, last = _tokens_between(offsets, begin, begin + len(tweet.selected))
    arguments: Mapping[str, Any] = {
        "input_ids": torch.tensor(encoding.ids),
        "token_type_ids": torch.tensor(encoding.type_ids),
        "start_positions": first,
        "end_positions": last,
    }
    strings = {"text": tweet.text, "selected": tweet.selected}
    return {"arguments": arguments, "offsets": offsets, **strings}


def _tokens_between(offsets: Tensor, begin: int, end: int) -> tuple[int, int]:
    """Return the first and the last token that have a character of text[begin:end]."""
    touched = (offsets[:, 0] < end) & (offsets[:, 1] > begin)
    if not touched.any():  # The tokenizer drops some signs. Then it is all of the text.
        touched = offsets[:, 0] >= 0
    places = touched.nonzero().flatten()
    return int(places[0]), int(places[-1])
