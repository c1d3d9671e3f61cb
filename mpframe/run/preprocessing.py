"""Whether data are read as the run's were: the same numbers for the same words, colours and values.

What a raw input becomes is measured on the training data, and is something else when these change.
The weights would mean something else, and nothing would say so.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpframe.data.task import Task
from mpframe.errors import DataError

VOCABULARY = "vocab.txt"
"""The file of a run's folder that holds its tokenizer's pieces; see vocabulary.py."""
_OF_A_TABLE = ("categorical", "continuous", "target")


def refuse_other_preprocessing(
    task: Task, preprocessing: Mapping[str, Any] | None, folder: Path
) -> None:
    """Refuse data that are read with other numbers than those the weights learned from.

    A size may differ, and so may what the run, or the task, does not say.

    Args:
        task: what is to be read.
        preprocessing: of the run, as JSON values; see `Task.preprocessing`.
        folder: the run's, for the message.

    Raises:
        DataError: the vocabulary, the normalisation or the words of a table differ.
    """
    ours, runs = as_mapping(task.preprocessing), as_mapping(preprocessing)
    if ours.get("vocab") != runs.get("vocab"):
        raise DataError(
            "dataset: the vocabulary of its tokenizer is not the run's, because the texts or the "
            f"options that it was made of have changed; give dataset.vocab={folder / VOCABULARY}"
        )
    if _differ("mean", ours, runs) or _differ("std", ours, runs):
        raise DataError(
            "dataset: its images are normalised by other numbers than the run's, because the "
            "training images have changed; give "
            f"'dataset.mean={runs['mean']}' 'dataset.std={runs['std']}'"
        )
    for key in _OF_A_TABLE:
        if _differ(key, ours, runs):
            raise DataError(
                f"dataset: {key}, as measured on the training rows, is not the run's, because the "
                "rows have changed; the table's training rows must be the run's own"
            )


def _differ(key: str, ours: Mapping[str, Any], runs: Mapping[str, Any]) -> bool:
    return key in ours and key in runs and ours[key] != runs[key]


def as_mapping(preprocessing: Any) -> Mapping[str, Any]:
    """What a task says of its preprocessing; nothing if it is no mapping."""
    return preprocessing if isinstance(preprocessing, Mapping) else {}
