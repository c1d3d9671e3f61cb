"""The model."""

from torch import nn

from mpframe.build.target import make
from mpframe.config.schema import Config
from mpframe.errors import ConfigError, UserCodeError
from mpframe.user_code import name_of


def build_model(config: Config) -> nn.Module:
    model = make("model", config.model)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model._target_={config.model['_target_']}: must return a torch.nn.Module, got "
            f"{type(model).__name__}"
        )
    _refuse_untrainable(model)
    return model


def _refuse_untrainable(model: nn.Module) -> None:
    weights = dict(model.named_parameters())
    empty = next((name for name, weight in weights.items() if weight.is_meta), None)
    if empty is not None:
        raise UserCodeError(
            f"model: {name_of(model)} has {empty} on the meta device, where weights have no "
            "values; build it on the CPU"
        )
    if not any(weight.requires_grad for weight in weights.values()):
        raise UserCodeError(
            f"model: {name_of(model)} has no weight to train ({len(weights)} are frozen); leave "
            "requires_grad to some"
        )
