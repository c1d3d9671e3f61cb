"""A model whose weights are divided among the ranks, by torch's FSDP2 (`fully_shard`).

Each rank keeps a part of every weight, in fp32: what its optimizer steps. A block's weights are
gathered before it runs, each in the format in which one process stores it, and given back after
it; in the backward pass once more. Then the gradients of the block are summed over the ranks in
fp32, and each rank keeps the sums for its part.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mpframe.core.comm import is_sharded, rows_of_a_part, weigh_
from mpframe.core.errors import ConfigError

_WAY_OUT = "use trainer.parallel=ddp"
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Sharding:
    """Divides the weights of a model, and watches its gradients.

    Args:
        model: fp32, the same on all ranks.

    Attributes:
        weight: 0-d fp32, multiplies this rank's gradients before the sum; None: nothing does.

    Raises:
        ConfigError: a weight cannot be divided.
    """

    def __init__(self, model: nn.Module) -> None:
        _refuse_indivisible(model)
        self._model = model
        self.weight: Tensor | None = None
        self._amaxes: list[Tensor] = []
        self._trained: list[tuple[str, nn.Parameter]] = []

    def divide(
        self, formats: Mapping[nn.Parameter, torch.dtype], device: torch.device
    ) -> dict[Tensor, Tensor]:
        """Divide the weights in place; the model goes to `device` block by block.

        Args:
            formats: in which each parameter is gathered: float32, or one half format.
            device: what this rank computes on.

        Returns:
            The parameters as they were, each with the sharded one in its place.
        """
        model = self._model
        before = dict(model.named_parameters(remove_duplicate=False))
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        policy = _policy(formats)
        for block in [*_blocks(model), model]:
            whole = [own for own in block.parameters() if not is_sharded(own)]
            # Also the model gives its weights back: one that stays gathered hides the sharded one.
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
            name = next(name for name, own in model.named_modules() if own is block)
            self._watch(block, name or "the model", _summed_values(whole))
        after = dict(model.named_parameters(remove_duplicate=False))
        self._trained = [(name, own) for name, own in after.items() if own.requires_grad]
        return {before[name]: after[name] for name in before}

    def take_amax(self, device: torch.device) -> Tensor:
        """The largest gradient on this rank before the sums, since the last call.

        Returns:
            0-d fp32, scaled as the loss was; nan if one is nan.
        """
        amaxes, self._amaxes = self._amaxes, []
        return torch.stack(amaxes).max() if amaxes else torch.zeros((), device=device)

    def refuse_unused(self) -> None:
        """Refuse a step that does not use all weights, after the backward pass.

        Raises:
            ConfigError: names the first one that was left out.
        """
        for name, own in self._trained:
            if own.grad is None:
                raise _unused(name)

    def refuse_partial(self, error: BaseException | None) -> None:
        """Raise a ConfigError if an error says that weights were used that were not gathered."""
        if isinstance(error, RuntimeError) and "mixed torch.Tensor and DTensor" in str(error):
            raise ConfigError(
                "trainer.parallel=fsdp: the objective does not call the model, but a part of it; "
                + _WAY_OUT
            ) from error

    def _watch(self, block: Any, name: str, values: int) -> None:
        """Let the gradients of a block be measured and weighed, then summed over the ranks."""
        block.set_custom_reduce_scatter(_Sum(name, values, self._measure_and_weigh))
        block.set_gradient_divide_factor(1.0)
        block.set_force_sum_reduction_for_comms(True)

    def _measure_and_weigh(self, gradients: Tensor) -> None:
        low, high = torch.aminmax(gradients)
        amax = torch.maximum(-low, high)
        if self.weight is not None:
            amax = torch.where(self.weight > 0, amax, 0.0)
            weigh_([gradients], self.weight)
        self._amaxes.append(amax)


class _Sum:
    """Sums the gradients of a block over the ranks, and leaves each rank those of its part.

    A block of which this rank used a part would be added to something else: it is refused.
    """

    def __init__(self, name: str, values: int, see: Callable[[Tensor], None]) -> None:
        self._name, self._values, self._see = name, values, see

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        if input_tensor.numel() != self._values:
            raise _unused(f"a weight of {self._name}")
        self._see(input_tensor)
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


def _policy(formats: Mapping[nn.Parameter, torch.dtype]) -> MixedPrecisionPolicy:
    half = set(formats.values()) - {torch.float32}
    if not half:
        return MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    try:
        return MixedPrecisionPolicy(
            param_dtype=half.pop(),
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
            param_dtype_override_fn=formats.get,
        )
    except TypeError:
        raise ConfigError(
            "dtype=mixed: with trainer.parallel=fsdp it needs torch 2.15, which gathers weights of "
            f"a block in two formats, and this is {torch.__version__}; use dtype=amp"
        ) from None


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The layers that the model repeats: the entries of its lists and sequences.

    One that shares a weight with another stays with the model itself: a weight is gathered by one.
    """
    blocks = list(dict.fromkeys(_entries(model)))
    owners: dict[Tensor, set[nn.Module]] = {}
    for module in model.modules():
        for own in module.parameters(recurse=False):
            owners.setdefault(own, set()).add(module)
    tied = [modules for modules in owners.values() if len(modules) > 1]
    return [block for block in blocks if not any(_cuts(block, modules) for modules in tied)]


def _cuts(block: nn.Module, modules: set[nn.Module]) -> bool:
    """Whether some of these modules are in the block, and others are not."""
    inside = set(block.modules())
    return bool(modules & inside) and not modules <= inside


def _entries(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if type(child) in _CONTAINERS or type(module) not in _CONTAINERS:
            yield from _entries(child)
        elif any(True for _ in child.parameters()):
            yield child


def _summed_values(parameters: Sequence[Tensor]) -> int:
    """How many values the gradients have, each divided into full parts."""
    ranks, total = dist.get_world_size(), 0
    for own in parameters:
        if own.requires_grad:
            total += rows_of_a_part(len(own), ranks) * ranks * own[:1].numel() if len(own) else 0
    return total


def _refuse_indivisible(model: nn.Module) -> None:
    for name, own in model.named_parameters():
        if own.dtype != torch.float32 or not own.dim():
            raise ConfigError(
                f"trainer.parallel=fsdp: {name} is {str(own.dtype)[6:]} {list(own.shape)}, and the "
                f"ranks divide the rows of float32 weights; {_WAY_OUT}"
            )
    for name, module in model.named_modules():
        if getattr(module, "sparse", False):
            raise ConfigError(
                f"trainer.parallel=fsdp: the gradient of {name} is sparse, and ranks sum dense "
                "ones; make the layer with sparse=False"
            )


def _unused(what: str) -> ConfigError:
    return ConfigError(
        f"trainer.parallel=fsdp: {what} was not used in this step; {_WAY_OUT}, or freeze it"
    )
