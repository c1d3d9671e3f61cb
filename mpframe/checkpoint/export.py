"""The file of an export, for anybody without mpframe, and its sidecar, JSON on how to use it.

Both are written whole or not at all. `cli/commands/export.py` is the program, and export_graph.py
makes the weights and the graph.
"""

import hashlib
import io
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from mpframe.checkpoint.folder import FOLDER
from mpframe.checkpoint.state import Snapshot, read_validated_kind
from mpframe.core.errors import CheckpointError, ConfigError
from mpframe.files.durable import atomic_file, sync_file
from mpframe.files.plain_file import read_regular
from mpframe.files.stored_yaml import parse_stored

_LARGEST_SUMMARY = 2**20  # bytes
_RESULTS = ("status", "steps", "skipped_steps", "train_loss", "monitor", "best", "best_step")
KEY = "mpframe"  # the name under which a file holds the sidecar's JSON


def facts_of(snapshot: Snapshot, path: Path) -> dict[str, Any]:
    """Return a checkpoint's facts for the sidecar, without calling anything in it.

    `weights` and `computes_in` are null and `file` is left out, because the export decides them.
    CheckpointError: a fact is no JSON.
    """
    stored = parse_stored(snapshot.config, path / "config.yaml") if snapshot.config else {}
    usage = _mapping(snapshot.state.get("usage"))
    facts = {
        "schema": 1,
        "weights": None,
        "computes_in": None,
        "model": model_facts(_mapping(stored.get("model"))),
        **{key: usage.get(key) for key in ("inputs", "preprocessing", "class_names", "precision")},
        "metrics": {
            "weights": read_validated_kind(snapshot.state),
            "checkpoint": _validation_of(snapshot),
            "run": _results(path),
        },
        "run": {
            "id": snapshot.facts.get("run"),
            "step": snapshot.global_step,
            "seed": stored.get("seed"),
            "dataset": _mapping(stored.get("dataset")).get("_target_"),
            "samples": usage.get("samples"),
            "command": usage.get("command"),
        },
        "versions": {"trained_with": usage.get("versions"), "exported_with": versions()},
    }
    try:  # JSON holds no number that is not finite: a word stands for it.
        return dict(json.loads(json.dumps(facts), parse_constant=lambda word: str(float(word))))
    except (TypeError, ValueError, RecursionError) as error:
        said = f"{path}: holds what JSON cannot ({error}); use another checkpoint"
        raise CheckpointError(said) from None


def versions() -> dict[str, str | None]:
    """Return the versions of torch, torchvision and mpframe, None if one is not installed."""
    found: dict[str, str | None] = dict.fromkeys(("torch", "torchvision", "mpframe"))
    for name in found:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def model_facts(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the target and the arguments of the section `model`."""
    arguments = {key: value for key, value in node.items() if key != "_target_"}
    return {"target": node.get("_target_"), "arguments": arguments}


def as_json(facts: Mapping[str, Any], indent: int | None = None) -> str:
    """Return strict JSON, ASCII only."""
    return json.dumps(facts, indent=indent, allow_nan=False)


def sidecar(facts: Mapping[str, Any], name: str, form: str, content: bytes) -> str:
    """Return the text of a file's sidecar: the file's name, format and digest, and the facts."""
    digest = hashlib.sha256(content).hexdigest()
    file = {"name": name, "format": form, "bytes": len(content), "sha256": digest}
    return as_json({"schema": facts["schema"], "file": file, **facts}, indent=2) + "\n"


def _validation_of(snapshot: Snapshot) -> dict[str, Any] | None:
    """Return the validation of the checkpoint's own step."""
    if not snapshot.facts.get("validation"):
        return None
    results = _mapping(_mapping(snapshot.state.get("callbacks")).get("results"))
    evaluation = _mapping(results.get("evaluation"))
    metrics = _mapping(evaluation.get("metrics"))
    return {"val_loss": evaluation.get("loss"), **{f"val_{k}": v for k, v in metrics.items()}}


def _results(path: Path) -> dict[str, Any] | None:
    """Return the results in the summary of the checkpoint's run, if there is one."""
    folder = path.absolute().parent
    if folder.name != FOLDER:
        return None  # It was copied out of its run.
    try:
        written = read_regular(folder.parent / "summary.json", _LARGEST_SUMMARY)
        summary = _mapping(json.loads(written))
    except (OSError, ValueError, RecursionError):
        return None  # The run has not ended.
    measured = ("val_", "test")
    return {k: v for k, v in summary.items() if k in _RESULTS or k.startswith(measured)}


def _mapping(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


FORMATS = {  # with the endings of their files
    "safetensors": (".safetensors",),
    "state_dict": (".pt", ".pth", ".bin"),
    "onnx": (".onnx",),
    "torch_export": (".pt2",),
    "huggingface": (),  # a folder
}
GRAPHS = ("onnx", "torch_export")  # They hold the model's computation beside its weights.


def as_safetensors(tensors: dict[str, Tensor], facts: Mapping[str, Any]) -> bytes:
    """Return the content of a safetensors file, with the facts as its metadata `mpframe`."""
    return bytes(save(tensors, metadata={"format": "pt", KEY: as_json(facts)}))


def as_state_dict(tensors: dict[str, Tensor]) -> bytes:
    """Return the content of a file with the tensors by name, as `torch.save` writes it."""
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
    """Write a file and its sidecar, or nothing. Links there are replaced, not followed."""
    new = [path for path in (out, beside(out)) if not os.path.lexists(path)]
    try:
        # Both are on the disk before one has its name: an old sidecar describes an old file.
        with atomic_file(beside(out)) as described, atomic_file(out) as file:
            described.write(sidecar(facts, out.name, form, content).encode())
            sync_file(described)
            file.write(content)
    except OSError:
        for path in new:
            path.unlink(missing_ok=True)
        raise
