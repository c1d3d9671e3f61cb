"""Whether data are preprocessed as the run's: the same numbers for words, colours and values.

These numbers are measured on the training data, and with others the weights mean something else. A
tokenizer's vocabulary is a file in the run's folder, the same one from start to end.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpframe.core.errors import DataError
from mpframe.data.task import Task
from mpframe.files.durable import write_atomically
from mpframe.files.plain_file import read_regular

VOCABULARY = "vocab.txt"
"""The file of a run's folder that holds its tokenizer's pieces."""
_MOST_BYTES = 2**26


def refuse_other_preprocessing(
    task: Task, preprocessing: Mapping[str, Any] | None, folder: Path
) -> None:
    """Refuse data that are preprocessed with other numbers than the run's data.

    A size may differ, and so may an entry that the run or the task does not have.
    """
    ours, runs = as_mapping(task.preprocessing), as_mapping(preprocessing)
    if ours.get("vocab") != runs.get("vocab"):
        raise DataError(
            "dataset: the vocabulary of its tokenizer is not the run's, because the texts or the "
            f"options that it was made of have changed; give dataset.vocab={folder / VOCABULARY}"
        )
    differ = {key for key in ours.keys() & runs.keys() if ours[key] != runs[key]}
    if differ & {"mean", "std"}:
        raise DataError(
            "dataset: its images are normalised by other numbers than the run's, because the "
            "training images have changed; give "
            f"'dataset.mean={runs['mean']}' 'dataset.std={runs['std']}'"
        )
    for key in sorted(differ & {"categorical", "continuous", "target"}):
        raise DataError(
            f"dataset: {key}, as measured on the training rows, is not the run's, because the "
            "rows have changed; the table's training rows must be the ones of the run"
        )


def as_mapping(preprocessing: Any) -> Mapping[str, Any]:
    """Return a task's preprocessing, or an empty mapping if it is none."""
    return preprocessing if isinstance(preprocessing, Mapping) else {}


def keep_vocabulary(task: Task, folder: Path, resumed: bool) -> None:
    """Write `vocab.txt` into a run's folder, if the task has a tokenizer."""
    vocab, path = as_mapping(task.preprocessing).get("vocab"), folder / VOCABULARY
    if vocab is None:
        return
    if resumed and path.exists():
        before = read_regular(path, _MOST_BYTES).decode("utf-8").rstrip("\n")
        refuse_other_preprocessing(task, {"vocab": before}, folder)
    write_atomically(path, f"{vocab}\n")
