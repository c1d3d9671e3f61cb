"""The vocabulary of a run's tokenizer: a file in its folder, the same one from start to end.

A vocabulary that is trained on texts is another one when these change, and so are the numbers of
the words: the weights would mean something else, and nothing would say so.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpframe.data import Task
from mpframe.errors import DataError
from mpframe.files import read_regular, write_atomically

FILE_NAME = "vocab.txt"
_MOST_BYTES = 2**26


def keep_vocabulary(task: Task, folder: Path, resumed: bool) -> None:
    """Write `vocab.txt` into a run's folder, if the task has a tokenizer.

    Args:
        task: its `preprocessing` may have `vocab`, the pieces, one a line.
        folder: the run's.
        resumed: whether the run goes on; then the file must be what is there.

    Raises:
        DataError: the run goes on with another vocabulary.
        OSError: the file cannot be written.
    """
    vocab, path = _vocabulary_of(task.preprocessing), folder / FILE_NAME
    if vocab is None:
        return
    if resumed and path.exists():
        before = read_regular(path, _MOST_BYTES).decode("utf-8").rstrip("\n")
        refuse_other_vocabulary(task, {"vocab": before}, folder)
    write_atomically(path, f"{vocab}\n")


def refuse_other_vocabulary(
    task: Task, preprocessing: Mapping[str, Any] | None, folder: Path
) -> None:
    """Refuse texts that are read with other numbers than those the weights learned from.

    Args:
        task: what is to be read.
        preprocessing: of the run.
        folder: the run's, for the message.

    Raises:
        DataError: the vocabularies differ.
    """
    if _vocabulary_of(task.preprocessing) != _vocabulary_of(preprocessing):
        raise DataError(
            "dataset: the vocabulary of its tokenizer is not the run's, because the texts or the "
            f"options that it was made of have changed; give dataset.vocab={folder / FILE_NAME}"
        )


def _vocabulary_of(preprocessing: Mapping[str, Any] | None) -> Any:
    return preprocessing.get("vocab") if isinstance(preprocessing, Mapping) else None
