"""Files of a run are whole or absent; what is appended waits while a disk is full."""

import errno
import os
import resource
import signal
from pathlib import Path

import pytest
from fixtures import Log, Patch

from mpframe.files import durable
from mpframe.files.durable import AppendLog, append_whole, write_atomically


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_warned_of(tmp_path: Path, monkeypatch: Patch, caplog: Log) -> None:
    path = tmp_path / "log"
    log = AppendLog(path, on_error="warn")
    with monkeypatch.context() as patch:
        patch.setattr(durable, "append_whole", full)
        log.append(b"one")
        assert log.pending
        assert caplog.messages == [f"warning: {path} cannot be written (No space left on device)"]
        with pytest.raises(OSError, match="No space left"):
            AppendLog(path).append(b"one")
    log.append(b"two")
    assert (log.pending, path.read_bytes()) == (False, b"onetwo")


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


def test_content_is_on_the_disk_before_its_name(tmp_path: Path, monkeypatch: Patch) -> None:
    calls: list[str] = []
    rename = Path.replace

    def fsync(descriptor: int) -> None:
        calls.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")

    def noted_rename(self: Path, target: Path) -> Path:
        calls.append("replace")
        assert self.parent == target.parent
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", noted_rename)
    write_atomically(tmp_path / "a", "old")
    assert calls == ["file", "replace", "folder"]
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "a", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]
