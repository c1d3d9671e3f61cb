"""Saves a checkpoint whole or not at all, and reads it verified and without running any code.

It is written under a hidden name, synced to the disk, and renamed. After a kill, a full disk or a
power cut at any moment the older checkpoints are complete, and the new one is complete or absent.
torch.load does not notice a flipped bit, so each file is compared with the manifest first.

Ranks that save or read together work side by side, and wait for the slowest as long as it answers.
"""

import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from mpframe.checkpoint.folder import (
    CONFIG,
    MANIFEST,
    STATE,
    Manifest,
    entry_of,
    hidden_path,
    newest,
    parts_of,
    path_of,
    step_of,
)
from mpframe.checkpoint.parts import leave_in_file, put_together, split_off_parts
from mpframe.checkpoint.state import Snapshot
from mpframe.checkpoint.untrusted import load_untrusted, raise_as_damaged
from mpframe.core.comm import SINGLE_PROCESS, Comm
from mpframe.core.errors import CheckpointError
from mpframe.files.durable import sync_file, sync_folder, sync_paths
from mpframe.files.plain_file import read_regular

log = logging.getLogger(__name__)

T = TypeVar("T")
Entry = dict[str, Any]  # of a file in the manifest
_LARGEST_CONFIG = 2**20  # bytes
_PULSE = 0.2  # seconds between two answers of a rank that works on files
_LONG = 60.0  # seconds after which the log names the ranks that the others wait for


def save(folder: Path, snapshot: Snapshot) -> Path:
    """Save a checkpoint in a run's folder, replace one of the same step, and return its folder.

    CheckpointError: it could not be written or loaded again. The older ones are complete.
    """
    return save_as(path_of(folder, snapshot.global_step), snapshot)


def prepare_together(
    folder: Path, snapshot: Snapshot, comm: Comm, copied: bool
) -> Callable[[], object]:
    """Return a function that saves a checkpoint of ranks that each hold parts of the state.

    All ranks of `comm` call this and the function, and must see rank 0's folder. Each writes its
    parts, and rank 0 also its state without sharded tensors, `copied` to the host first so that
    training may continue meanwhile. CheckpointError, on all ranks: one of them could not write.
    """
    final: Path = comm.broadcast_object(path_of(folder, snapshot.global_step))
    state, parts = split_off_parts(snapshot.state, copied)
    rest = replace(snapshot, state=state)
    return partial(save_as, final, rest.to_cpu() if copied else rest, parts, comm)


def save_as(final: Path, rest: Snapshot, parts: Any = None, comm: Comm = SINGLE_PROCESS) -> Path:
    """Save each rank's parts of a state and, on rank 0, the rest. Raises as `save` does."""
    new, name = hidden_path(final, "new"), parts_of(comm.rank)

    def begin() -> None:
        if comm.is_main:
            final.parent.mkdir(exist_ok=True)
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()

    def write_parts() -> Entry | None:  # A replica has none.
        return _write_file(new / name, lambda file: torch.save(parts, file)) if parts else None

    def finish() -> None:
        if comm.is_main:
            _write_rest(new, rest, files)
            sync_paths([final.parents[1] / record for record in rest.facts.get("records", ())])
            put_in_place(new, final)

    try:
        _on_all(comm, final, begin)
        entries = _on_all(comm, final, write_parts)
        files = {parts_of(rank): entry for rank, entry in enumerate(entries) if entry is not None}
        _on_all(comm, final, finish)
    except CheckpointError:
        if comm.is_main:
            shutil.rmtree(new, ignore_errors=True)
        raise
    return final


def _on_all(comm: Comm, final: Path, work: Callable[[], T]) -> list[T]:
    """Write on all ranks. A CheckpointError names the checkpoint."""

    def write() -> T:
        try:
            return work()
        except (OSError, RuntimeError) as error:
            # If a write fails, torch's writer raises another error in the place of that one.
            cause = error if isinstance(error, OSError) else error.__context__
            if not isinstance(cause, OSError):
                raise
            raise CheckpointError(
                f"checkpoint {final} could not be written ({cause.strerror or cause}); "
                "older checkpoints are whole: free space or choose another hydra.run.dir"
            ) from error

    return on_all(comm, write, f"writing checkpoint {final}")


def _write_rest(folder: Path, snapshot: Snapshot, files: Mapping[str, Entry]) -> None:
    """Write the state, the options and the manifest beside `files`, which are there already."""
    files = {
        **files,
        STATE: _write_file(folder / STATE, lambda file: torch.save(snapshot.state, file)),
        CONFIG: _write_file(folder / CONFIG, lambda file: file.write(snapshot.config.encode())),
    }
    load_untrusted(folder / STATE, mapped=True)  # Reads no tensor, and refuses objects early.
    manifest = Manifest(files, snapshot.facts).text().encode()
    _write_file(folder / MANIFEST, lambda file: file.write(manifest))
    sync_folder(folder)


def _write_file(path: Path, write: Callable[[Any], object]) -> Entry:
    """Write a file to the disk, and return its size and digest."""
    with path.open("w+b") as file:
        write(file)
        sync_file(file)
        file.seek(0)
        return entry_of(file)


def put_in_place(new: Path, final: Path) -> None:
    """Give a written folder its name, in the place of another one."""
    replaced = hidden_path(final, "replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        final.rename(replaced)  # A folder cannot be renamed over another (see folder.tidy).
    new.rename(final)
    sync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def load(path: Path, comm: Comm = SINGLE_PROCESS) -> dict[str, Any]:
    """Return the verified state of a checkpoint, on the CPU (see `read`)."""
    return read(path, comm).state


def read(path: Path, comm: Comm = SINGLE_PROCESS) -> Snapshot:
    """Read and verify a checkpoint, or the newest of a run's folder, with its tensors on the CPU.

    Each rank of `comm` verifies some of the files. If they divide the weights, tensors that are
    divided stay in the files (see `parts.Pieces`). CheckpointError, on all ranks: there is none, it
    is damaged, of another format, or holds code.
    """
    final, doing = comm.broadcast_object(newest(path)), f"reading checkpoint {path}"
    manifest, *_ = on_all(comm, lambda: _verify(final, comm), doing)
    found, in_parts = list[Snapshot](), comm.sharding is not None
    on_all(comm, lambda: found.append(_read(final, manifest, in_parts)), doing)
    return found[0]


def _verify(path: Path, comm: Comm) -> Manifest:
    """Return the manifest of a checkpoint, and verify this rank's share of the files."""
    manifest = Manifest.read(path)
    try:
        manifest.verify(path, comm.rank, comm.size)
    except CheckpointError as error:
        raise CheckpointError(f"rank {comm.rank}: {error}" if comm.size > 1 else error) from None
    return manifest


def _read(path: Path, manifest: Manifest, in_parts: bool) -> Snapshot:
    """Read the files of a checkpoint that were verified."""
    with raise_as_damaged(path / CONFIG, "not text"):
        config = read_regular(path / CONFIG, _LARGEST_CONFIG).decode()
    parts = sorted(manifest.files.keys() - {STATE, CONFIG})
    with raise_as_damaged(path / STATE, "not a saved state"):
        state = load_untrusted(path / STATE, mapped=in_parts and not parts)
        if not isinstance(state, dict):
            kind = type(state).__name__
            raise CheckpointError(f"{path / STATE}: holds a {kind}, not a run's state")
        if in_parts and not parts:
            state = leave_in_file(state)
    if parts:
        put_together(state, [path / name for name in parts], in_parts)
    return Snapshot(step_of(path), state, config, manifest.facts)


def on_all(comm: Comm, work: Callable[[], T], doing: str) -> list[T]:
    """Work on all ranks, and return their results. If it fails on one, all raise its error.

    With several ranks it runs in another thread. Meanwhile the ranks answer each other, so that
    `trainer.timeout` ends only those that are lost, and not those with a slow file system.
    """
    if comm.size == 1:
        return [work()]

    def attempt() -> tuple[T | None, str | None]:
        try:
            return work(), None
        except CheckpointError as error:
            return None, str(error)

    thread, began, limit = ThreadPoolExecutor(1), time.monotonic(), _LONG
    working, ends = thread.submit(attempt), list[Any]([None])
    thread.shutdown(wait=False)
    while None in ends:
        wait([working], _PULSE)
        end = working.result() if working.done() else None
        ends = comm.broadcast_object(comm.gather_object(end))
        late = ", ".join(str(rank) for rank, end in enumerate(ends) if end is None)
        seconds = time.monotonic() - began
        if late and seconds > limit:
            limit *= 2
            log.warning("warning: rank %s: still %s after %d s", late, doing, seconds)
    for _, error in ends:
        if error is not None:
            raise CheckpointError(error)
    return [done for done, _ in ends]
