"""The content of a checkpoint: a `Snapshot` of a run's state, and the weights in it.

If ranks divide the weights, each writes its parts (parts.py). The rest of each rank's state, such
as its random generators, is in the file that rank 0 writes.
"""

import copy
import io
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from mpframe.core.comm import Comm, is_sharded, part_of
from mpframe.core.errors import CheckpointError
from mpframe.core.tree import HALF, dtype_name, tensors_in


@dataclass(frozen=True)
class Snapshot:
    """A run between two steps."""

    global_step: int  # names the checkpoint
    state: dict[str, Any]  # tensors, numbers, strings, and lists, tuples and dicts of them
    config: str = ""  # the resolved options as YAML
    facts: dict[str, Any] = field(default_factory=dict)  # JSON: `validation`, `made_on`, `run`

    def to_cpu(self) -> Self:
        """Return a copy with all tensors on the CPU: one for those that are the same memory."""
        copies, made = dict[Any, Tensor](), dict[int, Any]()
        for tensor in tensors_in(self.state):
            place = place_of(tensor)
            if not place[0] or place not in copies:
                copies[place] = tensor.detach().to("cpu", copy=True)
            made[id(tensor)] = copies[place]
        return replace(self, state=copy.deepcopy(self.state, made))


def rng_state() -> dict[str, Any]:
    """Return the states of torch's generators (CPU and every GPU), numpy's and Python's."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        **({"mps": torch.mps.get_rng_state()} if torch.backends.mps.is_available() else {}),
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys).copy()), *map(float, rest)],
        "python": random.getstate(),
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Set the random generators to what `rng_state` returned, on the available devices."""
    torch.set_rng_state(state["torch"])
    for number, cuda in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda, number)
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy(), int(position), int(has_gauss), gauss))
    random.setstate(state["python"])


@dataclass(frozen=True)
class RandomState:
    """The states of torch's generators of the CPU and a GPU, from which models draw."""

    cpu: Tensor
    device: Tensor | None = None

    @classmethod
    def now(cls, device: torch.device) -> "RandomState":
        """Take the present states without waiting for the device."""
        gpu = torch.get_device_module(device) if device.type in ("cuda", "mps") else None
        return cls(torch.get_rng_state(), gpu.get_rng_state(device) if gpu else None)

    def restore(self, device: torch.device) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.cpu)
        if self.device is not None and device.type in ("cuda", "mps"):
            torch.get_device_module(device).set_rng_state(self.device, device)


OTHER_RANKS = "other_ranks"  # the entry of a state with the list of the states of ranks 1, 2, ...


def of_other_ranks(comm: Comm, state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the states of data ranks 1, 2, ... on rank 0, and an empty list elsewhere."""
    if comm.size == 1:
        return []
    file = io.BytesIO()  # pickle cannot restore numpy's random state, a tensor of uint32.
    torch.save(state, file)
    sent = comm.gather_object(file.getvalue())[comm.tensor :: comm.tensor]
    return [torch.load(io.BytesIO(one), map_location="cpu", weights_only=True) for one in sent]


KINDS = ("trained", "ema")


def weights_of(state: Mapping[str, Any], kind: str, path: Path) -> dict[str, Tensor]:
    """Return parameters and buffers by name from a state that `load` returned.

    With `ema` the averages stand for their parameters. CheckpointError: it has no such weights.
    """
    weights = _tensors(state, "weights", path)
    if kind == "trained":
        return weights
    averages = averages_of(state, path)
    if not averages.keys() <= weights.keys():
        raise CheckpointError(f"{path}: its averages do not belong to its weights; use another one")
    return {**weights, **averages}


def read_validated_kind(state: Mapping[str, Any]) -> str:
    """Return the kind of weights that the run was validated with: `ema` or `trained`."""
    return "trained" if _trainer_of(state).get("ema") is None else "ema"


def averages_of(state: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    """Return the averages by the name of their parameter."""
    trainer = _trainer_of(state)
    if trainer and trainer.get("ema") is None:
        raise CheckpointError(
            f"{path}: holds no averages, trainer.ema_decay was off; use weights=trained"
        )
    return _tensors(state, "ema", path)


def extra_state_of(state: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return what the run changed beside its weights (see core/buffers.py)."""
    extra = state["trainer"].get("extra_state")
    if not isinstance(extra, dict):
        raise _not_of_a_run(path, "extra_state")
    return extra


def rounding(model: nn.Module, weights: Mapping[str, Tensor]) -> str:
    """Return a clause about the half weights of `model`, which are rounded from `weights`."""
    half = {name: p.dtype for name, p in model.named_parameters() if p.dtype in HALF}
    if not half:
        return "no parameter is rounded"
    beyond_range = (weights[n].abs() > torch.finfo(dtype).max for n, dtype in half.items())
    clamped = sum(int(values.sum()) for values in beyond_range)
    formats = " and ".join(sorted({dtype_name(dtype) for dtype in half.values()}))
    beyond = f", {clamped} values beyond its range clamped to it" if clamped else ""
    return f"{len(half)} parameters are rounded to {formats}{beyond}"


def _trainer_of(state: Any) -> Mapping[str, Any]:
    """Return a trainer's state, or an empty one if the state, from anybody, has none."""
    trainer = state.get("trainer") if isinstance(state, Mapping) else None
    return trainer if isinstance(trainer, Mapping) else {}


def _tensors(state: Mapping[str, Any], name: str, path: Path) -> dict[str, Tensor]:
    tensors = _trainer_of(state).get(name)
    items = tensors.items() if isinstance(tensors, dict) else ()
    if not items or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in items):
        raise _not_of_a_run(path, name)
    return dict(items)


def _not_of_a_run(path: Path, name: str) -> CheckpointError:
    return CheckpointError(f"{path}: holds no {name} of a run; use a checkpoint of mpframe")


def address_of(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, or 0 if it has none."""
    if is_sharded(tensor):  # The memory of an empty part is there as well.
        return part_of(tensor).untyped_storage().data_ptr()
    return tensor.data_ptr() if tensor.layout is torch.strided else 0  # Sparse ones have none.


def place_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return where a tensor lies in memory and how it is read, which no other tensor shares."""
    strides = tensor.stride() if tensor.layout is torch.strided else ()
    return address_of(tensor), tensor.dtype, tensor.device, tuple(tensor.shape), strides
