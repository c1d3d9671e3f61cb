"""Processes take turns in a folder."""

import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest

from mpframe.core.errors import MpframeError
from mpframe.files import file_lock
from mpframe.files.file_lock import turn_in

CONTEXT = multiprocessing.get_context("fork")


def _append_slowly(folder: Path) -> None:
    """Read a file, wait, and write one line more: without turns lines would be lost."""
    path = folder / "lines"
    for _ in range(5):
        with turn_in(folder):
            before = path.read_text() if path.exists() else ""
            time.sleep(0.002)
            path.write_text(f"{before}x\n")


def test_what_one_process_wrote_the_next_one_reads(tmp_path: Path) -> None:
    workers = [CONTEXT.Process(target=_append_slowly, args=(tmp_path,)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert (tmp_path / "lines").read_text() == 20 * "x\n"


def test_a_turn_ends_with_an_error_too(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(KeyError), turn_in(tmp_path):
            raise KeyError


def test_who_waits_says_so(tmp_path: Path) -> None:
    """The one that waits is heard by the other, who then ends its turn."""
    taken, release = CONTEXT.Event(), CONTEXT.Event()

    def hold() -> None:
        with turn_in(tmp_path):
            taken.set()
            assert release.wait(60)

    holder = CONTEXT.Process(target=hold)
    holder.start()
    assert taken.wait(60)
    waiter = CONTEXT.Process(target=_wait, args=(tmp_path, release))
    waiter.start()
    waiter.join(60)
    holder.join(60)
    assert (waiter.exitcode, holder.exitcode) == (0, 0)


class Heard:
    """A log of its own: what other tests have made of the logging of this process is not asked."""

    def __init__(self, release: Any) -> None:
        self._release = release

    def info(self, message: str) -> None:
        assert message == "the other is there"
        self._release.set()


def _wait(folder: Path, release: Any) -> None:
    file_lock.log = Heard(release)  # type: ignore[assignment]
    with turn_in(folder, "the other is there"):
        pass


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / ".turn").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MpframeError) as error, turn_in(tmp_path):
        pass
    assert str(error.value) == (
        f"{tmp_path}/.turn: cannot be locked (A link, which is not followed); free space, delete "
        "what is there or choose another folder"
    )
    assert not (tmp_path / "elsewhere").exists()
