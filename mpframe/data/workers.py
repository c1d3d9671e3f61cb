"""Worker processes that load data, watched: one that crashes, is killed or hangs is named.

Each worker writes the sample it is reading into a slot of shared memory. When it ends by itself, or
gives no batch for too long, its slot says what it was reading, whatever became of it.

Left alone, torch raises from a signal handler wherever the main process stands, in the middle of a
step or of a file. Here a lost worker is seen where its batch is waited for, between two steps. A
signal that is sent to all processes of a job (Ctrl-C, a scheduler's SIGTERM) is the main process's
to answer: workers ignore it, and are killed when their loader or the program ends.
"""

import ctypes
import logging
import math
import multiprocessing
import os
import pickle
import signal
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.util import Finalize
from time import monotonic, sleep
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from mpframe.errors import ConfigError, DataError
from mpframe.user_code import first_line

log = logging.getLogger(__name__)

_NONE = -1
_SIGKILLED = -9
POLL_SECONDS = 1.0
"""How often a wait for a batch looks whether the workers are alive."""


WORKER_BYTES = 2**25
"""The least that a worker takes beside what it shares with the main process."""


def require_workers(workers: int) -> None:
    """Refuse more workers than memory can hold, and warn of more than there are cores.

    Args:
        workers: of the training data; validation has as many of its own.

    Raises:
        ConfigError: they would take more than the machine's memory.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = _memory()
    if 2 * workers * WORKER_BYTES > memory:
        raise ConfigError(
            f"dataset.workers={workers}: this machine's memory holds "
            f"{memory // (2 * WORKER_BYTES)} for training and as many for validation; use {cores}, "
            "its cores, or fewer"
        )
    if workers > (cores or workers):
        log.warning(
            "warning: dataset.workers=%d: this machine has %d cores; more workers wait for each "
            "other",
            workers,
            cores,
        )


def _memory() -> float:
    """The machine's memory in bytes; infinite where it does not tell."""
    if not hasattr(os, "sysconf"):
        return math.inf
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Slots:
    """Which sample each worker is reading.

    Args:
        workers: how many there are.
    """

    def __init__(self, workers: int) -> None:
        self._reading = multiprocessing.RawArray(ctypes.c_int64, [_NONE] * workers)

    def note(self, index: int = _NONE) -> None:
        """Called in a worker: it is reading sample `index`, or none."""
        worker = get_worker_info()
        if worker is not None:
            self._reading[worker.id] = index

    def of(self, worker: int) -> int | None:
        """The sample a worker was last reading; None where it was waiting."""
        return None if self._reading[worker] == _NONE else self._reading[worker]

    def __len__(self) -> int:
        return len(self._reading)


@dataclass(frozen=True)
class Place:
    """Where in an epoch a sample stands.

    Attributes:
        split: what the samples are for.
        epoch: its number.
        order: [N] the samples' indices in the order they are read.
        batch_size: samples per batch.
    """

    split: str
    epoch: int
    order: Tensor
    batch_size: int

    def of(self, index: int | None) -> str:
        """Words for a sample."""
        if index is None:
            return f"no sample ({self.split}, epoch {self.epoch})"
        batch = int((self.order == index).nonzero()[0]) // self.batch_size
        return f"{self.split} sample {index} (epoch {self.epoch}, batch {batch})"


class Crew:
    """The workers of one loader.

    Args:
        slots: where they say what they read.
        timeout: seconds to wait for a batch; None waits for ever.
    """

    def __init__(self, slots: Slots, timeout: float | None) -> None:
        self._slots = slots
        self._timeout = timeout
        self._processes: list[Any] = []
        self._until = math.inf  # When the wait for a batch is over, by `monotonic`.
        self._cut_short = False

    def start(self, batches: DataLoader[Any]) -> Iterator[Any]:
        """Begin an epoch: `iter(batches)`, and the workers where there are none yet.

        Raises:
            DataError: the system starts no more processes, or they cannot be sent the dataset.
        """
        try:
            with _child_handler_kept(), warnings.catch_warnings():
                # torch's advice on what cannot be pickled; the error that follows says it here.
                warnings.filterwarnings("ignore", "Got pickle error")
                answers = iter(batches)
        except OSError as error:
            raise DataError(
                f"dataset.workers={len(self._slots)}: a worker cannot be started "
                f"({error.strerror}); use fewer"
            ) from error
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise DataError(
                f"dataset.workers={len(self._slots)}: the dataset cannot be sent to a worker "
                f"({first_line(error)}); let it hold no lambdas, local classes or open files, or "
                "use dataset.workers=0"
            ) from error
        if not self._processes and len(self._slots):
            self._processes = list(getattr(answers, "_workers", []))
            # Not atexit: a process of multiprocessing ends without it, and would wait for ever
            # for workers that ignore its SIGTERM. This runs before that wait, in any process.
            Finalize(None, _end, args=(self._processes,), exitpriority=100)
            if self._timeout is not None and self._processes:
                threading.Thread(target=_watch, args=(weakref.ref(self),), daemon=True).start()
        return answers

    def next_of(self, answers: Iterator[Any], place: Place) -> Any:
        """The next answer.

        Raises:
            DataError: a worker ended by itself, or none answered in time; all are ended.
        """
        self._until = until = math.inf if self._timeout is None else monotonic() + self._timeout
        while True:
            try:
                answer = next(answers)
                self._until = math.inf
                return answer
            except (
                RuntimeError,
                OSError,
                EOFError,
            ) as error:  # The last two: a broken pipe to one.
                timed_out = "timed out" in str(error)
                trouble = None if self._cut_short else self._lost(place, timed_out)
                trouble = trouble or self._late(until, place)
                if trouble is None and not timed_out:
                    raise
            if trouble is not None:
                self._until = math.inf
                _end(self._processes)
                raise DataError(trouble)

    def overdue(self) -> bool:
        """Whether the wait for a batch is over, and whoever waits has not noticed."""
        return monotonic() > self._until + 2 * POLL_SECONDS

    def cut_short(self) -> None:
        """End a wait from outside: nobody can wait for a worker that is gone."""
        self._cut_short = True
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        """End the workers; an epoch begun later has none."""
        _end(self._processes)

    def _lost(self, place: Place, timed_out: bool) -> str | None:
        """What to say where a worker has ended by itself, or is ending."""
        for number, process in enumerate(self._processes):
            process.join(0.0 if timed_out else POLL_SECONDS)
            code = process.exitcode
            if code is not None:
                hint = (
                    "the system kills what uses too much memory: try fewer dataset.workers"
                    if code == _SIGKILLED
                    else "dataset.workers=0 may show the error itself"
                )
                return (
                    f"dataset.workers={len(self._slots)}: worker {number} {_ending(code)} at "
                    f"{place.of(self._slots.of(number))}; {hint}"
                )
        return None

    def _late(self, until: float, place: Place) -> str | None:
        """What to say where the time to wait is over."""
        if monotonic() < until:
            return None
        reading = [(n, self._slots.of(n)) for n in range(len(self._slots))]
        places = [f"worker {n} is at {place.of(i)}" for n, i in reading if i is not None]
        return (
            f"dataset.worker_timeout={self._timeout:g}: no batch within {self._timeout:g} s; "
            f"{', '.join(places) or 'no worker is reading'}; raise dataset.worker_timeout, or mend "
            "what hangs"
        )


def _watch(crew_of: Callable[[], Crew | None]) -> None:
    """Ends a wait that has no end of its own, as long as there is a crew.

    A batch is handed over by its worker. Where that is stopped before the batch is taken, the wait
    is within the operating system, and no timeout of the loader's reaches it.
    """
    while (crew := crew_of()) is not None:
        if crew.overdue():
            crew.cut_short()
            return
        del crew
        sleep(POLL_SECONDS)


def ignore_signals(worker: int) -> None:
    """Called in a new worker: leave what asks a run to stop to the main process."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(name, signal.SIG_IGN)


def _end(processes: list[Any]) -> None:
    """Kill the workers that are left, and wait until they are gone."""
    with _child_handler_kept(signal.SIG_DFL):
        for process in processes:
            process.kill()
            process.join()


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal.Signals(-code).name}"


@contextmanager
def _child_handler_kept(within: Any = None) -> Iterator[None]:
    """After the block the handler of SIGCHLD is the one before it; within it, `within` if given."""
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
