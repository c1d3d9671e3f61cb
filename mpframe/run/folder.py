"""A run's folder: the run looks at it first, and writes into it only once it holds its lock.

A start that is refused leaves the record of the earlier run as it is: summary, stored options, log.
So the files that Hydra writes before a job starts are written here instead, when the lock is held,
the folder is found to be fit and a resume has succeeded:

    .hydra/config.yaml, hydra.yaml, overrides.yaml    as Hydra writes them, without secrets
    config_resolved.yaml                              every option's value
    train.log                                         from its first line on; until then in memory

One process holds the lock, and the kernel releases it, however the process ends.
"""

import errno
import logging
import logging.handlers
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from omegaconf import DictConfig

from mpframe import checkpoint
from mpframe.config.redaction import Redacting, as_yaml
from mpframe.core.errors import ConfigError, MpframeError
from mpframe.files.durable import write_atomically
from mpframe.files.plain_file import open_regular
from mpframe.tracking.summary import Summary

HYDRA = ".hydra"
_FOLDERS = (checkpoint.FOLDER, HYDRA, "numerics", "profile", "autopsy")
_FORMAT = "[%(asctime)s][%(name)s][%(levelname)s] %(message)s"
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}  # EIO may be of a terminal or of the data.
_RECORDS = 10_000  # lines of the log, kept until the folder is the run's


@contextmanager
def unwritable_in_one_line(folder: Path) -> Iterator[None]:
    """Give one line if a disk is full, or a file in a run's folder cannot be written."""
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


class RunFolder:
    """The folder of one run; use it as a context manager.

    Attributes:
        config: the resolved options as YAML.
        taken: whether the folder is the run's, to write into.
    """

    def __init__(
        self, path: Path, composed: DictConfig, hydra: DictConfig | None, secrets: Sequence[str]
    ) -> None:
        self.path = path
        self.config = as_yaml(composed, secrets, resolve=True)
        self.taken = False
        self._texts = {} if hydra is None else _as_hydra_writes(composed, hydra, secrets)
        self._name = None if hydra is None else f"{hydra.job.name}.log"
        self._log = logging.handlers.MemoryHandler(_RECORDS, logging.CRITICAL + 1)
        self._formatter = Redacting(logging.Formatter(_FORMAT), secrets)

    def refuse_unfit(self, resume: str) -> None:
        """Refuse a folder that belongs to another run, or has links in it."""
        for name in _FOLDERS:
            if (self.path / name).is_symlink():
                raise ConfigError(
                    f"hydra.run.dir={self.path}: its {name} is a link, and a run writes through "
                    "none; link the whole folder, or choose another"
                )
        if not checkpoint.all_in(self.path) or resume == "auto":
            checkpoint.refuse_mixed(self.path)
            return
        if resume == "none":
            raise ConfigError(
                f"hydra.run.dir={self.path}: holds the checkpoints of a run; "
                "continue it with resume=auto or choose another folder"
            )
        if self.path.resolve() not in (Path(resume).resolve(), *Path(resume).resolve().parents):
            raise ConfigError(
                f"resume={resume}: hydra.run.dir={self.path} holds the checkpoints of a run of its "
                "own; choose another hydra.run.dir, or continue that run with resume=auto"
            )
        checkpoint.refuse_mixed(self.path)

    def holds_a_run(self) -> bool:
        """Whether there is a record to lose; a start that never took a step has none."""
        if checkpoint.all_in(self.path):
            return True
        try:
            summary = Summary.read(self.path)
        except FileNotFoundError:
            return any(self.path.glob("events.out.tfevents.*"))
        except (OSError, MpframeError):
            return True
        return summary.steps + summary.skipped_steps > 0

    def take(self) -> None:
        """Write the first files of a run's folder; a second call does nothing."""
        if self.taken:
            return
        with unwritable_in_one_line(self.path):
            for name, text in self._texts.items():
                (self.path / HYDRA).mkdir(exist_ok=True)
                write_atomically(self.path / HYDRA / name, text)
            write_atomically(self.path / "config_resolved.yaml", self.config)
            if self._name is not None:
                self._open_log(self.path / self._name)
        self.taken = True

    def log_traceback(self, error: BaseException) -> None:
        """Write an error's traceback into the log alone: the terminal shows its one line."""
        why = (type(error), error, error.__traceback__)
        text = "the run failed"
        self._log.handle(logging.LogRecord(__name__, logging.ERROR, __file__, 0, text, None, why))

    def __enter__(self) -> "RunFolder":
        logging.getLogger().addHandler(self._log)
        return self

    def __exit__(self, *exception: object) -> None:
        logging.getLogger().removeHandler(self._log)
        file = self._log.target
        self._log.setTarget(None)
        self._log.buffer.clear()
        self._log.close()
        if file is not None:
            file.close()

    def _open_log(self, path: Path) -> None:
        handler = _LogFile(open_regular(path, "a", encoding="utf-8"))
        handler.setFormatter(self._formatter)
        self._log.setTarget(handler)
        self._log.flush()
        self._log.capacity = 1  # From now on each line at once.


class _LogFile(logging.StreamHandler):  # type: ignore[type-arg]
    """A log file; if its disk is full, it says so once, without a traceback."""

    _said = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's own name
        """Say on stderr that the log is not complete."""
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._said:
            self._said = True
            print(f"mpframe: the log cannot be written ({error.strerror})", file=sys.stderr)

    def close(self) -> None:
        """Close the file, even if its last lines cannot be written."""
        super().close()
        try:
            self.stream.close()
        except OSError:
            self._said = True


def _as_hydra_writes(
    composed: DictConfig, hydra: DictConfig, secrets: Sequence[str]
) -> dict[str, str]:
    nodes = {
        "config.yaml": composed,
        "hydra.yaml": DictConfig({"hydra": hydra}),
        "overrides.yaml": hydra.overrides.task,
    }
    return {name: as_yaml(node, secrets) for name, node in nodes.items()}


if sys.platform != "win32":  # Windows has no such lock.
    import fcntl

FILE_NAME = ".lock"


class RunLock:
    """Holds a run's folder within a `with` block."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME

    def __enter__(self) -> Self:
        """Take the lock."""
        try:
            self._file = open_regular(self._path, "a+")
            self._lock()
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
            self._file.flush()
        except OSError as error:
            raise MpframeError(
                f"hydra.run.dir={self._path.parent}: cannot be written ({error.strerror}); "
                "free space or choose another folder"
            ) from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.truncate(0)  # It names who holds it: no process does now.
        self._file.close()

    def _lock(self) -> None:
        if sys.platform == "win32":
            return
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.seek(0)
            holder = self._file.read() or "another process"
            self._file.close()
            raise ConfigError(
                f"hydra.run.dir={self._path.parent}: {holder} is training in this folder; "
                "wait for it or choose another folder"
            ) from None
