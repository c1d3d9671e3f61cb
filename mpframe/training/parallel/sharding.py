"""A model whose weights are sharded across the ranks, by torch's FSDP2 (`fully_shard`).

Each rank keeps a part of every weight, in fp32, which its optimizer steps. A block's weights are
gathered before it runs, each in the format in which one process stores it, and given back after
it, and again in the backward pass. Then the gradients of the block are summed over the ranks in
fp32, and each rank keeps the sums for its part.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from mpframe.core.comm import weigh_
from mpframe.core.errors import ConfigError
from mpframe.core.tree import map_tensors
from mpframe.training.parallel import unused
from mpframe.training.parallel.layout import AXES, Layout
from mpframe.training.parallel.tensor_parallel import parallelize

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Sharding:
    """Shards the weights of a model, and watches its gradients.

    The model is the same on all ranks. ConfigError: a weight is not fp32, or has no rows.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        for name, weight in model.named_parameters():
            if weight.dtype != torch.float32 or not weight.dim():
                raise ConfigError(
                    f"trainer.parallel=fsdp: {name} is {str(weight.dtype)[6:]} "
                    f"{list(weight.shape)}, and the ranks divide the rows of float32 weights; use "
                    "trainer.parallel=ddp"
                )
        self._model, self._layout = model, layout
        self.weight: Tensor | None = None  # 0-d fp32, of this rank's gradients before the sum
        self._amaxes: dict[Tensor | None, list[Tensor]] = {}  # by loss
        self.usage: Any = None  # the Usage of a divided model
        self.formats: dict[Tensor, torch.dtype] = {}  # in which weights are gathered

    def divide(
        self,
        formats: MutableMapping[Any, torch.dtype],
        device: torch.device,
        fill: Callable[[Mapping[str, nn.Module]], None],
    ) -> dict[Tensor, Tensor]:
        """Shard the weights in place. The model goes to `device` block by block.

        `formats` says in which format each parameter is gathered: float32, or one half format.
        `fill` gives blocks, which it gets by name, their values before they are divided.
        Returns the parameters as they were, each with its sharded one.
        """
        model = self._model
        before = dict(model.named_parameters(remove_duplicate=False))
        layout, shape = self._layout, self._layout.shape(dist.get_world_size())
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=AXES)
        _limit_waits(mesh, device)
        names, planned = {module: name for name, module in model.named_modules()}, set[str]()
        options: dict[str, Any] = {
            "mesh": mesh["replicas", "shards"] if layout.replicas > 1 else mesh["shards"],
            "mp_policy": _policy(formats),
            # Also the model gives its weights back: one that stays gathered hides the sharded one.
            "reshard_after_forward": True,
        }
        if layout.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
        entries = blocks_of(model)
        for blocks in [*_neighbours(entries, names, layout.blocks_together), [model]]:
            fill({names[block]: block for block in blocks})
            if layout.plan:
                parallelize(model, mesh["tensor"], layout.plan, blocks, planned, formats)
            fully_shard(blocks, **options)
            sharded: Any = blocks[0]
            sharded.set_custom_reduce_scatter(_Sum(self._measure_and_weigh))
            if unused.ADDS_ZEROS:
                sharded.set_reduce_scatter_unused_params(True, recurse=False)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        if layout.cpu_offload:
            model.register_forward_hook(_to_host)
        if not layout.reshard_after_forward:
            model.register_forward_pre_hook(_keep_for_backward)
        after = dict(model.named_parameters(remove_duplicate=False))
        self.usage = unused.Usage(model, entries)
        self.formats = {after[name]: formats[before[name]] for name in before}
        return {before[name]: after[name] for name in before}

    def compile_blocks(self) -> None:
        """Compile the forward pass of each block, or of a model without blocks.

        A graph of the whole model would break wherever weights are gathered.
        """
        for module in blocks_of(self._model) or [self._model]:
            module.forward = torch.compile(module.forward)

    @contextmanager
    def train_only(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Freeze all other weights within the block, for one of several losses.

        `backward(inputs=...)` would not do: a gathered weight is another tensor.
        """
        trained = set(parameters)
        others = [p for p in self._model.parameters() if p.requires_grad and p not in trained]
        self.usage.loss = parameters[0] if parameters else None
        try:
            for parameter in others:
                parameter.requires_grad_(False)
            yield
        finally:
            self.usage.loss = None
            for parameter in others:
                parameter.requires_grad_(True)

    def begin_backward(self, weight: Tensor) -> None:
        """Begin a backward pass, in which this rank's gradients have a weight, 0-d fp32."""
        if self.usage.loss is None or None in self._amaxes:  # A single loss has no other beside it.
            self._amaxes = {}
        self.weight, self._amaxes[self.usage.loss] = weight, []

    def amax_before_sums(self, amax: Tensor, scale: Tensor | float, held: Any) -> Tensor:
        """Return this rank's largest gradient in the last pass before the sums, 0-d fp32.

        It is unscaled, of the loss that trains the parameters `held`. Only what was summed had to
        fit into half, so it counts, but inf if `amax`, the largest of their sums, is inf or nan. It
        is `amax` if nothing was summed, because this rank has all shares of the data, or if
        parameters of another optimizer had no finite gradient.
        """
        passes = [seen for loss, seen in self._amaxes.items() if loss is None or loss in held]
        amaxes = [one for seen in passes for one in seen]
        before = torch.stack(amaxes).max().to(amax.device) / scale if amaxes else amax
        known = torch.where(before < torch.inf, before, amax)
        return torch.where(amax < torch.inf, known, torch.inf)

    def _measure_and_weigh(self, gradients: Tensor) -> None:
        low, high = torch.aminmax(gradients)
        amax = torch.maximum(-low, high)
        if self.weight is not None:
            weight = self.weight.to(gradients.device)
            amax = torch.where(weight > 0, amax, 0.0)
            weigh_([gradients], weight)
        self._amaxes.setdefault(self.usage.loss, []).append(amax)


class _Sum(DefaultReduceScatter):
    """Sums the gradients of a block over the ranks, and leaves each rank its part of the sums."""

    def __init__(self, measure: Callable[[Tensor], None]) -> None:
        self._measure = measure

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *rest: Any, **more: Any) -> Any:
        self._measure(input_tensor)
        return super().__call__(output_tensor, input_tensor, *rest, **more)


def _limit_waits(mesh: Any, device: torch.device) -> None:
    """Give the groups of a mesh the timeout of all ranks. torch gives them half an hour."""
    world: Any = dist.group.WORLD
    limit = world._get_backend(device).options._timeout
    # It has a public name since torch 2.15.
    set_timeout: Any = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in mesh.get_all_groups():
        set_timeout(limit, group)


def _policy(formats: Mapping[nn.Parameter, torch.dtype]) -> MixedPrecisionPolicy:
    half = set(formats.values()) - {torch.float32}
    options: dict[str, Any] = {"reduce_dtype": torch.float32, "cast_forward_inputs": False}
    if half:
        options |= {"param_dtype": half.pop(), "param_dtype_override_fn": formats.get}
    try:
        return MixedPrecisionPolicy(**options)
    except TypeError:
        raise ConfigError(
            "dtype=mixed: with trainer.parallel=fsdp it needs torch 2.15, which gathers weights of "
            f"a block in two formats, and this is {torch.__version__}; use dtype=amp"
        ) from None


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers that the model repeats: the entries of its lists and sequences.

    A layer that shares a weight with another stays with the model, as one module gathers a weight.
    """
    owners: dict[Tensor, set[nn.Module]] = {}
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            owners.setdefault(weight, set()).add(module)

    def shares(block: nn.Module) -> bool:
        inside = set(block.modules())
        return any(0 < len(inside & modules) < len(modules) for modules in owners.values())

    return [block for block in dict.fromkeys(_entries(model)) if not shares(block)]


def _entries(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if type(child) in _CONTAINERS or type(module) not in _CONTAINERS:
            yield from _entries(child)
        elif any(True for _ in child.parameters()):
            yield child


def _neighbours(
    blocks: Sequence[nn.Module], names: Mapping[nn.Module, str], together: int
) -> Iterator[list[nn.Module]]:
    """Yield up to so many blocks at once that follow each other in one list of the model."""
    for _, entries in groupby(blocks, lambda block: names[block].rpartition(".")[0]):
        alike = list(entries)
        yield from (alike[n : n + together] for n in range(0, len(alike), together))


def _to_host(model: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Bring outputs to the parts: loss, scaler and optimizer run on the host as well."""
    return map_tensors(lambda tensor: tensor.cpu(), outputs)


def _keep_for_backward(model: Any, inputs: Any) -> None:
    """Keep gathered weights until the backward pass. Where none follows, they are given back."""
    model.set_reshard_after_forward(not torch.is_grad_enabled())
