"""Loss scalers."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from mpframe.config.schema import Config
from mpframe.data.task import Task
from mpframe.loss_scaling import Backoff, LogMax, Static
from mpframe.loss_scaling.interface import LossScaler, Scaling


def scaling_name(config: Config) -> str:
    """The scaling that `auto` stands for: Backoff where half is float16, none otherwise."""
    name = str(config.loss_scaling.name)
    if name != "auto":
        return name
    float16 = config.dtype.mode != "fp32" and config.dtype.half == "float16"
    return "Backoff" if float16 else "none"


def named_options(config: Config) -> dict[str, Any]:
    """Every option by its dotted path; of the scaling `auto` the name of what it stands for."""
    return {**config.flat, "loss_scaling.name": scaling_name(config)}


def build_scaler(config: Config) -> LossScaler | None:
    """The loss scaler; None where the loss is not scaled."""
    arguments = {k: v for k, v in vars(config.loss_scaling).items() if k != "name"}
    half = {"half": getattr(torch, config.dtype.half)}
    makers: dict[str, Callable[..., LossScaler]] = {
        "static": Static,
        "Backoff": Backoff,
        "LogMax": LogMax,
    }
    name = scaling_name(config)
    if name == "none":
        return None
    return makers[name](**arguments, **(half if name != "static" else {}))


def build_scalers(config: Config, task: Task, device: torch.device) -> Scaling:
    """One scaler, one for each loss, or none."""
    each = config.joint is not None and config.joint.scalers == "each"
    names = list(task.loss) if each and isinstance(task.loss, Mapping) else [""]
    scalers = {name: build_scaler(config) for name in names}
    ready = {name: own.to(device) for name, own in scalers.items() if own is not None}
    if not ready:
        return None
    return ready if each else ready[""]
