"""Workers that crash, are killed or hang: named with what they were reading, and then gone."""

import errno
import gc
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from time_limit import time_limit
from torch.utils.data import Dataset
from torch.utils.data._utils import signal_handling

from mpframe.core.errors import ConfigError, DataError
from mpframe.data import Loader
from mpframe.data import loading as loader_module
from mpframe.data.workers import WorkerPool, ignore_signals, require_workers

# From Python 3.12 on, starting a worker by fork beside torch's own threads warns.
pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)


def no_such_picture() -> None:
    raise KeyError("no such picture\nmore words")


def signal_oneself(*signals: signal.Signals) -> None:
    for name in signals:
        os.kill(os.getpid(), name)


def forbid_files() -> None:
    os.close(free := os.dup(0))  # The lowest number that is free.
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (free, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )


SPRUNG: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "killed": lambda: signal_oneself(signal.SIGKILL),
    "ended": lambda: os._exit(3),
    "exit": lambda: sys.exit(4),
    "hangs": lambda: time.sleep(60),
    "stopped": lambda: signal_oneself(signal.SIGSTOP),
    "stopped late": lambda: (time.sleep(0.5), signal_oneself(signal.SIGSTOP)),
    "raises": no_such_picture,
    "signalled": lambda: signal_oneself(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1),
    "slow": lambda: time.sleep(0.2),
    "no files": forbid_files,
}


class Trap(Dataset[Any]):
    """Twelve samples; something happens while number 7 is read."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            SPRUNG[self.what]()
        return torch.tensor([float(index)]), index


class WholeBatches(Trap):
    def fetch_batch(self, indices: list[int]) -> Any:
        samples = [self[index] for index in indices]
        return torch.stack([inputs for inputs, _ in samples]), torch.tensor([t for _, t in samples])


def trapped(what: str, kind: type[Trap] = Trap, **options: Any) -> Loader:
    return Loader(kind(what), **{"batch_size": 3, "shuffle": False, "workers": 2, **options})


def message(loader: Loader) -> str:
    """The error of reading an epoch; nothing of it is kept."""
    try:
        list(loader.epoch(0))
    except DataError as error:
        return str(error)
    raise AssertionError("no DataError")


@pytest.fixture(autouse=True)
def _nobody_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # torch installs its handler once in a process: let it, in every test.
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    for module in ("loading", "workers"):
        monkeypatch.setattr(f"mpframe.data.{module}.POLL_SECONDS", 0.1)
    handler = signal.getsignal(signal.SIGCHLD)
    before = multiprocessing.active_children()
    yield
    assert [child for child in multiprocessing.active_children() if child not in before] == []
    assert signal.getsignal(signal.SIGCHLD) == handler


# Lost


@pytest.mark.parametrize(
    ("what", "split", "hint"),
    [
        (
            "killed",
            "training",
            "worker 0 was killed by SIGKILL at training sample 7 (epoch 0, batch 2); the system "
            "kills what uses too much memory: try fewer dataset.workers",
        ),
        (
            "ended",
            "validation",  # Shuffled: the batch is the sample's place in the order.
            "worker {worker} ended with exit code 3 at validation sample 7 (epoch 0, batch {batch}"
            "); dataset.workers=0 may show the error itself",
        ),
    ],
)
def test_a_worker_that_is_lost_is_named(what: str, split: str, hint: str, capfd: Any) -> None:
    loader = trapped(what, split=split, seed=5, shuffle=split == "validation")
    batch = next(n for n in range(4) if 7 in loader.batch_ids(0, n))
    text = hint.format(batch=batch, worker=batch % 2)
    assert message(loader) == f"dataset.workers=2: {text}"


@pytest.mark.parametrize(
    ("what", "kind", "first"), [("hangs", Trap, 7), ("stopped", WholeBatches, 6)]
)
def test_a_worker_that_hangs_is_named_and_killed(what: str, kind: type[Trap], first: int) -> None:
    """A dataset that makes whole batches is known to read one, by its first sample."""
    loader = trapped(what, kind, worker_timeout=1.0)
    assert message(loader) == (
        "trainer.timeout=1: no batch within 1 s; "
        f"worker 0 is at training sample {first} (epoch 0, batch 2); "
        "raise trainer.timeout, or fix what hangs"
    )
    assert not any(process.is_alive() for process in loader._pool._processes)


def test_a_worker_that_stops_before_its_batches_are_taken_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = WorkerPool.start

    def start_and_wait(pool: WorkerPool, batches: Any) -> Any:
        answers = start(pool, batches)
        stats = [Path(f"/proc/{p.pid}/stat") for p in multiprocessing.active_children()]
        while not any(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in stats):
            time.sleep(0.01)
        return answers

    monkeypatch.setattr(WorkerPool, "start", start_and_wait)
    # Late enough for the batch before to be on its way: to take it, its worker is asked.
    with time_limit(30):
        assert "worker 0 is at training sample 7 (epoch 0, batch 2)" in message(
            trapped("stopped late", worker_timeout=0.5)
        )


def test_a_wait_longer_than_a_poll_is_no_trouble() -> None:
    assert len(list(trapped("slow").epoch(0))) == 4


# Signals and ends


def test_a_signal_that_meets_a_worker_at_its_start_is_left_to_the_main_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def signalled(worker: int) -> None:
        SPRUNG["signalled"]()
        ignore_signals(worker)

    monkeypatch.setattr(loader_module, "ignore_signals", signalled)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert len(list(trapped("nothing").epoch(0))) == 4
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_signals_to_all_processes_are_left_to_the_main_one() -> None:
    read = torch.cat([targets for _, targets in trapped("signalled").epoch(0)])
    assert torch.equal(read, torch.arange(12))


def test_a_handler_of_ones_own_is_kept() -> None:
    def own(*_: Any) -> None:
        pass

    before = signal.signal(signal.SIGCHLD, own)
    try:
        list(trapped("nothing", workers=1).epoch(0))
        assert signal.getsignal(signal.SIGCHLD) is own
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_the_garbage_collector_ends_the_workers_before_torch_waits_for_them() -> None:
    """An error and its traceback hold a loader in such a cycle."""
    loader = trapped("nothing", batch_size=2)
    batches = loader.epoch(0)
    cycle: list[Any] = [loader, next(batches)]
    cycle.append(cycle)
    processes = list(loader._pool._processes)
    del loader, batches, cycle
    gc.collect()
    assert [process.exitcode for process in processes] == [-signal.SIGKILL] * 2


def keep_lock(done: Any) -> None:
    done._cond.acquire()
    signal_oneself(signal.SIGKILL)


def test_a_worker_that_died_while_it_looked_at_torchs_event_is_not_waited_for() -> None:
    """It holds the event's lock for ever. Another process stands for it here."""
    loader = trapped("nothing", batch_size=2)
    batches = loader.epoch(0)
    next(batches)
    dead = multiprocessing.get_context("fork").Process(target=keep_lock, args=(loader._pool._done,))
    dead.start()
    dead.join()
    processes = list(loader._pool._processes)
    with time_limit(30):
        del batches, loader
        gc.collect()
    assert [process.exitcode for process in processes] == [-signal.SIGKILL] * 2


# What a dataset raises


@pytest.mark.parametrize(
    ("workers", "kind", "named"), [(2, Trap, "sample 7"), (0, WholeBatches, "samples 6 to 8")]
)
def test_what_a_dataset_raises_is_one_line(workers: int, kind: type[Trap], named: str) -> None:
    try:
        list(trapped("raises", kind, workers=workers).epoch(0))
    except DataError as error:
        text, notes = str(error), error.__notes__
    line = Trap.__getitem__.__code__.co_firstlineno + 2
    where = line if kind is Trap else WholeBatches.fetch_batch.__code__.co_firstlineno + 1
    assert text == (
        f"dataset: {named} cannot be read: KeyError ('no such picture\\nmore words') at "
        f"test_workers.py:{where}; fix the dataset or its data"
    )
    # HYDRA_FULL_ERROR=1 shows the traceback, from wherever it came.
    assert "in no_such_picture" in notes[0]


def test_a_dataset_that_ends_the_program_is_an_error_like_any_other() -> None:
    text = message(trapped("exit"))
    assert text.startswith("dataset: sample 7 cannot be read: SystemExit (4) at test_workers")


def test_a_dataset_that_cannot_be_sent_is_named() -> None:
    """Where workers are not forked the dataset is pickled."""
    loader = trapped("nothing", workers=1)
    loader._batches.dataset._dataset.transform = lambda image: image  # type: ignore[attr-defined]
    method = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    try:
        text = message(loader)
    finally:
        multiprocessing.set_start_method(method, force=True)
    assert text.startswith(
        "dataset.workers=1: the dataset cannot be sent to a worker (Can't pickle"
    )
    assert text.endswith("no lambdas, local classes or open files, or use dataset.workers=0")


# More workers than the machine can have


def test_more_workers_than_memory_or_cores_hold(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    pages = {"SC_PHYS_PAGES": 2**20, "SC_PAGE_SIZE": 2**12}  # 4 GiB: 64 pairs of 32 MiB.
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    require_workers(2)
    assert not caplog.records
    require_workers(64)
    assert [record.getMessage() for record in caplog.records] == [
        "warning: dataset.workers=64: this machine has 2 cores; more workers wait for each other"
    ]
    with pytest.raises(ConfigError) as caught:
        require_workers(65)
    assert str(caught.value) == (
        "dataset.workers=65: this machine's memory holds 64 for training and as many for "
        "validation; use 2, its cores, or fewer"
    )
    trapped("nothing", workers=1000)  # And torch says nothing of its own.


STARTED = "dataset.workers=2: a worker cannot be started (Too many open files); "
RECEIVED = "dataset.workers=2: too many open files; "
FEWER = "use fewer, or allow more open files (ulimit -n)"

# torch's iterator that was made in half fails when it is collected.
made_in_half = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def test_a_worker_that_can_open_no_file_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    """It hands its batches over in files."""
    assert message(trapped("no files", worker_timeout=5)) == RECEIVED + FEWER
    assert "Traceback" not in capfd.readouterr().err


def test_a_main_process_that_can_open_no_file_is_named() -> None:
    loader = trapped("nothing")
    batches, limits = loader.epoch(0), resource.getrlimit(resource.RLIMIT_NOFILE)
    next(batches)
    forbid_files()
    try:
        list(batches)
        text = ""
    except DataError as error:
        text = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert text == RECEIVED + FEWER


@made_in_half
def test_a_worker_that_is_started_before_another_cannot_be_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ignores the SIGTERM of a program's end, which would wait for it for ever."""
    start, started = multiprocessing.Process.start, []

    def once(process: Any) -> None:
        if started:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        start(process)
        started.append(process)

    monkeypatch.setattr(multiprocessing.Process, "start", once)
    assert message(trapped("nothing")) == STARTED + FEWER
    ended = [process.exitcode for process in started]
    for process in started:
        process.kill()
    gc.collect()  # torch's iterator, while its failure is passed over.
    assert ended == [-signal.SIGKILL]


@pytest.mark.slow
@made_in_half
def test_too_few_open_files_are_named_and_leave_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    """At whichever file the limit is met: no traceback, of a worker's threads neither."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    met, before = set(), set(multiprocessing.active_children())
    for more in range(5, 80, 5):
        loader = trapped("nothing", worker_timeout=5)
        used = set(map(int, os.listdir("/proc/self/fd")))
        free = [number for number in range(limits[0]) if number not in used]
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[more], limits[1]))
        try:
            met.add(message(loader))
        except AssertionError:
            met.add("")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        loader.close()
        del loader
        gc.collect()
        assert set(multiprocessing.active_children()) <= before
    assert met == {STARTED + FEWER, RECEIVED + FEWER, ""}
    assert "Traceback" not in capfd.readouterr().err
