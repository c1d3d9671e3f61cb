"""Trains short runs with the code of one checkout, and prints a line a run: nothing, or its error.

python train.py CHECKOUT '[[options, ranks, resumed], ...]'    started by run.py
"""

import json
import logging
import os
import runpy
import signal
import socket
import sys
import traceback
from pathlib import Path

import torch  # noqa: F401 (imported once, for all forks)
import torchvision  # noqa: F401


def main() -> None:
    script = Path(sys.argv[1]) / "scripts" / "train.py"
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # It warns of every resumed run.
    for number, (options, ranks, resumed) in enumerate(json.loads(sys.argv[2])):
        words = [*options, f"hydra.run.dir={number}"]
        said = ""
        if resumed:  # Without a schedule: a longer plan would change the learning rate.
            words.append("scheduler=none")
            said = _run_ranks(script, [*words, "trainer.max_steps=6"], ranks)
            words.append("resume=auto")
        print(said or _run_ranks(script, words, ranks), flush=True)


def _run_ranks(script: Path, options: list[str], size: int) -> str:
    """Train in forked processes, one for each rank; what went wrong."""
    with socket.socket() as own:
        own.bind(("localhost", 0))
        port = own.getsockname()[1]
    ranks = [_fork(script, options, rank, size, port) for rank in range(size)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in ranks]
    lines = Path(f"{port}.log").read_text().strip().splitlines()
    return f"exit codes {codes}: {lines[-1] if lines else 'no word'}" if any(codes) else ""


def _fork(script: Path, options: list[str], rank: int, size: int, port: int) -> int:
    """Start one rank, which runs the script as the command line does; its id."""
    if process := os.fork():
        return process
    signal.alarm(300)  # None takes a tenth of these seconds.
    if size > 1:
        os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{size}"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": f"{port}"}
    code = 1
    try:
        said = os.open(f"{port}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(said, stream)
        sys.argv = [str(script), *options]
        runpy.run_path(str(script), run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
