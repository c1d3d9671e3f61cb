"""Threads that wait by spinning, on a machine that has other work.

OpenMP divides an op among threads and waits for the last one. Those that are ready spin, which is
the fastest way as long as each has a core of its own. If they have not, they take the core from
the one they wait for, and a step may take fifty times as long.
"""

import os
from collections.abc import Mapping
from pathlib import Path

_LOAD = Path("/proc/loadavg")


def advice_on_threads(threads: int, environment: Mapping[str, str]) -> str | None:
    """A line with the way out where threads are likely to fight for cores; None elsewhere.

    Args:
        threads: that torch computes with.
        environment: of the process.
    """
    if threads == 1 or environment.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE":
        return None
    usable = _usable_cores()
    free = max(1, min(usable, (os.cpu_count() or usable) - _busy_cores()))
    if threads <= free:
        return None
    return (
        f"torch computes with {threads} threads, and {free} of {usable} cores "
        f"{'is' if free == 1 else 'are'} free: threads that spin while they wait can make a step "
        f"many times slower; set OMP_NUM_THREADS={free} or OMP_WAIT_POLICY=PASSIVE"
    )


def _busy_cores() -> int:
    """Cores that other processes use: in the last minute and now; 0 where nothing tells.

    The load alone would count the run that ended a second ago, as in a sweep.
    """
    if not _LOAD.exists():
        return 0
    load, _, _, tasks, _ = _LOAD.read_text().split()
    running = int(tasks.partition("/")[0]) - 1  # Without this process.
    return int(min(float(load), running))


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
