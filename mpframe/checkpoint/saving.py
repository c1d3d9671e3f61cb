"""Saves a checkpoint whole or not at all, and reads it verified and without running any code.

It is written under a hidden name, synced to the disk, and renamed. After a kill, a full disk or a
power cut at any moment the older checkpoints are complete, and the new one is complete or absent.
torch.load does not notice a flipped bit, so each file is compared with the manifest first.
"""

import contextlib
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from mpframe.checkpoint.folder import (
    CONFIG,
    MANIFEST,
    STATE,
    HashingFile,
    Manifest,
    all_parts,
    hidden_path,
    newest,
    parts_of,
    path_of,
    refuse_mixed,
    step_of,
)
from mpframe.checkpoint.state import Snapshot, put_together, split_off_parts
from mpframe.checkpoint.untrusted import load_untrusted, raise_as_damaged
from mpframe.core.comm import Comm
from mpframe.core.errors import CheckpointError
from mpframe.files.durable import sync_file, sync_folder, sync_paths
from mpframe.files.plain_file import read_regular

T = TypeVar("T")
Entry = dict[str, Any]  # of a file in the manifest
Files = Mapping[str, Any]  # entries by name
_LARGEST_CONFIG = 2**20  # bytes
_CODE = "holds code, which is never run; a checkpoint is tensors, numbers, strings, lists and dicts"
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")


def save(folder: Path, snapshot: Snapshot) -> Path:
    """Save a checkpoint in a run's folder, replace one of the same step, and return its folder.

    CheckpointError: it could not be written or loaded again. The older ones are complete.
    """
    return save_as(path_of(folder, snapshot.global_step), snapshot, folder)


def save_as(final: Path, snapshot: Snapshot, run: Path | None = None) -> Path:
    """Save a snapshot as the folder `final`, whose parent may be missing. Raises as `save` does.

    First the records that its facts name, in the folder `run`, are synced to the disk.
    """
    try:
        with _naming_checkpoint(final):
            new = _make_new(final)
            _write(new, snapshot, {})
            if run is not None:
                _sync_records(run, snapshot)
            put_in_place(new, final)
    except CheckpointError:
        _give_up(final)
        raise
    return final


def save_together(folder: Path, snapshot: Snapshot, comm: Comm) -> Path:
    """Save a checkpoint of ranks that each hold and write parts of the state.

    All ranks of `comm` call this and must see rank 0's folder. Rank 0 also saves its state without
    sharded tensors. CheckpointError, on all ranks: one of them could not write.
    """
    final: Path = comm.broadcast_object(path_of(folder, snapshot.global_step))
    state, parts = split_off_parts(snapshot.state)
    new, name = hidden_path(final, "new"), parts_of(comm.rank)
    first = comm.rank * comm.sharding.replicas < comm.size  # The other replicas hold the same.

    def write_parts() -> Entry | None:
        return _write_file(new / name, lambda file: torch.save(parts, file)) if first else None

    def finish(files: Files) -> None:
        _write(new, replace(snapshot, state=state), files)
        _sync_records(folder, snapshot)
        put_in_place(new, final)

    _on_rank_0(comm, final, lambda: _make_new(final))
    entries = _on_all(comm, final, write_parts)
    files = {parts_of(rank): entry for rank, entry in enumerate(entries) if entry is not None}
    _on_rank_0(comm, final, lambda: finish(files))
    return final


def load(path: Path) -> dict[str, Any]:
    """Return the verified state of a checkpoint, on the CPU (see `read`)."""
    return read(path).state


def read(path: Path) -> Snapshot:
    """Read and verify a whole checkpoint, with its tensors on the CPU.

    path: a checkpoint's folder, or a run's folder, of which the newest checkpoint is read.

    CheckpointError: there is none, it is damaged, of another format, or holds code, or the folder
    has checkpoints of two runs.
    """
    if newest(path) != path:
        refuse_mixed(path)
    path = newest(path)
    manifest = Manifest.read(path)
    for name in (STATE, CONFIG):
        if name not in manifest.files:
            raise CheckpointError(f"{path / MANIFEST}: names no {name}; use an older one")
    manifest.verify(path)
    with raise_as_damaged(path / CONFIG, "not text"):
        config = read_regular(path / CONFIG, _LARGEST_CONFIG).decode()
    with raise_as_damaged(path / STATE, "not a saved state"):
        state = load_untrusted(path / STATE, _CODE)
        if not isinstance(state, dict):
            kind = type(state).__name__
            raise CheckpointError(f"{path / STATE}: holds a {kind}, not a run's state")
    if parts := all_parts(manifest.files):
        put_together(state, [path / name for name in parts])
    return Snapshot(step_of(path), state, config, manifest.facts)


class Background:
    """A thread for one piece of work at a time, whose errors are raised to the next caller."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Wait for the work before, raise its error if there was one, and start `work`."""
        self.wait()
        self._pending = self._threads.submit(work)

    def wait(self) -> None:
        """Wait for the work to end, and raise its error if there was one."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait, raise, and end the thread."""
        try:
            self.wait()
        finally:
            self._threads.shutdown()


def _on_all(comm: Comm, final: Path, work: Callable[[], T]) -> list[T | None]:
    """Work on all ranks and return all results. If one cannot write, all raise its error."""
    done, error = None, None
    try:
        with _naming_checkpoint(final):
            done = work()
    except CheckpointError as failure:
        error = str(failure)
    ends = comm.broadcast_object(comm.gather_object((done, error)))
    errors = [error for _, error in ends if error is not None]
    if errors:
        if comm.is_main:
            _give_up(final)
        raise CheckpointError(errors[0])
    return [done for done, _ in ends]


def _on_rank_0(comm: Comm, final: Path, work: Callable[[], object]) -> None:
    """Work on rank 0, for which the others wait."""
    _on_all(comm, final, work if comm.is_main else lambda: None)


@contextlib.contextmanager
def _naming_checkpoint(final: Path) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that names the checkpoint."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {final} could not be written ({error.strerror or error}); "
            "older checkpoints are whole: free space or choose another hydra.run.dir"
        ) from error


def _make_new(final: Path) -> Path:
    """Make the hidden folder in which a checkpoint is written."""
    new = hidden_path(final, "new")
    final.parent.mkdir(exist_ok=True)
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    return new


def _give_up(final: Path) -> None:
    shutil.rmtree(hidden_path(final, "new"), ignore_errors=True)


def _write(folder: Path, snapshot: Snapshot, others: Files) -> None:
    """Write the files of a checkpoint beside `others`, which are there already."""
    files = {
        **others,
        STATE: _write_file(folder / STATE, lambda file: torch.save(snapshot.state, file)),
        CONFIG: _write_file(folder / CONFIG, lambda file: file.write(snapshot.config.encode())),
    }
    _refuse_unreadable(folder / STATE)
    manifest = Manifest(files, snapshot.facts).text().encode()
    _write_file(folder / MANIFEST, lambda file: file.write(manifest))
    sync_folder(folder)


def _sync_records(run: Path, snapshot: Snapshot) -> None:
    sync_paths([run / name for name in snapshot.facts.get("records", ())])


def _refuse_unreadable(path: Path) -> None:
    """Refuse a state that cannot be loaded, before it is needed."""
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # Reads no tensor.
    except pickle.UnpicklingError as error:
        found = _GLOBAL.search(str(error))
        name = found[1] if found else "an object"
        raise CheckpointError(
            f"checkpoint: the state holds {name}, and loading it would "
            "run code; let state_dict return tensors, numbers, strings, lists and dicts"
        ) from None


def _write_file(path: Path, write: Callable[[Any], object]) -> Entry:
    """Write a file to the disk, and return the size and digest of the content passed to it."""
    with path.open("wb") as file:
        hashing = HashingFile(file)
        write(hashing)
        entry = {"bytes": hashing.size, "sha256": hashing.sha256()}
        sync_file(file)
    return entry


def put_in_place(new: Path, final: Path) -> None:
    """Give a written folder its name, in the place of another one."""
    replaced = hidden_path(final, "replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        final.rename(replaced)  # A folder cannot be renamed over another (see folder.tidy).
    new.rename(final)
    sync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
