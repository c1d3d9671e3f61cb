"""Workers that crash, are killed or hang: named with what they were reading, and then gone."""

import errno
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from fixtures import Patch, forks, time_limit
from own_parts import Made
from torch import Tensor
from torch.utils.data import default_collate
from torch.utils.data._utils import signal_handling

from mpframe.core.errors import DataError
from mpframe.data import Loader
from mpframe.data import loading as loader_module
from mpframe.data.workers import ignore_signals

pytestmark = forks


def no_such_picture() -> None:
    raise KeyError("no such picture\nmore words")


def signal_oneself(*signals: int) -> None:
    for number in signals:
        os.kill(os.getpid(), number)


SPRUNG: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "killed": lambda: signal_oneself(signal.SIGKILL),
    "ended": lambda: os._exit(3),
    "exit": lambda: sys.exit(4),
    "hangs": lambda: time.sleep(60),
    "raises": no_such_picture,
    "signalled": lambda: signal_oneself(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1),
}


class WholeBatches(Made):
    def fetch_batch(self, indices: list[int]) -> Any:
        return default_collate([self[index] for index in indices])


def trapped(what: Any, kind: type[Made] = Made, **options: Any) -> Loader:
    """Twelve samples; something happens while number 7 is read."""

    def read(index: int) -> tuple[Tensor, int]:
        if index == 7:
            SPRUNG[what]()
        return torch.tensor([float(index)]), index

    given = {"batch_size": 3, "shuffle": False, "workers": 2, **options}
    return Loader(kind(read, 12), **given)


def message(batches: Iterable[Any]) -> str:
    """The error of reading an epoch and its notes; no frame is kept, as pytest.raises would."""
    try:
        list(batches)
    except DataError as error:
        return "\n".join([str(error), *getattr(error, "__notes__", [])])
    raise AssertionError("no DataError")


@pytest.fixture(autouse=True)
def _nobody_is_left_and_a_handler_is_kept(monkeypatch: Patch) -> Iterator[None]:
    # torch installs its handler once in a process: let it, in every test.
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    for module in ("loading", "workers"):
        monkeypatch.setattr(f"mpframe.data.{module}.POLL_SECONDS", 0.1)
    handler = signal.signal(signal.SIGCHLD, own := lambda *_: None)
    before = multiprocessing.active_children()
    yield
    assert [child for child in multiprocessing.active_children() if child not in before] == []
    assert signal.signal(signal.SIGCHLD, handler) is own


@pytest.mark.parametrize(("what", "split", "line"), [
    ("killed", "training", "was killed by signal 9"),
    ("ended", "validation", "ended with exit code 3"),
])  # fmt: skip
def test_a_worker_that_is_lost_is_named(what: str, split: str, line: str) -> None:
    loader = trapped(what, split=split, seed=5, shuffle=split == "validation")
    batch = next(n for n in range(4) if 7 in loader.batch_ids(0, n))
    assert message(loader.epoch(0)) == (
        f"dataset.workers=2: worker {batch % 2} {line} at {split} sample 7 (epoch 0, batch {batch})"
        "; use fewer if it ran out of memory, or dataset.workers=0, which may show the error itself"
    )


@pytest.mark.parametrize(("kind", "first"), [(Made, 7), (WholeBatches, 6)])
def test_a_worker_that_hangs_is_named_and_killed(kind: type[Made], first: int) -> None:
    """A dataset that makes whole batches is known to read one, by its first sample."""
    # So long that on a busy machine the worker has begun to read.
    loader = trapped("hangs", kind, worker_timeout=1.5)
    assert message(loader.epoch(0)) == (
        "trainer.timeout=1.5: no batch within 1.5 s; worker 0 is at training sample "
        f"{first} (epoch 0, batch 2); raise trainer.timeout, or fix what hangs"
    )
    assert not any(process.is_alive() for process in loader._pool._processes)


def test_signals_to_all_processes_are_left_to_the_main_one(monkeypatch: Patch) -> None:
    """At a worker's start, before it can ignore them, as later."""
    signalled = lambda worker: (SPRUNG["signalled"](), ignore_signals(worker))  # noqa: E731
    monkeypatch.setattr(loader_module, "ignore_signals", signalled)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    read = torch.cat([targets for _, targets in trapped("signalled").epoch(0)])
    assert torch.equal(read, torch.arange(12))
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


@pytest.mark.parametrize("locked", [False, True])
def test_the_garbage_collector_ends_the_workers_before_torch_waits_for_them(locked: bool) -> None:
    """An error and its traceback hold a loader in such a cycle.

    locked: a worker has died while it looked at torch's event, whose lock it holds for ever.
    """
    loader = trapped("nothing", batch_size=2)
    batches = loader.epoch(0)
    cycle: list[Any] = [loader, next(batches)]
    cycle.append(cycle)
    processes, done = list(loader._pool._processes), loader._pool._done
    if locked:
        dead = multiprocessing.get_context("fork").Process(target=done._cond.acquire)
        dead.start()
        dead.join()
    with time_limit(30):
        del loader, batches, cycle, done
        gc.collect()
    assert [process.exitcode for process in processes] == [-signal.SIGKILL] * 2


RAISED, EXITED = (
    f"test_workers.py:{SPRUNG[what].__code__.co_firstlineno + more}"
    for what, more in (("raises", 1), ("exit", 0))
)


@pytest.mark.parametrize(
    ("what", "workers", "kind", "line"),
    [
        ("raises", 2, Made, rf"sample 7 .*: KeyError ('no such picture\nmore words') at {RAISED}"),
        ("raises", 0, WholeBatches, rf"samples 6 to 8 .* at {RAISED}"),
        ("exit", 2, Made, f"sample 7 .*: SystemExit (4) at {EXITED}"),
    ],
)
def test_what_a_dataset_raises_is_one_line(what: str, workers: int, kind: Any, line: str) -> None:
    begin, _, end = line.partition(" .*")
    text, *notes = message(trapped(what, kind, workers=workers).epoch(0)).split("\n")
    assert text.startswith(f"dataset: {begin} cannot be read: ")
    assert text.endswith(f"{end}; fix the dataset or its data")
    # HYDRA_FULL_ERROR=1 shows the traceback, from wherever it came.
    assert what == "exit" or "in no_such_picture" in "".join(notes)


def test_a_dataset_that_cannot_be_sent_to_a_worker_is_named(monkeypatch: Patch) -> None:
    spawn = multiprocessing.get_context("spawn")
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", spawn)
    text = message(trapped(lambda: None, workers=1).epoch(0))
    assert text.startswith("dataset.workers=1: a worker cannot be started (Can't ")


# torch's iterator that was made in half fails when it is collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_worker_that_is_started_before_another_cannot_be_is_killed(monkeypatch: Patch) -> None:
    """It ignores the SIGTERM of a program's end, which would wait for it for ever."""
    start, started = multiprocessing.Process.start, []

    def once(process: Any) -> None:
        if started:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        start(process)
        started.append(process)

    monkeypatch.setattr(multiprocessing.Process, "start", once)
    assert message(trapped("nothing").epoch(0)) == (
        "dataset.workers=2: a worker cannot be started ([Errno 24] Too many open files); use fewer"
        ", or 0 if the dataset cannot be pickled"
    )
    ended = [process.exitcode for process in started]
    started[0].kill()
    gc.collect()  # torch's iterator, while its failure is passed over.
    assert ended == [-signal.SIGKILL]
