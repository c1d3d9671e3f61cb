"""Files of a run are whole or absent, also on a full disk, and processes take turns in a folder."""

import multiprocessing
import os
import resource
import signal
import time
from pathlib import Path

import pytest
from fixtures import Patch, full, refused

from mpframe.core.errors import MpframeError
from mpframe.files.durable import append_whole, write_atomically
from mpframe.files.file_lock import turn_in
from mpframe.files.text import markdown

CONTEXT = multiprocessing.get_context("fork")


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
    calls: list[object] = []
    replace = Path.replace

    def replaced(source: Path, target: Path) -> Path:
        calls.append(target.name if source.parent == target.parent else source)
        return replace(source, target)

    monkeypatch.setattr(os, "fsync", lambda to: calls.append(os.path.isdir(f"/proc/self/fd/{to}")))
    monkeypatch.setattr(Path, "replace", replaced)
    write_atomically(tmp_path / "a", "old")
    assert calls == [False, "a", True]  # The file, its name, the folder.
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "a", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]


def test_what_one_process_wrote_the_next_one_reads(tmp_path: Path) -> None:
    path = tmp_path / "lines"

    def append_slowly() -> None:
        """Read the file, wait, and write one line more: without turns lines would be lost."""
        for _ in range(5):
            with turn_in(tmp_path):
                before = path.read_text() if path.exists() else ""
                time.sleep(0.002)
                path.write_text(f"{before}x\n")

    processes = [CONTEXT.Process(target=append_slowly) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert path.read_text() == 20 * "x\n"


def test_a_turn_ends_with_an_error_and_follows_no_link(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(KeyError), turn_in(tmp_path):
            raise KeyError
    (tmp_path / ".turn").unlink()
    (tmp_path / ".turn").symlink_to(tmp_path / "elsewhere")
    assert refused(MpframeError, turn_in(tmp_path).__enter__) == (
        f"{tmp_path}/.turn: cannot be locked (A link, which is not followed); free space, "
        "delete what is there or choose another folder"
    )
    assert not (tmp_path / "elsewhere").exists()


def test_what_a_cell_of_a_table_holds_ends_no_cell_and_no_row() -> None:
    assert markdown([("a", "b"), ("x | y", "one\ntwo")], right=[1]) == (
        "| a | b |\n|---|---:|\n| x \\| y | one two |"
    )
