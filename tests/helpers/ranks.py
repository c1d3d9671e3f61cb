"""Ranks on this machine: processes that take one function after another, all of them the same.

They come from a server that has loaded torch once. This process keeps the store in which they find
each other, as torchrun's agent does.
"""

import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
from processes import CONTEXT

PATIENCE = float(os.environ.get("RANKS_PATIENCE", "240"))  # seconds until a rank must answer
CRASHES = (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS)


class Ranks:
    """Calls a function on every rank.

    A thread of gloo crashes once in many thousand calls. Such a rank is started again with the
    others, and the call is made once more. That a test kills a rank is seen by `results`.
    `scratch`, their folder for temporary files, goes with them.
    """

    def __init__(self, size: int) -> None:
        self._folder, self._size = tempfile.TemporaryDirectory(), size
        self.scratch = Path(self._folder.name)
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

    def __call__(
        self, function: Callable[..., Any], *arguments: Any, within: float = PATIENCE
    ) -> Any:
        """What each rank returned, in their order; a rank that raised gives the error's text."""
        try:
            self.begin(function, *arguments)
            results = self.results(within)
            if not self._crashed():
                return results
        except (AssertionError, BrokenPipeError):
            if not self._crashed():
                self._restart()  # The next call would get their answers to this one.
                raise
        codes = [process.exitcode for process in self.processes]
        print(f"ranks: a crash ended one of them {codes}; the call is made again", file=sys.stderr)
        self._restart()
        self.begin(function, *arguments)
        return self.results(within)

    def begin(self, function: Callable[..., Any], *arguments: Any) -> None:
        for pipe in self._pipes:
            pipe.send((function, arguments))

    def results(self, within: float = PATIENCE) -> list[Any]:
        return [self.results_of(rank, within) for rank in range(self._size)]

    def results_of(self, rank: int, within: float = PATIENCE) -> Any:
        """What one rank returned; None if it was killed."""
        pipe = self._pipes[rank]
        assert pipe.poll(within), f"no rank may take longer than {within} s"
        try:
            failed, value = pipe.recv()
        except (EOFError, ConnectionResetError):
            self.processes[rank].join()  # So that its exit code is known.
            return None
        assert not failed, value
        return value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._kill()
        self._folder.cleanup()

    def _crashed(self) -> bool:
        """A test's SIGKILL is none."""
        return any(process.exitcode in CRASHES for process in self.processes)

    def _restart(self) -> None:
        self._kill()
        self._start()

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


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
