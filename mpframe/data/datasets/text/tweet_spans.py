"""Span extraction: find the part of a text that carries its sentiment."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from mpframe.data.datasets.hold_out import hold_out
from mpframe.data.datasets.text.padding import padded
from mpframe.data.datasets.text.tweets import Tweet, made_tweets, read_tweets
from mpframe.data.datasets.text.wordpiece import WordPiece, word_piece
from mpframe.data.facts import require_whole
from mpframe.data.metrics.word_jaccard import WordJaccard
from mpframe.data.task import Task
from mpframe.errors import ConfigError, DataError
from mpframe.objectives import model_loss

Sample = dict[str, Any]
Batch = tuple[dict[str, Tensor], dict[str, Any]]


def tweet_spans(
    root: str | None = None,
    vocab: str | None = None,
    vocab_size: int = 8192,
    max_tokens: int = 128,
    pad_to: int = 8,
) -> Task:
    """Rows of the tweet task: the question is the sentiment, the answer a part of the text.

    A tenth of each sentiment validates, a tenth tests. A batch is a pair: what the model is called
    with (`input_ids`, `token_type_ids`, `attention_mask` [N, T], `start_positions`,
    `end_positions` [N], the first and the last token of the answer; all int64), and what the metric
    compares with (`offsets` [N, T, 2], `text`, `selected`; see `WordJaccard`). The loss is the
    model's own.

    Args:
        root: the task's train.csv; None: 3000 made texts of its form, which are no tweets.
        vocab: a vocabulary's file with one piece a line; None: one is trained on the training
            texts, always the same one.
        vocab_size: most pieces in the vocabulary; rows of the model's embedding.
        max_tokens: most tokens of question and text; none may have more, >= 3.
        pad_to: T is a multiple of this, >= 1; with `max_tokens` all batches have one length.

    Raises:
        ConfigError: an option is out of its range or too small for the texts, or tokenizers is not
            installed.
        DataError: a file cannot be read or holds something else.
    """
    require_whole("dataset.pad_to", pad_to, least=1)
    tweets = made_tweets() if root is None else read_tweets(Path(root))
    sentiments = sorted({tweet.sentiment for tweet in tweets})
    targets = torch.tensor([sentiments.index(tweet.sentiment) for tweet in tweets])
    parts = [
        [tweets[index] for index in part.tolist()] for part in hold_out(targets, one_in=5, parts=2)
    ]
    learned = [f"{tweet.sentiment} {tweet.text}" for tweet in parts[0]]
    tokenizer = word_piece(learned, vocab, vocab_size, max_tokens)
    train, val, test = (Spans(part, tokenizer) for part in parts)
    return Task(
        train,
        val,
        objective=model_loss,
        metric=WordJaccard,
        collate=partial(spans_padded, multiple=pad_to),
        test=test,
        preprocessing=tokenizer.described(),
    )


class Spans(Dataset[Any]):
    """Tweets as a model's arguments, and what the metric needs; see `tweet_spans`.

    Args:
        tweets: the rows.
        tokenizer: cuts nothing off them.

    Raises:
        ConfigError: a row has too many tokens.
    """

    def __init__(self, tweets: Sequence[Tweet], tokenizer: WordPiece) -> None:
        self.samples = [_encoded(tweet, tokenizer) for tweet in tweets]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]


def spans_padded(samples: Sequence[Sample], multiple: int = 1) -> Batch:
    """A batch of `Spans`: the model's arguments and the metric's targets."""
    arguments = padded([sample["arguments"] for sample in samples], multiple)
    offsets = torch.full((*arguments["input_ids"].shape, 2), -1)
    for row, sample in zip(offsets, samples, strict=True):
        row[: len(sample["offsets"])] = sample["offsets"]
    strings = {name: [sample[name] for sample in samples] for name in ("text", "selected")}
    return arguments, {"offsets": offsets, **strings}


def _encoded(tweet: Tweet, tokenizer: WordPiece) -> Sample:
    encoding = tokenizer.encode(tweet.sentiment, tweet.text)
    if encoding.overflowing:
        raise ConfigError(
            f"dataset.max_tokens={tokenizer.max_tokens}: a text has more tokens "
            f"({tweet.text[:40]!r}...); use more"
        )
    offsets = torch.tensor(
        [
            place if of == 1 else (-1, -1)
            for place, of in zip(encoding.offsets, encoding.sequence_ids, strict=True)
        ]
    )
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
    return {
        "arguments": arguments,
        "offsets": offsets,
        "text": tweet.text,
        "selected": tweet.selected,
    }


def _tokens_between(offsets: Tensor, begin: int, end: int) -> tuple[int, int]:
    """The first and the last token that have a character of text[begin:end]."""
    touched = (offsets[:, 0] < end) & (offsets[:, 1] > begin)
    if not touched.any():  # The tokenizer drops some signs; then it is all of the text.
        touched = offsets[:, 0] >= 0
    places = touched.nonzero().flatten()
    return int(places[0]), int(places[-1])
