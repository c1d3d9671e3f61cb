"""A run whose ranks divide the weights: `trainer.parallel=fsdp`.

The model is made without values, and each block gets its values when its ranks divide it. A part of
the run that cannot be divided is refused by name.
"""

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from mpframe.checkpoint.state import restore_rng, rng_state
from mpframe.config.check import as_typed
from mpframe.config.schema import Config
from mpframe.core.comm import Comm, is_sharded
from mpframe.core.errors import ConfigError, RunInterrupted, first_line
from mpframe.core.tree import HALF, dtype_name
from mpframe.precision.precision import Precision
from mpframe.precision.storage import formats_of
from mpframe.run.parts import build_model, ranges_every
from mpframe.training.memory import cast_again
from mpframe.training.optimizers.whole_weights import gather_for_steps
from mpframe.training.parallel.layout import Layout
from mpframe.training.parallel.same_weights import refuse_other_weights, sums_of

log = logging.getLogger(__name__)

_NEEDED = {  # Options that need whole weights on each rank are off.
    "trainer.channels_last": ("false", "FSDP takes contiguous parameters only"),
    "trainer.reduce": ("in_backward", "a block's gradients are summed in its backward pass"),
    "dtype.master_weights": ("true", "the parts, in fp32, are the masters"),
}
# They treat each value by itself, so a rank can step only its part.
_NAMES = "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD"
_BY_VALUE = {getattr(torch.optim, name) for name in _NAMES.split()}
WHOLE = Layout()  # All ranks divide every weight.


def refuse_beside_sharding(config: Config, layout: Layout = WHOLE) -> None:
    """Refuse what needs whole weights on each rank, or whole layers."""
    every = ranges_every(config)
    if layout.tensor > 1 and every is not None:
        raise ConfigError(
            f"callbacks.ranges.every={every}: does not go with distributed.tensor={layout.tensor} "
            "(torch: aten.bincount.default has no sharding strategy); use numerics=off"
        )
    for option, (needed, why) in _NEEDED.items():
        value = as_typed(config.flat[option])
        if value != needed:
            raise ConfigError(
                f"{option}={value}: does not go with trainer.parallel=fsdp ({why}); use "
                f"{option}={needed}, or trainer.parallel=ddp"
            )


def shard(
    model: nn.Module,
    optimizers: Mapping[str, Optimizer],
    precision: Precision,
    comm: Comm,
    device: torch.device,
    layout: Layout = WHOLE,
    deferred: Any = None,
    compiled: bool = False,
) -> None:
    """Divide the weights among the ranks, give the parts to the optimizers, and compile the blocks.

    `deferred` gives each block its values, if it has none yet. Raises UserCodeError if they are not
    the same on all ranks.
    """
    for optimizer in optimizers.values():
        _step_parts(optimizer)
    if precision.policy.mode == "mixed" and precision.policy.ops.empty:
        raise ConfigError(
            "ops=none: casts nothing between blocks, and with trainer.parallel=fsdp blocks are "
            "gathered in the format of their weights; use the default lists"
        )
    # It keeps no whole weight.
    formats = WeakTensorKeyDictionary(formats_of(model, precision.policy, precision.uses(model)))
    sums: dict[tuple[Any, ...], float] = {}
    from mpframe.training.parallel.sharding import Sharding  # It loads FSDP.

    comm.sharding, comm.tensor = Sharding(model, layout), layout.tensor
    replaced = comm.sharding.divide(formats, device, partial(_fill, deferred, formats, sums))
    refuse_other_weights(comm, sums)
    precision.use_shards(model, replaced, cast_again)
    for handler in precision.op_handlers:  # It knows a weight by its name, gathered ones as well.
        comm.sharding.usage.on_gathered.append(partial(handler.attach, model))
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["params"] = [replaced[parameter] for parameter in group["params"]]
        if hasattr(optimizer, "places"):
            optimizer.places = [list(group["params"]) for group in optimizer.param_groups]
    if compiled:
        comm.sharding.compile_blocks()


def _step_parts(optimizer: Optimizer) -> None:
    """Have the optimizer gather weights if its steps need whole ones. ConfigError: not known."""
    kind = type(optimizer)
    by_value = kind in _BY_VALUE or getattr(kind, "by_value", False)
    if not by_value and not gather_for_steps(optimizer):
        raise ConfigError(
            f"optimizer={kind.__name__}: may look at several weights or at a whole one, of which a "
            "rank has a part with trainer.parallel=fsdp; if it treats each value by itself, set "
            "by_value = True in its class, else use trainer.parallel=ddp"
        )


def _fill(
    deferred: Any,
    formats: Any,
    sums: dict[tuple[Any, ...], float],
    blocks: Mapping[str, nn.Module],
) -> None:
    """Give blocks, by name, their values, if they have none. Check them, and add up each weight."""
    filled = {} if deferred is None else deferred.fill(*blocks.values())
    for before, after in filled.items():
        formats[after] = formats[before]
    for name, block in blocks.items():
        whole = {n: p for n, p in block.named_parameters(name) if not is_sharded(p)}
        _check_range(whole, formats)
        sums.update(sums_of(whole.items()))


@torch.no_grad()
def _check_range(weights: Mapping[str, Tensor], formats: Mapping[Any, torch.dtype]) -> None:
    """Refuse weights beyond the half range: stored ones are clamped, gathered ones would be inf."""
    for name, weight in weights.items():
        dtype = formats[weight]
        limit = torch.finfo(dtype).max
        if dtype in HALF and weight.numel() and max(map(abs, torch.aminmax(weight))) > limit:
            raise ConfigError(
                f"trainer.parallel=fsdp: {name} lies beyond the range of {dtype_name(dtype)}, "
                "in which it is gathered; use dtype.half=bfloat16, or ops.modules=...:fp32"
            )


def build_deferred(config: Config) -> tuple[nn.Module, Any]:
    """Make a model without values, and what fills it later. None: it has them, lazy layers do."""
    from mpframe.training.parallel.deferred import Deferred  # It loads torch's fake tensors.

    before, deferred = rng_state(), Deferred()
    try:
        model = deferred.construct(partial(build_model, config))
    except RunInterrupted:
        raise
    except Exception as error:
        restore_rng(before)
        deferred, model = Deferred(), build_model(config)  # With values it works, or says the same.
        _warn_of_whole_model("its constructor", error)
    if any(map(is_lazy, model.parameters())):
        deferred.fill(model)
        return model, None
    deferred.take_values(model)
    return model, deferred


def trace_deferred(precision: Precision, model: nn.Module, example: Any, deferred: Any) -> None:
    """Show `precision` an objective. A model without values gets them first if it needs them."""
    try:
        precision.trace(model, example)
    except Exception as error:
        if deferred is None or isinstance(error, RunInterrupted):
            raise
        _warn_of_whole_model("the objective", error)
        deferred.fill(model)
        precision.trace(model, example)


def _warn_of_whole_model(what: str, error: BaseException) -> None:
    log.warning(
        "warning: trainer.parallel=fsdp: each rank begins with the whole model, because %s needs "
        "its values: %s",
        what,
        first_line(error.__cause__ or error),
    )
