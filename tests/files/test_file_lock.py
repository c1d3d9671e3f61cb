"""Processes take turns in a folder."""

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fixtures import Patch

from mpframe.core.errors import MpframeError
from mpframe.files import file_lock
from mpframe.files.file_lock import turn_in

CONTEXT = multiprocessing.get_context("fork")


def started(run: Callable[[], None]) -> Any:
    process = CONTEXT.Process(target=run)
    process.start()
    return process


def ended_well(*processes: Any) -> None:
    for process in processes:
        process.join(60)
        assert process.exitcode == 0


def test_what_one_process_wrote_the_next_one_reads(tmp_path: Path) -> None:
    path = tmp_path / "lines"

    def append_slowly() -> None:
        """Read the file, wait, and write one line more: without turns lines would be lost."""
        for _ in range(5):
            with turn_in(tmp_path):
                before = path.read_text() if path.exists() else ""
                time.sleep(0.002)
                path.write_text(f"{before}x\n")

    ended_well(*[started(append_slowly) for _ in range(4)])
    assert path.read_text() == 20 * "x\n"


def test_a_turn_ends_with_an_error_too(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(KeyError), turn_in(tmp_path):
            raise KeyError


def test_who_waits_says_so(tmp_path: Path, monkeypatch: Patch) -> None:
    """The one that waits is heard by the other, who then ends its turn."""
    taken, heard = CONTEXT.Event(), CONTEXT.Event()

    def hold() -> None:
        with turn_in(tmp_path):
            taken.set()
            assert heard.wait(60)

    def wait() -> None:
        said: list[str] = []
        log = SimpleNamespace(info=lambda message: (said.append(message), heard.set()))
        monkeypatch.setattr(file_lock, "log", log)
        with turn_in(tmp_path, "the other is there"):
            assert said == ["the other is there"]

    holder = started(hold)
    assert taken.wait(60)
    ended_well(started(wait), holder)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / ".turn").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MpframeError) as error, turn_in(tmp_path):
        pass
    assert str(error.value) == (
        f"{tmp_path}/.turn: cannot be locked (A link, which is not followed); free space, delete "
        "what is there or choose another folder"
    )
    assert not (tmp_path / "elsewhere").exists()
