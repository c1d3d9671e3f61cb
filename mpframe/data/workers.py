"""Worker processes that load data: if one crashes, is killed or hangs, the error says which.

Each worker writes the sample it is reading into shared memory, and the error names it. A dead
worker is noticed where its batch is waited for, between two steps. torch would raise from a signal
handler in the middle of a step or of a file. Only the main process answers a signal that is sent to
all processes of a job (Ctrl-C, a scheduler's SIGTERM). Workers ignore it, and are killed when their
loader or the program ends.
"""

import ctypes
import math
import multiprocessing
import pickle
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.util import Finalize
from time import monotonic
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

from mpframe.core.errors import DataError, first_line

_NONE = -1
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
POLL_SECONDS = 1.0  # How often a wait for a batch checks whether the workers are alive.
Locate = Callable[[int | None], str]  # where in the data a sample is, or a worker that reads none


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
    """The workers of one loader, whose batches are waited for `timeout` seconds, None: for ever."""

    def __init__(self, current: CurrentSamples, timeout: float | None) -> None:
        self._current, self._timeout = current, timeout
        self._processes: list[Any] = []
        self._done: Any = None  # torch's event, which the workers look at

    def start(self, batches: DataLoader[Any]) -> Iterator[Any]:
        """Begin an epoch, and start the workers if there are none yet."""
        before = multiprocessing.active_children()
        try:
            with _keep_child_handler(), _block_signals(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Got pickle error")  # The error below says it.
                answers = iter(batches)
        except (OSError, pickle.PicklingError, AttributeError, TypeError) as error:
            # The started ones ignore the SIGTERM of the end.
            _kill([p for p in multiprocessing.active_children() if p not in before], None)
            raise DataError(
                f"dataset.workers={len(self._current)}: a worker cannot be started "
                f"({first_line(error)}); use fewer, or 0 if the dataset cannot be pickled"
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
                failure = self._death(locate, timed_out) or self._timeout_error(deadline, locate)
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
            if code is not None:
                ending = f"ended with exit code {code}"
                if code < 0:
                    ending = f"was killed by signal {-code}"
                return (
                    f"dataset.workers={len(self._current)}: worker {number} {ending} at "
                    f"{locate(self._current.of(number))}; use fewer if it ran out of memory, or "
                    "dataset.workers=0, which may show the error itself"
                )
        return None

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


def ignore_signals(worker: int) -> None:
    """Make a new worker ignore signals that stop a run."""
    for number in _STOPPING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)  # Those that came before are gone now.


@contextmanager
def _block_signals() -> Iterator[None]:
    """Block signals, which could end a new worker before it has come to `ignore_signals`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _kill(processes: list[Any], done: Any) -> None:
    """Kill the workers that still run, and wait until they have ended."""
    with _keep_child_handler(signal.SIG_DFL):
        for process in processes:
            process.kill()
            process.join()
    if done is not None:
        # A worker killed while it looks at the event keeps its lock, and torch sets it later.
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
