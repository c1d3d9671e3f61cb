"""What is appended to a file of a run, where its disk is full for a while."""

import errno
import resource
import signal
from pathlib import Path

import pytest
from fixtures import Log, Patch

from mpframe.files import durable
from mpframe.files.durable import AppendLog, append_whole


@pytest.fixture
def full_disk(monkeypatch: Patch) -> list[bool]:
    """Whether the disk is full: `full_disk[0]`."""
    state, append = [True], durable.append_whole

    def append_whole(path: Path, piece: bytes) -> None:
        if state[0] and piece:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        append(path, piece)

    monkeypatch.setattr(durable, "append_whole", append_whole)
    return state


def test_a_full_disk_stops(tmp_path: Path, full_disk: list[bool]) -> None:
    with pytest.raises(OSError, match="No space left"):
        AppendLog(tmp_path / "log").append(b"one")


def test_a_full_disk_is_warned_of_and_the_pieces_are_written_when_there_is_room(
    tmp_path: Path, full_disk: list[bool], caplog: Log
) -> None:
    log = AppendLog(tmp_path / "log", on_error="warn")
    log.append(b"one")
    assert log.pending
    assert caplog.messages == [
        f"warning: {tmp_path / 'log'} cannot be written (No space left on device)"
    ]
    full_disk[0] = False
    log.append(b"two")
    assert not log.pending
    assert (tmp_path / "log").read_bytes() == b"onetwo"


def test_a_record_cut_short_by_a_full_disk_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "file"
    append_whole(path, b"whole")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            append_whole(path, b"a piece")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == b"whole"
