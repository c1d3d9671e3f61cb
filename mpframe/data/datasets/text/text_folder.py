"""Any tree of <class>/*.txt as a classification task for a model such as BERT."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from mpframe.data.datasets.hold_out import hold_out
from mpframe.data.datasets.text.padding import padded
from mpframe.data.datasets.text.wordpiece import word_piece
from mpframe.data.facts import require_facts, require_whole
from mpframe.data.metrics.accuracy import Accuracy
from mpframe.data.task import Task
from mpframe.errors import DataError
from mpframe.files import read_regular
from mpframe.objectives import model_loss

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
    """The texts under `root`, one folder for each class; a tenth validates, a tenth tests.

    A batch is a dict: `input_ids` and `attention_mask` [N, T], `labels` [N], all int64, T as long
    as the longest text of the batch needs. The loss is the model's own.

    Args:
        root: the tree; class folders are numbered in the order of their names.
        classes: how many class folders there are.
        vocab: a vocabulary's file with one piece a line; None: one is trained on the training
            texts, always the same one.
        vocab_size: most pieces in the vocabulary; rows of the model's embedding.
        max_tokens: what is longer is cut off there, >= 3.
        pad_to: T is a multiple of this, >= 1; with `max_tokens` all batches have one length.

    Raises:
        ConfigError: an option is out of its range or does not fit the tree, or tokenizers is not
            installed.
        DataError: folders or files are missing or cannot be read.
    """
    require_whole("dataset.pad_to", pad_to, least=1)
    names, texts, targets = _read(Path(root))
    require_facts(root, classes=(classes, len(names)))
    parts = hold_out(targets, one_in=5, parts=2)
    learned = [texts[index] for index in parts[0].tolist()]
    tokenizer = word_piece(learned, vocab, vocab_size, max_tokens)
    encoded = [torch.tensor(tokenizer.encode(text).ids, dtype=torch.int32) for text in texts]
    train, val, test = (
        Texts([encoded[index] for index in part.tolist()], targets[part]) for part in parts
    )
    return Task(
        train,
        val,
        objective=model_loss,
        metric=Accuracy,
        collate=partial(padded, multiple=pad_to),
        test=test,
        class_names=names,
        preprocessing=tokenizer.described(),
    )


class Texts(Dataset[Any]):
    """Encoded texts with one class each; a sample is a dict of `input_ids` [T] and `labels`.

    Args:
        encoded: the numbers of the pieces of each text, [T] int32.
        targets: [N] class numbers.
    """

    def __init__(self, encoded: list[Tensor], targets: Tensor) -> None:
        self.encoded, self.targets = encoded, targets

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.encoded[index], "labels": self.targets[index]}


def _read(root: Path) -> tuple[list[str], list[str], Tensor]:
    """The class names, all texts in the order of their paths, and their class numbers."""
    folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    files = {path.name: sorted(path.glob("*.txt")) for path in folders}
    files = {name: own for name, own in files.items() if own}
    if len(files) < 2:
        raise DataError(
            f"dataset.root={root}: needs a folder of *.txt files for each of two or more classes, "
            f"and has {len(files)}; set dataset.root to such a tree"
        )
    raw = [_bytes(path) for own in files.values() for path in own]
    counts = torch.tensor([len(own) for own in files.values()])
    return list(files), _decoded(root, raw), torch.arange(len(counts)).repeat_interleave(counts)


def _bytes(path: Path) -> bytes:
    try:
        return read_regular(path, _MOST_BYTES)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); remove the file, or copy it to its place"
        ) from None


def _decoded(root: Path, raw: list[bytes]) -> list[str]:
    """The texts, in UTF-8 or, where they are not that, in Latin-1, which any bytes are."""
    texts, others = [], 0
    for content in raw:
        try:
            texts.append(content.decode("utf-8"))
        except UnicodeDecodeError:
            texts.append(content.decode("latin-1"))
            others += 1
    if others:
        log.info("%s: %d of %d texts are not UTF-8 and read as Latin-1", root, others, len(raw))
    return texts
