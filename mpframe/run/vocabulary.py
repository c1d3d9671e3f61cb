"""The vocabulary of a run's tokenizer: a file in its folder, the same one from start to end."""

from pathlib import Path

from mpframe.data.task import Task
from mpframe.files import read_regular, write_atomically
from mpframe.run.preprocessing import VOCABULARY, as_mapping, refuse_other_preprocessing

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
    vocab, path = as_mapping(task.preprocessing).get("vocab"), folder / VOCABULARY
    if vocab is None:
        return
    if resumed and path.exists():
        before = read_regular(path, _MOST_BYTES).decode("utf-8").rstrip("\n")
        refuse_other_preprocessing(task, {"vocab": before}, folder)
    write_atomically(path, f"{vocab}\n")
