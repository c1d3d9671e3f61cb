"""Layers whose features the ranks divide (tensor parallelism), by torch's `parallelize_module`.

A `colwise` layer computes some of its outputs on each rank, and a `rowwise` one after it takes some
of its inputs and sums the results. Between the two, each rank works with its part. Everything else
is the same on all these ranks, as they read the same samples and draw the same random numbers.
"""

from collections.abc import Iterable, Mapping, MutableMapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from mpframe.core.comm import is_sharded
from mpframe.core.errors import ConfigError

OPTION = "distributed.plan"
STYLES: dict[str, Any] = {
    "colwise": ColwiseParallel,
    "colwise_gathered": partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise": RowwiseParallel,
    "sequence": SequenceParallel,
}


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, Any],
    within: Iterable[nn.Module],
    done: set[str],
    formats: MutableMapping[Any, torch.dtype],
) -> None:
    """Divide the layers of a plan that lie within some modules, in place, along a 1-d mesh.

    Their weights become DTensors, in the `formats` that they had. Each rank takes its parts of the
    values it has. The last pattern of a plan that fits decides. `done` holds the names of
    layers that are divided already, and gets the new ones. ConfigError: a pattern fits no
    module, or its style, a word of `STYLES` or a ParallelStyle, does not fit the module.
    """
    tied, inside = _tied(model), {module for owner in within for module in owner.modules()}
    before = dict(model.named_parameters(remove_duplicate=False))
    for name, (pattern, style) in _choose(model, plan).items():
        option, module = f"{OPTION}.{pattern}={style}", model.get_submodule(name)
        if name in done or module not in inside:
            continue
        done.add(name)
        try:
            parallelize_module(model, mesh, {name: _make(style, module)}, src_data_rank=None)
        except (NotImplementedError, RuntimeError, ValueError) as error:
            kind = type(module).__name__
            raise ConfigError(f"{option}: {name} is a {kind}: {error}") from error
        _refuse_uneven(option, name, module, mesh.size())
        module.register_forward_hook(_hide_view)
    for names in tied:
        _tie_again(model, names)
    for name, weight in model.named_parameters(remove_duplicate=False):
        if weight is not before[name]:
            formats[weight] = formats[before[name]]


def _choose(model: nn.Module, plan: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Return the pattern and style of each module that is divided, by its name."""
    names = [name for name, _ in model.named_modules() if name]
    chosen: dict[str, tuple[str, Any]] = {}
    for pattern, style in plan.items():
        fitting = [name for name in names if fnmatchcase(name, pattern)]
        if not fitting:
            raise ConfigError(
                f"{OPTION}.{pattern}: matches no module; the names are {', '.join(names[:8])}, ..."
            )
        chosen |= dict.fromkeys(fitting, (pattern, style))
    return chosen


def _make(style: Any, module: nn.Module) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    if style not in STYLES:
        raise ValueError(f"allowed are {', '.join(STYLES)}, and a _target_ of a ParallelStyle")
    made: ParallelStyle = STYLES[style]()
    if isinstance(made, RowwiseParallel) and isinstance(module, nn.Embedding):
        made.input_layouts = (Replicate(),)  # Each rank gets all numbers of tokens.
    return made


def _refuse_uneven(option: str, name: str, module: nn.Module, ranks: int) -> None:
    """Refuse parts of different sizes: torch takes the activations of all ranks for equally large.

    A weight of no rows or columns has no such part.
    """
    for part, weight in module.named_parameters(recurse=False):
        for placement in weight.placements if isinstance(weight, DTensor) else ():
            if isinstance(placement, Shard) and (rows := weight.shape[placement.dim]) % ranks:
                raise ConfigError(
                    f"{option}: {name}.{part} {list(weight.shape)} has {rows} features to divide, "
                    f"no multiple of distributed.tensor={ranks}"
                )


def _tied(model: nn.Module) -> list[list[str]]:
    """Return the names of each weight that has several."""
    names: dict[Tensor, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(weight, []).append(name)
    return [several for several in names.values() if len(several) > 1]


def _tie_again(model: nn.Module, names: list[str]) -> None:
    """Make the parts of a tied weight one again, of which torch has made one for each module."""
    weights: list[Any] = [model.get_parameter(name) for name in names]
    how = {str(weight.placements[0]) if is_sharded(weight) else "whole" for weight in weights}
    if len(how) > 1:
        raise ConfigError(
            f"{OPTION}: {' and '.join(names)} are one weight, and the plan leaves it "
            f"{' and '.join(sorted(how))}; divide both alike, as an embedding rowwise and a head "
            "colwise_gathered, or neither"
        )
    for name in names:
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner).register_parameter(attribute, weights[0])


def _hide_view(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Return an output that is no view: an in-place op on a view would undo FSDP's hooks on it."""
    plain = isinstance(output, Tensor) and not isinstance(output, DTensor)
    return torch.ops.aten._unsafe_view(output, output.shape) if plain else output
