"""What a stranger must know to use exported weights, as JSON: the sidecar of an export.

    schema          version of this layout: 1
    file            name, format, size in bytes and SHA-256 of the file it stands beside
    weights         kind (trained, ema), dtype, saturated (values held at the format's end, by name)
    computes_in     format that the graph computes in; null if the file holds weights alone
    model           target and arguments
    inputs          name, shape and dtype of each tensor that the model, or the graph, is called
                    with; null in a shape is the batch size, and of a graph any size that may vary
    preprocessing   what is done to a raw input before
    class_names     in the order of the class numbers
    precision       of the training: mode, half, ops, half_weights, evaluated_in
    metrics         weights: which were measured; checkpoint: the validation of the exported step;
                    run: what the run came to, best and test, as in summary.json
    run             id, step, seed, dataset
    versions        trained_with, exported_with

What is not known is null. The file itself holds the same words without `file`, except a plain
state dict, which has no place for them.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mpframe.checkpoint.identity import identity_of
from mpframe.checkpoint.layout import FOLDER
from mpframe.checkpoint.saved_weights import validated_kind
from mpframe.checkpoint.snapshot import Snapshot
from mpframe.errors import CheckpointError
from mpframe.files.plain_file import read_regular
from mpframe.files.stored_yaml import parsed

SCHEMA = 1
_SUMMARY = "summary.json"
_LARGEST_SUMMARY = 2**20  # bytes
_RESULTS = ("status", "steps", "train_loss", "monitor", "best", "best_step", "tested")
_PACKAGES = ("torch", "torchvision", "mpframe")


def facts_of(snapshot: Snapshot, path: Path) -> dict[str, Any]:
    """What a checkpoint says of itself, for the sidecar: all but what is chosen for the export.

    Left null: `weights` and `computes_in`. Left out: `file`.

    Args:
        snapshot: the checkpoint's content; it may come from anybody, and nothing in it is called.
        path: the checkpoint's folder.

    Raises:
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
        "versions": {
            "trained_with": usage.get("versions"),
            "exported_with": versions(),
        },
    }
    plain: dict[str, Any] = _plain(facts, path)
    return plain


def versions() -> dict[str, str | None]:
    """The versions of torch, torchvision and mpframe; None of one that is not installed."""
    return {name: _version(name) for name in _PACKAGES}


def model_facts(node: Mapping[str, Any]) -> dict[str, Any]:
    """Target and arguments of an option section `model`."""
    arguments = {key: value for key, value in node.items() if key != "_target_"}
    return {"target": node.get("_target_"), "arguments": arguments}


def as_json(facts: Mapping[str, Any], indent: int | None = None) -> str:
    """Strict JSON, ASCII alone."""
    return json.dumps(facts, indent=indent, allow_nan=False)


def sidecar(facts: Mapping[str, Any], name: str, form: str, content: bytes) -> str:
    """The text of the sidecar of a file.

    Args:
        facts: what the file itself holds.
        name: the file's.
        form: its format.
        content: its bytes.
    """
    digest = hashlib.sha256(content).hexdigest()
    file = {"name": name, "format": form, "bytes": len(content), "sha256": digest}
    return as_json({"schema": facts["schema"], "file": file, **facts}, indent=2) + "\n"


def _measured(snapshot: Snapshot) -> dict[str, Any] | None:
    """The validation of the checkpoint's own step."""
    if not snapshot.facts.get("validation"):
        return None
    results = _mapping(_mapping(snapshot.state.get("callbacks")).get("results"))
    evaluation = _mapping(results.get("evaluation"))
    metrics = _mapping(evaluation.get("metrics"))
    return {"val_loss": evaluation.get("loss"), **{f"val_{k}": v for k, v in metrics.items()}}


def _results(path: Path) -> dict[str, Any] | None:
    """What the summary of the checkpoint's run says it came to; None if there is none."""
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
    """A copy that JSON can hold; a number that is not finite is written as a word."""
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
