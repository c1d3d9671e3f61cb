"""The weights in a loaded checkpoint, checked before they are used.

A checkpoint may come from anybody: that it could be read does not mean that it holds what it
should. Parameters are fp32 (the masters, in every dtype mode), buffers as they are.

So every dtype mode loads every other's checkpoints: it takes masters and optimizer state bit for
bit, and rounds the masters to the weights that it stores in half. Only the loss scale is not taken
everywhere: a mode without scaling has no use for one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mpframe.errors import CheckpointError, ConfigError
from mpframe.tree import HALF, dtype_name

KINDS = ("trained", "ema")


def weights_of(state: Mapping[str, Any], kind: str, path: Path) -> dict[str, Tensor]:
    """Parameters and buffers by name.

    Args:
        state: what `checkpoint.load` returned.
        kind: `trained`, or `ema` for the averages instead of their parameters.
        path: the checkpoint, for messages.

    Raises:
        ConfigError: an unknown kind.
        CheckpointError: the state has no such weights.
    """
    if kind not in KINDS:
        raise ConfigError(f"weights={kind}: choose {' or '.join(KINDS)}")
    weights = _tensors(state, "weights", path)
    if kind == "trained":
        return weights
    averages = averages_of(state, path)
    if not averages.keys() <= weights.keys():
        raise CheckpointError(f"{path}: its averages do not belong to its weights; use another one")
    return {**weights, **averages}


def validated_kind(state: Mapping[str, Any]) -> str:
    """Which weights the run was validated with: `ema` if it kept averages, else `trained`."""
    trainer = state.get("trainer")
    kept = isinstance(trainer, Mapping) and trainer.get("ema") is not None
    return "ema" if kept else "trained"


def averages_of(state: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    """The averages by the name of their parameter.

    Raises:
        CheckpointError: the run kept none.
    """
    trainer = state.get("trainer")
    if isinstance(trainer, Mapping) and trainer.get("ema") is None:
        raise CheckpointError(
            f"{path}: holds no averages, trainer.ema_decay was off; use weights=trained"
        )
    return _tensors(state, "ema", path)


def extra_state_of(state: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What the run changed beside its weights, see training/buffers.py; raises as `weights_of`."""
    extra = state["trainer"].get("extra_state", {})
    if not isinstance(extra, dict):
        raise _not_of_a_run(path, "extra_state")
    return extra


def rounding(model: nn.Module, weights: Mapping[str, Tensor]) -> str:
    """A clause about the half weights of `model`, which are rounded from `weights`."""
    half = {name: p.dtype for name, p in model.named_parameters() if p.dtype in HALF}
    if not half:
        return "no parameter is rounded"
    clamped = sum(
        int((weights[n].abs() > torch.finfo(dtype).max).sum()) for n, dtype in half.items()
    )
    formats = " and ".join(sorted({dtype_name(dtype) for dtype in half.values()}))
    beyond = f", {clamped} values beyond its range clamped to it" if clamped else ""
    return f"{len(half)} parameters are rounded to {formats}{beyond}"


def conversion(before: str, now: str, rounded: str, scaled: tuple[bool, bool]) -> str:
    """The line that says how a checkpoint of another precision was loaded.

    Args:
        before, now: the precisions, e.g. `fp32` and `mixed(float16)`.
        rounded: what `rounding` returned.
        scaled: whether the loss was scaled before, and is now.
    """
    scale = {
        (True, False): "; its loss scale is not used",
        (False, True): "; the loss scale starts at its initial value",
    }.get(scaled, "")
    return (
        f"checkpoint of {before} taken into {now}: masters and optimizer state as they were, "
        f"{rounded}{scale}"
    )


def steps_tried(state: Mapping[str, Any], path: Path) -> int:
    """The global step at which the run was saved: the x of its curves.

    Raises:
        CheckpointError: the state does not say.
    """
    try:
        progress = state["trainer"]["progress"]
        steps = progress["steps"], progress["skipped"]
    except (LookupError, TypeError):
        raise _not_of_a_run(path, "progress") from None
    if any(type(count) is not int or not 0 <= count < 2**53 for count in steps):
        raise _not_of_a_run(path, "progress")
    return sum(steps)


def trained_in(state: Mapping[str, Any], path: Path) -> str:
    """The precision of the run, e.g. `mixed(float16)`.

    Raises:
        CheckpointError: the state does not say.
    """
    trainer = state.get("trainer")
    precision = trainer.get("precision") if isinstance(trainer, Mapping) else None
    if not isinstance(precision, str):
        raise _not_of_a_run(path, "precision")
    return precision


def _tensors(state: Mapping[str, Any], name: str, path: Path) -> dict[str, Tensor]:
    trainer = state.get("trainer") if isinstance(state, Mapping) else None
    tensors = trainer.get(name) if isinstance(trainer, Mapping) else None
    if not isinstance(tensors, dict) or not tensors:
        raise _not_of_a_run(path, name)
    for key, tensor in tensors.items():
        if not isinstance(key, str) or not isinstance(tensor, Tensor):
            raise _not_of_a_run(path, name)
    return tensors


def _not_of_a_run(path: Path, name: str) -> CheckpointError:
    return CheckpointError(f"{path}: holds no {name} of a run; use a checkpoint of mpframe")
