"""Trains configurations with the code of one checkout and prints the numbers of each, a line a run.

python train.py CHECKOUT '["name", ...]'      started by run.py, with CHECKOUT on the path
"""

import hashlib
import json
import logging
import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torchvision  # noqa: F401 (imported once, for all forks)
from configurations import Configuration, configurations
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

LIMIT = 300  # seconds a run may take; none takes a tenth of it
# Parts of tags, of keys of the summary and of places in a checkpoint that hold times or memory.
_MEASURED = (
    *("seconds", "per_second", "speed/", "memory", "step_times", "throughput", "curves"),
    "folder",
)


def main() -> None:
    """Train the named configurations one after the other."""
    checkout, names = Path(sys.argv[1]), json.loads(sys.argv[2])
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # It warns of every resumed run.
    by_name = {configuration.name: configuration for configuration in configurations()}
    for number, name in enumerate(names):
        folder = Path(f"{number}")
        try:
            _train(checkout, by_name[name], folder)
            numbers = dict(_numbers(folder))
        except Exception as error:
            numbers = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(numbers), flush=True)


def _train(checkout: Path, configuration: Configuration, folder: Path) -> None:
    """Train in forked processes, one for each rank; twice if the run is to be resumed."""
    options = [*_words_of(checkout, configuration.options), f"hydra.run.dir={folder}"]
    if configuration.resumed:
        # Without a schedule: a longer plan would change the learning rate.
        options.append("scheduler=none")
        _run_ranks(checkout, [*options, "trainer.max_steps=6"], configuration.ranks)
        options.append("resume=auto")
    _run_ranks(checkout, options, configuration.ranks)


def _words_of(checkout: Path, options: Sequence[str]) -> list[str]:
    """The options as a checkout takes them: a small size was an experiment of its own."""
    if "+size=small" not in options or not list((checkout / "conf/experiment").glob("gpt_small*")):
        return list(options)
    words = (word for word in options if word != "+size=small")
    return [f"{word}_small" if word.startswith("experiment=") else word for word in words]


def _run_ranks(checkout: Path, options: list[str], size: int) -> None:
    port = _free_port()
    ranks = [_fork(checkout, options, rank, size, port) for rank in range(size)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in ranks]
    if any(codes):
        said = Path(f"{port}.log").read_text().strip().splitlines()
        raise RuntimeError(f"exit codes {codes}: {said[-1] if said else 'no word'}")


def _fork(checkout: Path, options: list[str], rank: int, size: int, port: int) -> int:
    """Start one rank; its id."""
    process = os.fork()
    if process:
        return process
    signal.alarm(LIMIT)
    if size > 1:
        os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{size}"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": f"{port}"}
    code = 1
    try:
        said = os.open(f"{port}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(said, 1)
        os.dup2(said, 2)
        code = _program(checkout, options)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _program(checkout: Path, options: list[str]) -> int:
    """Run `scripts/train.py` as the command line does; its exit code."""
    script = checkout / "scripts" / "train.py"
    sys.argv = [str(script), *options]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def _free_port() -> int:
    with socket.socket() as own:
        own.bind(("localhost", 0))
        port: int = own.getsockname()[1]
        return port


def _numbers(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield each number of a run's folder, or a digest of a tensor, by its place."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    for tag in filter(_is_a_result, events.Tags()["scalars"]):
        yield from ((f"{tag}@{e.step}", e.value.hex()) for e in events.Scalars(tag))
    summary = json.loads((folder / "summary.json").read_text())
    yield from ((f"summary/{key}", summary[key]) for key in filter(_is_a_result, summary))
    newest = max((folder / "checkpoints").glob("step_*"))
    for file in sorted(newest.glob("*.pt")):
        found = _tensors(torch.load(file, weights_only=True), file.stem)
        yield from ((place, value) for place, value in found if _is_a_result(place))


def _is_a_result(place: str) -> bool:
    return not any(part in place for part in _MEASURED)


def _tensors(state: Any, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(state, dict):
        for key, value in state.items():
            yield from _tensors(value, f"{place}/{key}")
    elif isinstance(state, list | tuple):
        for number, value in enumerate(state):
            yield from _tensors(value, f"{place}/{number}")
    elif isinstance(state, torch.Tensor):
        values = state.detach().contiguous().view(-1)
        raw = values.view(torch.uint8) if values.numel() else values
        yield place, f"{state.dtype} {list(state.shape)} {hashlib.sha256(raw.numpy()).hexdigest()}"


if __name__ == "__main__":
    main()
