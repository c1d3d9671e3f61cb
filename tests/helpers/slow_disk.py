"""File systems of a rank in trouble: slow, full, or its process killed while it writes."""

import errno
import os
import signal
import time
from pathlib import Path
from typing import Any

from mpframe.checkpoint import saving
from mpframe.core.callback import Callback
from mpframe.core.errors import CheckpointError
from mpframe.training.trainer import Trainer

NOWHERE = os.devnull


class Disk(Callback):
    """What happens whenever this rank has written a file: `slow`, `full` or `kill`.

    A `file` tells how many steps were taken while one was written.
    """

    def __init__(self, rank: int, what: str, seconds: float, after: int, file: str) -> None:
        self._rank, self._what, self._seconds, self._after = rank, what, seconds, after
        self._file = Path(file)
        self._step, self._meanwhile = 0, 0
        self._sync = saving.sync_file

    def setup(self, trainer: Trainer, context: Any) -> None:
        if trainer.comm.rank == self._rank:
            saving.sync_file = self._written  # type: ignore[attr-defined]

    def teardown(self, trainer: Trainer, error: BaseException | None) -> None:
        saving.sync_file = self._sync  # type: ignore[attr-defined]
        if trainer.comm.rank == self._rank:
            self._file.write_text(str(self._meanwhile))

    def on_step_end(self, trainer: Trainer) -> None:
        self._step = trainer.progress.global_step

    def _written(self, file: Any) -> None:
        began = self._step
        if began > self._after and self._what == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        time.sleep(self._seconds)
        if began > self._after and self._what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        self._sync(file)
        self._meanwhile += self._step - began


class Unfit(Callback):
    """A rank cannot take the state of a step."""

    def __init__(self, rank: int, step: int) -> None:
        self._at, self._step = (rank, step), 0

    def on_step_end(self, trainer: Trainer) -> None:
        self._step = trainer.progress.global_step

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (int(os.environ["RANK"]), state["step"]) == self._at:
            raise CheckpointError("it does not fit")


def disk(
    rank: int, what: str, seconds: float = 0.0, after: int = 0, file: Any = NOWHERE
) -> list[str]:
    """The options by which a rank has such a file system, after so many steps."""
    values = {"rank": rank, "what": what, "seconds": seconds, "after": after, "file": file}
    words = [f"{name}={value}" for name, value in values.items()]
    return [f"+callbacks.disk.{word}" for word in ("_target_=slow_disk.Disk", *words)]
