"""`trainer.parallel=fsdp`: the model's weights divided among the ranks, or refused by name."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from mpframe.config.schema import Config
from mpframe.data.task import Task
from mpframe.distributed.world import World
from mpframe.errors import ConfigError
from mpframe.loss_scaling.adaptive import PROBE
from mpframe.precision import Precision

_NEEDED = {  # What needs whole weights on each rank is off.
    "trainer.compile": "false",
    "trainer.channels_last": "false",
    "trainer.reduce": "in_backward",
    "trainer.eval_dtype": "null",
    "trainer.async_save": "false",
    "dtype.master_weights": "on",
    "dtype.products": "none",
    "numerics.every": "null",
}
_WITHOUT = ("Freeze", "LayerwiseRates", "Penalty")  # callbacks

# They treat each value by itself, so a rank steps its part alone.
_NAMES = "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD"
_BY_VALUE = {getattr(torch.optim, name) for name in _NAMES.split()}


def refuse_beside_sharding(config: Config, task: Task) -> None:
    """Refuse what needs whole weights on each rank.

    Raises:
        ConfigError: names the option, and the way out.
    """
    for option, needed in _NEEDED.items():
        section, _, name = option.partition(".")
        value = _word(getattr(getattr(config, section), name))
        if value != needed:
            raise _does_not_go(f"{option}={value}", f"use {option}={needed}")
    for name, node in config.callbacks.items():
        if node and str(node.get("_target_", "")).endswith(_WITHOUT):
            raise _does_not_go(f"callbacks.{name}", f"use callbacks.{name}=null")
    if config.joint is not None or isinstance(task.objective, Mapping):
        raise _does_not_go("several optimizers or losses", "use one of each")
    if config.loss_scaling.get("init_scale") == PROBE:
        raise _does_not_go(f"loss_scaling.init_scale={PROBE}", "give it a number")


def _word(value: object) -> str:
    """A value as it is typed."""
    return {"None": "null"}.get(str(value), str(value)).lower()


def _does_not_go(option: str, way_out: str) -> ConfigError:
    return ConfigError(
        f"{option}: does not go with trainer.parallel=fsdp; {way_out}, or trainer.parallel=ddp"
    )


def shard(
    model: nn.Module,
    optimizers: Mapping[str, Optimizer],
    precision: Precision,
    world: World,
    device: torch.device,
) -> None:
    """Divide the weights among the ranks, and let the optimizers step the parts.

    Raises:
        ConfigError: an optimizer looks at more than single values, or a weight cannot be divided.
    """
    for optimizer in optimizers.values():
        kind = type(optimizer)
        if kind not in _BY_VALUE:
            raise ConfigError(
                f"optimizer={kind.__name__}: may look at a whole weight, of which a rank has a "
                "part with trainer.parallel=fsdp; use trainer.parallel=ddp, or one of torch.optim: "
                + ", ".join(_NAMES.split())
            )
    replaced = precision.shard(model, world, device)
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["params"] = [replaced[own] for own in group["params"]]
