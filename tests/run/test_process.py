"""What a program does to its process before a run: its allocator, its threads."""

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fixtures import Log, Patch

from mpframe.config.command_line import check_config, compose_named, without_hydra
from mpframe.config.schema import Config
from mpframe.run import process
from mpframe.training import memory


class Library:
    """A C library that notes what it is told."""

    def __init__(self, answer: int) -> None:
        self.told: list[tuple[int, int]] = []
        self._answer = answer

    def mallopt(self, parameter: int, value: int) -> int:
        self.told.append((parameter, value))
        return self._answer


@pytest.mark.parametrize(
    ("libc", "answer", "told"),
    [
        ("glibc", 1, [(-1, -1), (-4, 0)]),  # M_TRIM_THRESHOLD never, M_MMAP_MAX none
        ("glibc", 0, [(-1, -1), (-4, 0)]),
        ("", 1, []),
    ],
)
def test_only_glibc_is_told_to_keep_memory(
    libc: str, answer: int, told: list[tuple[int, int]], monkeypatch: Patch
) -> None:
    library = Library(answer)
    monkeypatch.setattr(platform, "libc_ver", lambda: (libc, "2.36"))
    monkeypatch.setattr(memory, "_c_library", lambda: library)
    assert memory.keep_freed_memory() is bool(told and answer)
    assert library.told == told


_FAULTS = """
import resource, sys
from mpframe.training.memory import keep_freed_memory
import torch
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 23)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
given_back = faults()
assert keep_freed_memory()
kept = [faults() for _ in range(16)][-1]
print(given_back, kept)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_a_tensor_that_is_made_again_costs_no_page_faults() -> None:
    """32 MiB and its header: more than glibc ever keeps by itself.

    Before glibc 2.38 freed memory rarely fits the next aligned request of the same size, and it
    takes some rounds until two freed neighbours have become one.
    """
    done = subprocess.run([sys.executable, "-c", _FAULTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    given_back, kept = map(int, done.stdout.split())
    assert kept < given_back / 4
    assert given_back >= 32  # pages of 2 MiB at most


# --- threads


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: Patch) -> Any:
    """A machine with 8 cores: machine(load, running, usable)."""

    def made(load: float, running: int, usable: int = 8) -> None:
        (tmp_path / "loadavg").write_text(f"{load} 0.50 0.40 {running}/812 4711\n")
        monkeypatch.setattr(process, "_LOAD", tmp_path / "loadavg")
        monkeypatch.setattr(os, "cpu_count", lambda: 8)
        monkeypatch.setattr(process, "_usable_cores", lambda: usable)

    return made


@pytest.mark.parametrize(
    ("load", "running", "usable", "count", "free"),
    [
        (5.2, 6, 8, 8, "3 of 8 cores are"),
        (0.0, 1, 2, 8, "2 of 2 cores are"),  # a container with fewer cores than the machine
    ],
)
def test_more_threads_than_free_cores_are_told(
    load: float, running: int, usable: int, count: int, free: str, machine: Any
) -> None:
    machine(load, running, usable)
    assert process.advice_on_threads(count, {"OMP_WAIT_POLICY": "ACTIVE"}) == (
        f"torch computes with {count} threads, and {free} free: threads that spin while they wait "
        f"can make a step many times slower; set OMP_NUM_THREADS={free[0]} or "
        "OMP_WAIT_POLICY=PASSIVE"
    )


@pytest.mark.parametrize(
    ("load", "running", "count", "environment"),
    [
        (7.5, 1, 8, {}),  # the last run of a sweep, which has ended
        (0.2, 7, 8, {}),  # only now, as while others start
        (31.0, 40, 8, {"OMP_WAIT_POLICY": "passive"}),
    ],
)
def test_elsewhere_nothing_is_said(
    load: float, running: int, count: int, environment: dict[str, str], machine: Any
) -> None:
    machine(load, running)
    assert process.advice_on_threads(count, environment) is None


def test_where_nothing_tells_the_load_only_the_cores_count(
    machine: Any, monkeypatch: Patch
) -> None:
    machine(31.0, 40)
    monkeypatch.setattr(process, "_LOAD", Path("/no/such/file"))
    assert process.advice_on_threads(8, {}) is None
    assert process.advice_on_threads(9, {}) is not None


# --- both, before a run


def config(*options: str) -> Config:
    return check_config(without_hydra(compose_named(["experiment=digits_mlp", *options])[1]))


@pytest.mark.parametrize(
    ("options", "kept", "said"),
    [
        (["device=cpu"], 1, ["warning: too many"]),
        (["device=cuda:7"], 0, []),
        (["device=nonsense"], 0, []),  # The run refuses it, and says why.
    ],
)
def test_a_run_on_a_cpu_is_prepared(
    options: list[str], kept: int, said: list[str], monkeypatch: Patch, caplog: Log
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(process, "keep_freed_memory", lambda: calls.append(None))
    monkeypatch.setattr(process, "advice_on_threads", lambda threads, environment: "too many")
    process.prepare_process(config(*options))
    assert (len(calls), caplog.messages) == (kept, said)
