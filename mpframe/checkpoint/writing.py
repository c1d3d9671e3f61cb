"""Writes a checkpoint under a hidden name, waits for the disk, and renames it.

After a kill, a full disk or a power cut at any moment the older checkpoints are complete, and the
new one is complete or absent.
"""

import contextlib
import pickle
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from mpframe.checkpoint.digest import HashingFile
from mpframe.checkpoint.layout import CONFIG, MANIFEST, STATE, hidden, path_of
from mpframe.checkpoint.manifest import Manifest
from mpframe.checkpoint.snapshot import Snapshot
from mpframe.errors import CheckpointError
from mpframe.files.durable import sync_file, sync_folder

_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")


def save(folder: Path, snapshot: Snapshot) -> Path:
    """Save a checkpoint; one of the same step is replaced.

    Args:
        folder: the run's folder.
        snapshot: what to save.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: it could not be written, or not be loaded again; the older ones are
            complete.
    """
    return save_as(path_of(folder, snapshot.global_step), snapshot)


def save_as(final: Path, snapshot: Snapshot) -> Path:
    """Save a snapshot as the folder `final`, whose parent may be missing; raises as `save`."""
    new = hidden(final, "new")
    try:
        final.parent.mkdir(exist_ok=True)
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        _write(new, snapshot)
        _put_in_place(new, final)
    except CheckpointError:
        shutil.rmtree(new, ignore_errors=True)
        raise
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint {final} could not be written ({error.strerror or error}); "
            "older checkpoints are whole: free space or choose another hydra.run.dir"
        ) from error
    return final


class Background:
    """Runs one piece of work at a time in a thread of its own; its errors are raised here.

    Use it as a context manager, or call `close`.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Wait for the work before, then start `work`.

        Raises:
            Exception: what the work before raised; `work` is then not started.
        """
        self.wait()
        self._pending = self._threads.submit(work)

    def wait(self) -> None:
        """Wait for the work to end, and raise what it raised."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait, raise, and end the thread."""
        try:
            self.wait()
        finally:
            self._threads.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _write(folder: Path, snapshot: Snapshot) -> None:
    files = {
        STATE: _written(folder / STATE, lambda file: torch.save(snapshot.state, file)),
        CONFIG: _written(folder / CONFIG, lambda file: file.write(snapshot.config.encode())),
    }
    _refuse_unreadable(folder / STATE)
    manifest = Manifest(files, snapshot.facts).text().encode()
    _written(folder / MANIFEST, lambda file: file.write(manifest))
    sync_folder(folder)


def _refuse_unreadable(path: Path) -> None:
    """Refuse a state that cannot be loaded: now, and not when it is needed."""
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # Reads no tensor.
    except pickle.UnpicklingError as error:
        found = _GLOBAL.search(str(error))
        name = found[1] if found else "an object"
        raise CheckpointError(
            f"checkpoint: the state holds {name}, and loading it would "
            "run code; let state_dict return tensors, numbers, strings, lists and dicts"
        ) from None


def _written(path: Path, write: Callable[[Any], object]) -> dict[str, Any]:
    """Write a file to the disk; its size and digest, computed from what is passed to it."""
    with path.open("wb") as file:
        hashing = HashingFile(file)
        write(hashing)
        hashing.raise_if_failed()
        sync_file(file)
    return {"bytes": hashing.size, "sha256": hashing.sha256()}


def _put_in_place(new: Path, final: Path) -> None:
    replaced = hidden(final, "replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        final.rename(replaced)  # A folder cannot be renamed over another; see retention.tidy.
    new.rename(final)
    sync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
