"""The file of an export and its sidecar, whole or not at all, in their place without a link."""

import io
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from mpframe.checkpoint.export.graph import KEY
from mpframe.checkpoint.export.sidecar import as_json, sidecar
from mpframe.errors import ConfigError
from mpframe.files.durable import write_atomically

FORMATS = {
    "safetensors": (".safetensors",),
    "state_dict": (".pt", ".pth", ".bin"),
    "onnx": (".onnx",),
    "torch_export": (".pt2",),
}
"""The formats of files, each with the endings its files may have."""
GRAPHS = ("onnx", "torch_export")
"""Those that hold the model's computation beside its weights."""


def as_safetensors(tensors: dict[str, Tensor], facts: Mapping[str, Any]) -> bytes:
    """The content of a safetensors file; its metadata is `mpframe`, the sidecar's words."""
    return bytes(save(tensors, metadata={"format": "pt", KEY: as_json(facts)}))


def as_state_dict(tensors: dict[str, Tensor]) -> bytes:
    """What `torch.load(..., weights_only=True)` reads: the tensors by name, and no more."""
    file = io.BytesIO()
    torch.save(tensors, file)
    return file.getvalue()


def beside(out: Path) -> Path:
    """The sidecar's path: `model.safetensors.json` for `model.safetensors`."""
    return out.with_name(f"{out.name}.json")


def refuse_taken(out: Path, overwrite: bool) -> None:
    """Refuse a place where something is that may not be replaced.

    Raises:
        ConfigError: a file or a link is there and `overwrite` is false, or a folder is.
    """
    for path in (out, beside(out)):
        if path.is_dir() and not path.is_symlink():
            raise ConfigError(f"out={out}: {path} is a folder; name a file")
        if os.path.lexists(path) and not overwrite:
            raise ConfigError(
                f"out={out}: {path} exists; choose another file, or replace it with overwrite=true"
            )


def write(out: Path, content: bytes, form: str, facts: Mapping[str, Any]) -> None:
    """Write a file and its sidecar; links at their places are replaced, not followed.

    Args:
        out: the file.
        content: its bytes.
        form: its format.
        facts: what the sidecar says, but for the file itself.

    Raises:
        ConfigError: its folder cannot be written; what was not there before is not left.
    """
    new = [path for path in (out, beside(out)) if not os.path.lexists(path)]
    try:
        write_atomically(out, content)
        write_atomically(beside(out), sidecar(facts, out.name, form, content))
    except OSError as error:
        for path in new:
            with suppress(OSError):
                path.unlink()
        raise ConfigError(
            f"out={out}: cannot be written ({error.strerror}); choose another file"
        ) from error
