"""Worker processes that load data: if one crashes, is killed or hangs, the error says which.

Each worker writes the sample it is reading into shared memory, and the error names it. A dead
worker is noticed where its batch is waited for, between two steps. torch would raise from a signal
handler in the middle of a step or of a file. Only the main process answers a signal that is sent to
all processes of a job (Ctrl-C, a scheduler's SIGTERM). Workers ignore it, and are killed when their
loader or the program ends.
"""

import ctypes
import errno
import logging
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.queues import Queue
from multiprocessing.util import Finalize
from time import monotonic
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

from mpframe.core.errors import DataError, first_line

log = logging.getLogger(__name__)

_NONE = -1
_SIGKILLED = -9
_OPEN_FILES = os.strerror(errno.EMFILE)
_FEWER = "use fewer, or allow more open files (ulimit -n)"
_STOPPING = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)
)
POLL_SECONDS = 1.0  # How often a wait for a batch checks whether the workers are alive.
Locate = Callable[[int | None], str]
"""Says where in the data a sample is, by its index, or where a worker is that reads none."""


def warn_of_too_many_workers(workers: int) -> None:
    """Warn of more workers than there are cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if workers > (cores or workers):
        log.warning(
            "warning: dataset.workers=%d: this machine has %d cores; more workers wait for each "
            "other",
            *(workers, cores),
        )


class CurrentSamples:
    """The sample that each worker is reading."""

    def __init__(self, workers: int) -> None:
        self._reading = multiprocessing.RawArray(ctypes.c_int64, [_NONE] * workers)

    def note(self, index: int = _NONE) -> None:
        """Note in a worker that it now reads sample `index`, or none."""
        worker = get_worker_info()
        if worker is not None:
            self._reading[worker.id] = index

    def of(self, worker: int) -> int | None:
        """Return the sample that a worker is reading, or None if it waits."""
        return None if self._reading[worker] == _NONE else self._reading[worker]

    def __len__(self) -> int:
        return len(self._reading)


class WorkerPool:
    """The workers of one loader.

    They write into `current` which sample they read. A batch is waited for `timeout` seconds, or
    for ever if it is None.
    """

    def __init__(self, current: CurrentSamples, timeout: float | None) -> None:
        self._current, self._timeout = current, timeout
        self._processes: list[Any] = []
        self._done: Any = None  # torch's event, which the workers look at

    def start(self, batches: DataLoader[Any]) -> Iterator[Any]:
        """Begin an epoch, and start the workers if there are none yet."""
        before = multiprocessing.active_children()
        try:
            with _keep_child_handler(), _block_signals(), warnings.catch_warnings():
                # The error that follows and warn_of_too_many_workers say what torch would warn of.
                warnings.filterwarnings("ignore", "Got pickle error|This DataLoader will create")
                answers = iter(batches)
        except OSError as error:  # The started ones ignore the SIGTERM of the end.
            _kill([p for p in multiprocessing.active_children() if p not in before], None)
            raise DataError(
                f"dataset.workers={len(self._current)}: a worker cannot be started "
                f"({error.strerror}); {_FEWER}"
            ) from error
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise DataError(
                f"dataset.workers={len(self._current)}: the dataset cannot be sent to a worker "
                f"({first_line(error)}); let it hold no lambdas, local classes or open files, or "
                "use dataset.workers=0"
            ) from error
        if not self._processes and len(self._current):
            self._processes = list(getattr(answers, "_workers", []))
            self._done = getattr(answers, "_workers_done_event", None)
            # Kill them with the pool, or at the end of the program. If the garbage collector takes
            # the pool, torch waits 20 s for workers whose queues are closed by then. Not atexit:
            # processes of multiprocessing end without it, and would wait for ever for workers that
            # ignore SIGTERM. This runs before that wait.
            Finalize(self, _kill, args=(self._processes, self._done), exitpriority=100)
        return answers

    def next_batch(self, answers: Iterator[Any], locate: Locate) -> Any:
        """Return the next answer. If a worker has ended, or none answers in time, kill all."""
        deadline = math.inf if self._timeout is None else monotonic() + self._timeout
        while True:
            try:
                return next(answers)
            except (RuntimeError, OSError, EOFError) as error:  # The last two: a broken pipe.
                timed_out = "timed out" in str(error)
                failure = self._too_many_files() if _OPEN_FILES in str(error) else None
                failure = failure or self._death(locate, timed_out)
                failure = failure or self._timeout_error(deadline, locate)
                if failure is None and not timed_out:
                    raise
            if failure is not None:
                _kill(self._processes, self._done)
                raise DataError(failure)

    def close(self) -> None:
        """End the workers for good."""
        _kill(self._processes, self._done)

    def _death(self, locate: Locate, timed_out: bool) -> str | None:
        """Return the error text if a worker has ended or is ending."""
        for number, process in enumerate(self._processes):
            process.join(0.0 if timed_out else POLL_SECONDS)
            code = process.exitcode
            if code == errno.EMFILE:
                return self._too_many_files()
            if code is not None:
                hint = (
                    "the system kills what uses too much memory: try fewer dataset.workers"
                    if code == _SIGKILLED
                    else "dataset.workers=0 may show the error itself"
                )
                ending = f"ended with exit code {code}"
                if code < 0:
                    ending = f"was killed by {_name_of(-code)}"
                return (
                    f"dataset.workers={len(self._current)}: worker {number} {ending} at "
                    f"{locate(self._current.of(number))}; {hint}"
                )
        return None

    def _too_many_files(self) -> str:
        return f"dataset.workers={len(self._current)}: {_OPEN_FILES.lower()}; {_FEWER}"

    def _timeout_error(self, deadline: float, locate: Locate) -> str | None:
        """Return the error text if the deadline has passed."""
        if monotonic() < deadline:
            return None
        reading = [(n, self._current.of(n)) for n in range(len(self._current))]
        places = [f"worker {n} is at {locate(i)}" for n, i in reading if i is not None]
        return (
            f"trainer.timeout={self._timeout:g}: no batch within {self._timeout:g} s; "
            f"{', '.join(places) or 'no worker is reading'}; raise trainer.timeout, or fix "
            "what hangs"
        )


def _name_of(number: int) -> str:
    """Return a signal's name, such as `SIGKILL`, or its number if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def ignore_signals(worker: int) -> None:
    """Make a new worker ignore signals that stop a run, and end if it can open no more files."""

    for number in _STOPPING:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):  # Signals that came while blocked are gone now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
    sys.excepthook = _report
    Queue._on_queue_feeder_error = staticmethod(  # type: ignore[attr-defined]
        lambda error, _: _report(type(error), error, error.__traceback__)
    )


def _report(kind: Any, error: Any, trace: Any) -> None:
    """End a worker from any of its threads if it can open no more files: no batch would arrive."""
    if _OPEN_FILES in str(error):
        os._exit(errno.EMFILE)
    sys.__excepthook__(kind, error, trace)


@contextmanager
def _block_signals() -> Iterator[None]:
    """Block signals, which could end a new worker before it has come to `ignore_signals`."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _kill(processes: list[Any], done: Any) -> None:
    """Kill the workers that still run, and wait until they have ended.

    A worker that is killed while it looks at the event `done` keeps its lock for ever. The event
    gets another lock, as torch sets it afterwards.
    """
    with _keep_child_handler(signal.SIG_DFL):
        for process in processes:
            process.kill()
            process.join()
    if done is not None:
        done._cond = threading.Condition()


@contextmanager
def _keep_child_handler(within: Any = None) -> Iterator[None]:
    """Keep the handler of SIGCHLD over the block, and use `within` inside it, if given."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Handlers are the main thread's; torch installs none elsewhere.
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        if within is not None:
            signal.signal(signal.SIGCHLD, within)
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if before is None else before)
