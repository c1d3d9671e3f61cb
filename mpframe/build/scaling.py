"""Loss scalers."""

import torch
from torch import Tensor

from mpframe.build.target import make
from mpframe.config.schema import Config
from mpframe.data.task import Task
from mpframe.errors import ConfigError
from mpframe.loss_scaling.interface import LossScaler, Scaling, name_of
from mpframe.user_code import described

_METHODS = ("update", "to", "state_dict", "load_state_dict")
_PAGE = "docs/loss_scaling/own.md"


def build_scaler(config: Config) -> LossScaler | None:
    """The loss scaler that `loss_scaling._target_` makes; None if the loss is not scaled.

    Raises:
        ConfigError: an argument is not allowed, or what is made is not a loss scaler.
    """
    scaler: LossScaler | None = make("loss_scaling", config.loss_scaling)
    if scaler is not None:
        _refuse_unfit(f"loss_scaling._target_={config.loss_scaling['_target_']}", scaler)
    return scaler


def _refuse_unfit(option: str, scaler: LossScaler) -> None:
    methods = [name for name in _METHODS if not callable(getattr(scaler, name, None))]
    missing = [*methods, *([] if hasattr(scaler, "scale") else ["scale"])]
    if missing:
        raise ConfigError(f"{option}: has no {' and no '.join(missing)}; see {_PAGE}")
    scale = scaler.scale
    if not isinstance(scale, Tensor) or scale.dim() or scale.dtype != torch.float32:
        raise ConfigError(
            f"{option}: its scale is {described(scale)}; must be a 0-d float32 tensor; see {_PAGE}"
        )


def scaling_name(config: Config) -> str:
    """What the loss scaling is called: `static`, `Backoff`, `LogMax`, `none`, or a user's class.

    Raises:
        ConfigError: as for `build_scaler`.
    """
    return name_of(build_scaler(config))


def build_scalers(config: Config, task: Task, device: torch.device) -> Scaling:
    """One scaler, one for each loss, or none."""
    each = config.joint is not None and config.joint.scalers == "each"
    names = list(task.objectives) if each else [""]
    scalers = {name: build_scaler(config) for name in names}
    ready = {name: own.to(device) for name, own in scalers.items() if own is not None}
    if not ready:
        return None
    return ready if each else ready[""]
