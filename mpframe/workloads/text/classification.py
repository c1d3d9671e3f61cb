"""Any folder of <class>/*.txt as a classification task for a model such as BERT.

`WordPiece` is BERT's tokenizer, with a vocabulary that is trained on the task's texts or read from
a file. `pad_batch` makes a batch of token sequences of different lengths.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mpframe.core.errors import ConfigError, DataError
from mpframe.data.metrics import Accuracy
from mpframe.data.samples import hold_out
from mpframe.data.task import Task, require_counts, require_facts
from mpframe.files.plain_file import read_regular
from mpframe.training.objectives import model_loss


def pad_batch(samples: Sequence[Mapping[str, Any]], multiple: int = 1) -> dict[str, Tensor]:
    """Make one batch of samples, filled up with zeros.

    Samples are dicts of the same names: single numbers, which become [N] int64, and 1-d sequences
    of whole numbers, among them `input_ids`, which become [N, T] int64, T rounded up to a
    `multiple`. The sequences of a sample have one length. `attention_mask` [N, T] is 0 at filling
    and 1 elsewhere.
    """
    longest = max(len(sample["input_ids"]) for sample in samples)
    length = -(-longest // multiple) * multiple
    batch = {name: _pad([sample[name] for sample in samples], length) for name in samples[0]}
    ones = [torch.ones(len(sample["input_ids"])) for sample in samples]
    batch["attention_mask"] = _pad(ones, length)
    return batch


def _pad(values: Sequence[Any], length: int) -> Tensor:
    rows = [torch.as_tensor(value, dtype=torch.int64) for value in values]
    if rows[0].dim() == 0:
        return torch.stack(rows)
    filled = pad_sequence(rows, batch_first=True)
    return torch.nn.functional.pad(filled, (0, length - filled.shape[1]))


_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_MOST_VOCABULARY_BYTES = 2**26  # of a vocabulary's file


class WordPiece:
    """BERT's tokenizer, from texts to at most `max_tokens` numbers of pieces."""

    def __init__(self, pieces: Sequence[str], max_tokens: int) -> None:
        from tokenizers import BertWordPieceTokenizer

        self.pieces, self.max_tokens = list(pieces), max_tokens
        vocabulary = {piece: number for number, piece in enumerate(pieces)}
        tokenizer = BertWordPieceTokenizer(vocabulary)
        tokenizer.enable_truncation(max_tokens)
        # Encodes [CLS] text [SEP] then [SEP]: `ids`, `type_ids`, `sequence_ids`, `offsets`.
        self.encode = tokenizer.encode

    def described(self) -> dict[str, Any]:
        """Describe what is done to a text, as JSON values, for `Task.preprocessing`."""
        return {
            "tokenizer": "WordPiece",
            "lowercase": True,
            "strip_accents": True,
            "max_tokens": self.max_tokens,
            "vocab": "\n".join(self.pieces),
        }


def word_piece(
    texts: Sequence[str], vocab: str | None, vocab_size: int, max_tokens: int
) -> WordPiece:
    """Return a tokenizer with the vocabulary of a file, or with one trained on `texts`.

    The same texts give the same vocabulary, of at most `vocab_size` pieces. `max_tokens` >= 3.
    """
    require_counts(len(_SPECIAL) + 1, vocab_size=vocab_size)
    require_counts(3, max_tokens=max_tokens)
    if find_spec("tokenizers") is None:
        raise ConfigError(
            "dataset: tokenizers is not installed; get it with pip install mpframe[text]"
        )
    # Without threads, tokenizers does not warn when a loader's worker is forked.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if vocab is None:
        pieces = _train(texts, vocab_size)
    else:
        pieces = read_regular(Path(vocab), _MOST_VOCABULARY_BYTES).decode("utf-8").splitlines()
    if len(pieces) > vocab_size:
        raise ConfigError(
            f"dataset.vocab_size={vocab_size}: the vocabulary has {len(pieces)} pieces; set it to "
            f"{len(pieces)} or more"
        )
    return WordPiece(pieces, max_tokens)


def _train(texts: Sequence[str], vocab_size: int) -> list[str]:
    """Find pieces by joining the most frequent pairs, as long as a pair is found twice."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    # Single characters are given, because tokenizers numbers characters within a word by chance.
    letters = set().union(*(tokenizer.normalizer.normalize_str(text) for text in texts))
    characters = sorted(letter for letter in letters if not letter.isspace())
    given = [*_SPECIAL, *characters, *(f"##{character}" for character in characters)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, min_frequency=2, show_progress=False, special_tokens=given
    )
    tokenizer.train_from_iterator(texts, trainer)
    numbers = tokenizer.get_vocab()
    return sorted(numbers, key=numbers.__getitem__)


log = logging.getLogger(__name__)

_MOST_BYTES = 2**24  # of one text


def text_folder(
    root: str = "data/texts",
    classes: int = 5,
    vocab: str | None = None,
    vocab_size: int = 8192,
    max_tokens: int = 256,
    pad_to: int = 8,
) -> Task:
    """Return the texts under `root`, where each class has a folder, numbered by their names.

    A tenth validates and a tenth tests. A batch is a dict of `input_ids` and `attention_mask`
    [N, T] and `labels` [N], all int64, where T is the length of the longest text, rounded up to a
    multiple of `pad_to`. The model computes the loss. See conf/dataset/text_folder.yaml.

    ConfigError: an option is out of its range or does not fit the tree, or tokenizers is not
    installed. DataError: folders are missing. OSError: a file cannot be read.
    """
    require_counts(pad_to=pad_to)
    names, texts, targets = _read(Path(root))
    require_facts(root, classes=(classes, len(names)))
    parts = hold_out(targets, one_in=5, parts=2)
    learned = [texts[index] for index in parts[0].tolist()]
    tokenizer = word_piece(learned, vocab, vocab_size, max_tokens)
    encoded = [torch.tensor(tokenizer.encode(text).ids, dtype=torch.int32) for text in texts]
    sets: list[Any] = [
        [{"input_ids": encoded[index], "labels": targets[index]} for index in part.tolist()]
        for part in parts
    ]
    train, val, test = sets
    collate, how = partial(pad_batch, multiple=pad_to), tokenizer.described()
    return Task(
        train, val, model_loss, Accuracy, collate, test=test, class_names=names, preprocessing=how
    )


def _read(root: Path) -> tuple[list[str], list[str], Tensor]:
    """Return the class names, all texts in the order of their paths, and their class numbers."""
    folders = sorted(path for path in root.glob("[!.]*") if path.is_dir())
    files = {path.name: sorted(path.glob("[!.]*.txt")) for path in folders}
    files = {name: paths for name, paths in files.items() if paths}
    if len(files) < 2:
        raise DataError(
            f"dataset.root={root}: needs a folder of *.txt files for each of two or more classes, "
            f"and has {len(files)}; set dataset.root to such a tree"
        )
    texts, others = [], 0
    for path in chain.from_iterable(files.values()):
        content = read_regular(path, _MOST_BYTES)
        try:
            texts.append(content.decode("utf-8"))
        except UnicodeDecodeError:  # Any bytes are Latin-1.
            texts.append(content.decode("latin-1"))
            others += 1
    if others:
        log.info("%s: %d of %d texts are not UTF-8 and read as Latin-1", root, others, len(texts))
    counts = torch.tensor([len(paths) for paths in files.values()])
    return list(files), texts, torch.arange(len(counts)).repeat_interleave(counts)
