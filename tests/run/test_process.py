"""What a program does to its process before a run."""

import os
import platform
import sys
from typing import Any
from unittest.mock import Mock

import pytest
from fixtures import Patch
from in_process import composed

from mpframe.cli import main
from mpframe.config.command_line import check_config
from mpframe.run import process
from mpframe.training import memory


@pytest.mark.parametrize(("libc", "answer"), [("glibc", 1), ("glibc", 0), ("", 1)])
def test_only_glibc_is_told_to_keep_memory(libc: str, answer: int, monkeypatch: Patch) -> None:
    told = [(-1, -1), (-4, 0)] if libc else []  # M_TRIM_THRESHOLD never, M_MMAP_MAX none
    library = Mock(**{"mallopt.return_value": answer})
    monkeypatch.setattr(platform, "libc_ver", lambda: (libc, "2.36"))
    monkeypatch.setattr(memory, "_c_library", lambda: library)
    assert memory.keep_freed_memory() is bool(told and answer)
    assert [call.args for call in library.mallopt.mock_calls] == told


@pytest.mark.parametrize(
    ("options", "kept"),
    [("cpu", 1), ("cuda:7", 0), ("nonsense", 0), ("cpu trainer.parallel=fsdp", 0)],
)
def test_a_run_on_cpu_keeps_freed_memory(options: str, kept: int, monkeypatch: Patch) -> None:
    """Nonsense is refused, with its reason, by the run."""
    monkeypatch.setattr(process, "keep_freed_memory", keep := Mock())
    process.prepare_process(check_config(composed(*f"device={options}".split())))
    assert keep.call_count == kept


@pytest.mark.parametrize(("asked", "policy"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_do_not_spin_unless_asked_to(asked: Any, policy: str, monkeypatch: Patch) -> None:
    """Decided before the command is imported, which loads torch."""
    seen: list[str | None] = []
    monkeypatch.setattr(sys, "argv", ["mpframe"])
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if asked:
        monkeypatch.setenv("OMP_WAIT_POLICY", asked)
    note = lambda _: seen.append(os.environ.get("OMP_WAIT_POLICY")) or Mock()  # noqa: E731
    monkeypatch.setattr(main, "import_module", note)
    main.start("doctor", [])
    assert seen == [policy]
