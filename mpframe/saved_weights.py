"""The weights in a loaded checkpoint, looked at before they are used.

A checkpoint may come from anybody: that it could be read does not mean that it holds what it
should. Parameters are fp32 (the masters, whatever the run's format), buffers as they are.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mpframe.errors import CheckpointError, ConfigError

KINDS = ("trained", "ema")


def weights_of(state: Mapping[str, Any], kind: str, path: Path) -> dict[str, Tensor]:
    """Parameters and buffers by name.

    Args:
        state: what `checkpoint.load` returned.
        kind: `trained`, or `ema` for the averages in the place of the parameters they are of.
        path: the checkpoint, for messages.

    Raises:
        ConfigError: an unknown kind.
        CheckpointError: the state holds no such weights.
    """
    if kind not in KINDS:
        raise ConfigError(f"weights={kind}: choose {' or '.join(KINDS)}")
    weights = _tensors(state, "weights", path)
    if kind == "trained":
        return weights
    averages = averages_of(state, path)
    if not averages.keys() <= weights.keys():
        raise CheckpointError(f"{path}: its averages are not of its weights; use another one")
    return {**weights, **averages}


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


def steps_tried(state: Mapping[str, Any], path: Path) -> int:
    """Steps the run had tried when it was saved: the x of its curves.

    Raises:
        CheckpointError: the state does not say.
    """
    try:
        progress = state["trainer"]["progress"]
        return int(progress["steps"] + progress["skipped"])
    except (KeyError, TypeError, ValueError):
        raise _not_of_a_run(path, "progress") from None


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
