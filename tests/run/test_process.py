"""What a program does to its process before a run: its allocator, its threads."""

import os
import platform
from pathlib import Path
from unittest.mock import Mock

import pytest
from fixtures import Log, Patch
from in_process import composed

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


FREE = (
    "torch computes with 8 threads, and {0} of {1} cores are free: threads that spin while they "
    "wait can make a step many times slower; set OMP_NUM_THREADS={0} or OMP_WAIT_POLICY=PASSIVE"
)


@pytest.mark.parametrize(
    ("load", "running", "usable", "policy", "said"),
    [
        (5.2, 6, 8, "ACTIVE", FREE.format(3, 8)),
        (0.0, 1, 2, "ACTIVE", FREE.format(2, 2)),  # a container with fewer cores than the machine
        (7.5, 1, 8, "", None),  # the last run of a sweep, which has ended
        (0.2, 7, 8, "", None),  # only now, as while others start
        (31.0, 40, 8, "passive", None),
        (None, None, 8, "", None),  # Nothing tells the load.
    ],
)
def test_more_threads_than_free_cores_are_told(
    load: float | None, running: int, usable: int, policy: str, said: str | None,
    tmp_path: Path, monkeypatch: Patch,
) -> None:  # fmt: skip
    """On a machine with 8 cores."""
    if load is not None:
        (tmp_path / "loadavg").write_text(f"{load} 0.50 0.40 {running}/812 4711\n")
    monkeypatch.setattr(process, "_LOAD", tmp_path / "loadavg")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(process, "_usable_cores", lambda: usable)
    assert process.advice_on_threads(8, {"OMP_WAIT_POLICY": policy}) == said
    assert load is not None or process.advice_on_threads(9, {}) is not None


@pytest.mark.parametrize(("device", "kept"), [("cpu", 1), ("cuda:7", 0), ("nonsense", 0)])
def test_a_run_on_cpu_is_prepared(device: str, kept: int, monkeypatch: Patch, caplog: Log) -> None:
    """Nonsense is refused, with its reason, by the run."""
    monkeypatch.setattr(process, "keep_freed_memory", keep := Mock())
    monkeypatch.setattr(process, "advice_on_threads", lambda threads, environment: "too many")
    process.prepare_process(check_config(composed(f"device={device}")))
    assert (keep.call_count, caplog.messages) == (kept, ["warning: too many"] * kept)
