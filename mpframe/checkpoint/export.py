"""The file of an export, for anybody without mpframe, and its sidecar: how to use it, as JSON.

Both are written whole or not at all. `cli/commands/export.py` is the program, and export_graph.py
makes the weights and the graph.
"""

import hashlib
import io
import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from mpframe.checkpoint.folder import FOLDER, identity_of
from mpframe.checkpoint.state import Snapshot, validated_kind
from mpframe.core.errors import CheckpointError, ConfigError
from mpframe.files.durable import write_atomically
from mpframe.files.plain_file import read_regular
from mpframe.files.stored_yaml import parsed

SCHEMA = 1
_SUMMARY = "summary.json"
_LARGEST_SUMMARY = 2**20  # bytes
_RESULTS = ("status", "steps", "train_loss", "monitor", "best", "best_step", "tested")
_PACKAGES = ("torch", "torchvision", "mpframe")
KEY = "mpframe"  # Under this name a file holds the sidecar's words.


def facts_of(snapshot: Snapshot, path: Path) -> dict[str, Any]:
    """Return what a checkpoint says of itself, for the sidecar; nothing in it is called.

    What is chosen for the export is left null (`weights`, `computes_in`) or out (`file`).
    CheckpointError: it holds what JSON cannot.
    """
    stored = parsed(snapshot.config, path / "config.yaml") if snapshot.config else {}
    usage = _mapping(snapshot.state.get("usage"))
    facts = {
        "schema": SCHEMA,
        "weights": None,
        "computes_in": None,
        "model": model_facts(_mapping(stored.get("model"))),
        **{key: usage.get(key) for key in ("inputs", "preprocessing", "class_names", "precision")},
        "metrics": {
            "weights": validated_kind(snapshot.state),
            "checkpoint": _measured(snapshot),
            "run": _results(path),
        },
        "run": {
            "id": identity_of(snapshot.facts),
            "step": snapshot.global_step,
            "seed": stored.get("seed"),
            "dataset": _mapping(stored.get("dataset")).get("_target_"),
        },
        "versions": {"trained_with": usage.get("versions"), "exported_with": versions()},
    }
    plain: dict[str, Any] = _plain(facts, path)
    return plain


def versions() -> dict[str, str | None]:
    """Return the versions of torch, torchvision and mpframe; None of one that is not installed."""
    return {name: _version(name) for name in _PACKAGES}


def model_facts(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return target and arguments of an option section `model`."""
    arguments = {key: value for key, value in node.items() if key != "_target_"}
    return {"target": node.get("_target_"), "arguments": arguments}


def as_json(facts: Mapping[str, Any], indent: int | None = None) -> str:
    """Return strict JSON, ASCII only."""
    return json.dumps(facts, indent=indent, allow_nan=False)


def sidecar(facts: Mapping[str, Any], name: str, form: str, content: bytes) -> str:
    """Return the text of the sidecar of a file: its name, format and digest, and what it holds."""
    digest = hashlib.sha256(content).hexdigest()
    file = {"name": name, "format": form, "bytes": len(content), "sha256": digest}
    return as_json({"schema": facts["schema"], "file": file, **facts}, indent=2) + "\n"


def _measured(snapshot: Snapshot) -> dict[str, Any] | None:
    """Return the validation of the checkpoint's own step."""
    if not snapshot.facts.get("validation"):
        return None
    results = _mapping(_mapping(snapshot.state.get("callbacks")).get("results"))
    evaluation = _mapping(results.get("evaluation"))
    metrics = _mapping(evaluation.get("metrics"))
    return {"val_loss": evaluation.get("loss"), **{f"val_{k}": v for k, v in metrics.items()}}


def _results(path: Path) -> dict[str, Any] | None:
    """Return what the summary of the checkpoint's run says it came to, if there is one."""
    folder = path.absolute().parent
    if folder.name != FOLDER:
        return None  # It was copied out of its run.
    try:
        summary = _mapping(json.loads(read_regular(folder.parent / _SUMMARY, _LARGEST_SUMMARY)))
    except (OSError, ValueError, RecursionError):
        return None  # The run goes on.
    measured = ("val_", "test_")
    return {k: v for k, v in summary.items() if k in _RESULTS or k.startswith(measured)}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _mapping(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _plain(value: Any, path: Path) -> Any:
    """Return a copy that JSON can hold; a number that is not finite is written as a word."""
    if isinstance(value, dict):
        return {str(key): _plain(held, path) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(held, path) for held in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str | int | float | None):
        return value
    raise CheckpointError(
        f"{path}: says a {type(value).__name__} of itself, which is no JSON; use another checkpoint"
    )


# The formats of files, each with the endings its files may have.
FORMATS = {
    "safetensors": (".safetensors",),
    "state_dict": (".pt", ".pth", ".bin"),
    "onnx": (".onnx",),
    "torch_export": (".pt2",),
}
GRAPHS = ("onnx", "torch_export")  # They hold the model's computation beside its weights.


def as_safetensors(tensors: dict[str, Tensor], facts: Mapping[str, Any]) -> bytes:
    """Return the content of a safetensors file; its metadata is `mpframe`, the sidecar's words."""
    return bytes(save(tensors, metadata={"format": "pt", KEY: as_json(facts)}))


def as_state_dict(tensors: dict[str, Tensor]) -> bytes:
    """Return what `torch.load(..., weights_only=True)` reads: only the tensors by name."""
    file = io.BytesIO()
    torch.save(tensors, file)
    return file.getvalue()


def beside(out: Path) -> Path:
    """Return the sidecar's path: `model.safetensors.json` for `model.safetensors`."""
    return out.with_name(f"{out.name}.json")


def refuse_taken(out: Path, overwrite: bool) -> None:
    """Refuse a place where a folder is, or, without `overwrite`, a file or a link."""
    for path in (out, beside(out)):
        if path.is_dir() and not path.is_symlink():
            raise ConfigError(f"out={out}: {path} is a folder; name a file")
        if os.path.lexists(path) and not overwrite:
            raise ConfigError(
                f"out={out}: {path} exists; choose another file, or replace it with overwrite=true"
            )


def write(out: Path, content: bytes, form: str, facts: Mapping[str, Any]) -> None:
    """Write a file and its sidecar, or nothing; links there are replaced, not followed."""
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
