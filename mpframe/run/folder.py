"""A run's folder, which is written only by a run that holds its lock.

A start that is refused leaves the record of the earlier run as it is: summary, stored options, log.
So the files that Hydra would write before a job starts are written here, once the lock is held, the
folder is known to be fit and a resume has succeeded:

    .hydra/config.yaml, hydra.yaml, overrides.yaml    as Hydra writes them, without secrets
    config_resolved.yaml                              every option's value
    train.log                                         whole, its first lines kept in memory
    vocab.txt                                         the pieces of the dataset's tokenizer

A run that goes on, or is evaluated, must preprocess data by the same numbers and vocabulary.
"""

import errno
import logging
import logging.handlers
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from mpframe.checkpoint.folder import FOLDER, all_in
from mpframe.config.redaction import Redacting, as_yaml
from mpframe.core.errors import ConfigError, DataError, MpframeError
from mpframe.data.task import Task
from mpframe.files.durable import write_atomically
from mpframe.files.plain_file import open_regular, read_regular
from mpframe.tracking.summary import Summary

HYDRA = ".hydra"
_FOLDERS = (FOLDER, HYDRA, "numerics", "validation", "profile", "autopsy")
_FORMAT = "[%(asctime)s][%(name)s][%(levelname)s] %(message)s"
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}  # EIO may come from a terminal or the data.
_RECORDS = 10_000  # most lines of the log before the folder is taken
_VOCABULARY = "vocab.txt"
_MOST_BYTES = 2**26  # of a vocabulary


@contextmanager
def unwritable_in_one_line(folder: Path) -> Iterator[None]:
    """Make one line of an error about a full disk, or a file in a run's folder."""
    try:
        yield
    except OSError as error:
        name = str(error.filename or "")
        if error.errno not in _DISK and not name.startswith(f"{folder}{os.sep}"):
            raise
        what = name.removeprefix(f"{folder}{os.sep}") or "its files"
        raise MpframeError(
            f"hydra.run.dir={folder}: {what} cannot be written ({error.strerror}); "
            "free space or choose another folder"
        ) from error


def refuse_unfit(folder: Path, resume: str, option: str = "hydra.run.dir") -> None:
    """Refuse a folder, which `option` named, that belongs to another run or has links in it."""
    for name in _FOLDERS:
        if (folder / name).is_symlink():
            raise ConfigError(
                f"{option}={folder}: its {name} is a link, and a run writes through none; link the "
                "whole folder, or choose another"
            )
    taken = bool(all_in(folder))
    if taken and resume == "none":
        raise ConfigError(
            f"{option}={folder}: holds the checkpoints of a run; continue it with resume=auto or "
            "choose another folder"
        )
    source = Path(resume).resolve()
    other = folder.resolve() not in (source, *source.parents)
    if taken and resume != "auto" and other:
        raise ConfigError(
            f"resume={resume}: {option}={folder} holds the checkpoints of another run; choose "
            f"another {option}, or continue that run with resume=auto"
        )


class RunFolder:
    """The folder of one run, a context manager in which its log is collected.

    Attributes:
        config: the resolved options as YAML.
        taken: whether the run may write into the folder.
    """

    def __init__(
        self, path: Path, composed: DictConfig, hydra: DictConfig | None, secrets: Sequence[str]
    ) -> None:
        self.path = path
        self.config = as_yaml(composed, secrets, resolve=True)
        self.taken = False
        self._texts: dict[str, str] = {}
        self._name = None
        if hydra is not None:
            whole, words = DictConfig({"hydra": hydra}), hydra.overrides.task
            nodes = {"config.yaml": composed, "hydra.yaml": whole, "overrides.yaml": words}
            self._texts = {name: as_yaml(node, secrets) for name, node in nodes.items()}
            self._name = f"{hydra.job.name}.log"
        self._log = logging.handlers.MemoryHandler(_RECORDS, logging.CRITICAL + 1)
        self._formatter = Redacting(logging.Formatter(_FORMAT), secrets)

    def holds_a_run(self) -> bool:
        """Return whether there is a record to lose, which a start without a step has not."""
        if all_in(self.path):
            return True
        try:
            summary = Summary.read(self.path)
        except FileNotFoundError:
            return any(self.path.glob("events.out.tfevents.*"))
        except (OSError, MpframeError):
            return True
        return summary.steps + summary.skipped_steps > 0

    def take(self) -> None:
        """Write the first files of a run's folder, once."""
        if self.taken:
            return
        for name, text in self._texts.items():
            (self.path / HYDRA).mkdir(exist_ok=True)
            write_atomically(self.path / HYDRA / name, text)
        write_atomically(self.path / "config_resolved.yaml", self.config)
        if self._name is not None:
            file = _LogFile(open_regular(self.path / self._name, "a", encoding="utf-8"))
            file.setFormatter(self._formatter)
            self._log.setTarget(file)
            self._log.flush()
            self._log.capacity = 1  # From now on each line at once.
        self.taken = True

    def log_traceback(self, error: BaseException) -> None:
        """Write an error's traceback into the log only: the terminal shows its one line."""
        why = (type(error), error, error.__traceback__)
        text = "the run failed"
        self._log.handle(logging.LogRecord(__name__, logging.ERROR, __file__, 0, text, None, why))

    def __enter__(self) -> "RunFolder":
        logging.getLogger().addHandler(self._log)
        return self

    def __exit__(self, *exception: object) -> None:
        logging.getLogger().removeHandler(self._log)
        file = self._log.target
        self._log.close()
        self._log.buffer.clear()  # An error in it holds the run, and with it its connections.
        if file is not None:
            file.close()


class _LogFile(logging.StreamHandler):  # type: ignore[type-arg]
    """A log file that reports a full disk without a traceback, and can be closed even then."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's own name
        print(f"mpframe: the log cannot be written ({sys.exception()})", file=sys.stderr)

    def close(self) -> None:
        super().close()
        with suppress(OSError):
            self.stream.close()


def keep_vocabulary(task: Task, folder: Path, resumed: bool) -> None:
    """Write `vocab.txt` into a run's folder, if the task has a tokenizer."""
    vocab, path = (task.preprocessing or {}).get("vocab"), folder / _VOCABULARY
    if vocab is None:
        return
    if resumed and path.exists():
        before = read_regular(path, _MOST_BYTES).decode("utf-8").rstrip("\n")
        refuse_other_preprocessing(task, {"vocab": before}, folder)
    write_atomically(path, f"{vocab}\n")


def refuse_other_preprocessing(task: Task, preprocessing: Any, folder: Path) -> None:
    """Refuse data that are preprocessed with other numbers than the run's data.

    A size may differ, and so may an entry that the run or the task does not have.
    """
    ours = task.preprocessing or {}
    runs = preprocessing if isinstance(preprocessing, Mapping) else {}
    if ours.get("vocab") != runs.get("vocab"):
        raise DataError(
            "dataset: the vocabulary of its tokenizer is not the run's, because the texts or the "
            f"options that it was made of have changed; give dataset.vocab={folder / _VOCABULARY}"
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
