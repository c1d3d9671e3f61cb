"""An event file of TensorBoard: an append-only list of records, each written whole or not at all.

Records wait in memory for a few seconds, or until `flush`. If the disk is full, they wait on, and
are written with the next ones when there is room.
"""

import io
import itertools
import os
import socket
import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

from mpframe.files.durable import append_whole

_SECONDS = 5.0
_NUMBERS = itertools.count()


class EventFile:
    """A new event file in a folder, which hides older files from `first_step` on.

    Files are read in the order of their names, so it is named after the current second, or the
    second after the newest file: a START record that is read too early hides nothing.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        unique = f"{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        older = [int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.*")]
        second = max([int(time.time()), *(other + 1 for other in older)])
        self._path = folder / f"events.out.tfevents.{second:010d}.{unique}"
        self._waiting = io.BytesIO()
        self._records = RecordWriter(self._waiting)
        self._add(Event(file_version="brain.Event:2"))
        self._add(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))
        self.flush()

    def add(self, summary: Any, step: int) -> None:
        """Append a summary. OSError: the records that wait could not be written, and wait on."""
        self._add(Event(summary=summary, step=step))
        if time.monotonic() - self._flushed >= _SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write the records that wait, with the errors of `add`."""
        self._flushed = time.monotonic()
        if waiting := self._waiting.getvalue():
            append_whole(self._path, waiting)
            self._waiting.seek(0)
            self._waiting.truncate()

    def _add(self, event: Any) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
