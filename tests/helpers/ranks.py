"""Ranks on this machine: processes that take one function after another, all of them the same.

They come from a server that has loaded torch once. This process keeps the store in which they find
each other, as torchrun's agent does.
"""

import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist
from fork_server import CONTEXT

CRASHES = (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS)


class Ranks:
    """Calls a function on every rank.

    A thread of gloo crashes once in many thousand calls. Such a rank is started again with the
    others, and the call is made once more. That a test kills a rank is seen by `results`.
    `scratch`, their folder for temporary files, goes with them.
    """

    def __init__(self, size: int) -> None:
        self._scratch = TemporaryDirectory()
        self.scratch = Path(self._scratch.name)
        self._size = size
        self._start()

    def _start(self) -> None:
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.processes, self._pipes = [], []
        for rank in range(self._size):
            ours, theirs = CONTEXT.Pipe()
            place = (theirs, rank, self._size, self._store.port, self.scratch)
            process = CONTEXT.Process(target=_work, args=place, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def __call__(self, function: Callable[..., Any], *arguments: Any, within: float = 240) -> Any:
        """What each rank returned, in their order; a rank that raised gives the error's text."""
        try:
            self.begin(function, *arguments)
            results = self.results(within)
        except (AssertionError, BrokenPipeError):
            if not self._crashed():
                raise
            results = []
        if not self._crashed():
            return results
        codes = [process.exitcode for process in self.processes]
        print(f"ranks: a crash ended one of them {codes}; the call is made again", file=sys.stderr)
        self._kill()
        self._start()
        self.begin(function, *arguments)
        return self.results(within)

    def begin(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Start the call on every rank."""
        for pipe in self._pipes:
            pipe.send((function, arguments))

    def results(self, within: float = 240) -> list[Any]:
        """What each rank returned; None for one that was killed."""
        return [self.results_of(rank, within) for rank in range(self._size)]

    def results_of(self, rank: int, within: float = 240) -> Any:
        """What one rank returned."""
        pipe = self._pipes[rank]
        assert pipe.poll(within), f"no rank may take longer than {within} s"
        try:
            failed, value = pipe.recv()
        except (EOFError, ConnectionResetError):
            self.processes[rank].join()  # So that its exit code is known.
            return None
        assert not failed, value
        return value

    def close(self) -> None:
        self._kill()
        self._scratch.cleanup()

    def _crashed(self) -> bool:
        """Whether a fault in compiled code has ended a rank; a test's SIGKILL is none."""
        return any(process.exitcode in CRASHES for process in self.processes)

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@contextmanager
def ranks(size: int = 2) -> Iterator[Ranks]:
    """So many ranks within the block."""
    own = Ranks(size)
    try:
        yield own
    finally:
        own.close()


def _work(pipe: Connection, rank: int, size: int, port: int, scratch: Path) -> None:
    tempfile.tempdir = str(scratch)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    while True:
        function, arguments = pipe.recv()
        try:
            pipe.send((False, function(*arguments)))
        except BaseException:
            pipe.send((True, traceback.format_exc()))
