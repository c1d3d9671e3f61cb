"""The state of every random generator a step may draw from, loadable without unpickling code."""

import io
import random
from typing import Any

import numpy as np
import torch

from mpframe.distributed.world import World


def rng_state() -> dict[str, Any]:
    """The states of torch's generators (CPU and every CUDA device), numpy's and python's."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys).copy()), *map(float, rest)],
        "python": random.getstate(),
    }


def rng_of_ranks(world: World) -> list[dict[str, Any]]:
    """The states of all ranks in their order, on rank 0; an empty list on the others."""
    own = rng_state()
    if world.size == 1:
        return [own]
    file = io.BytesIO()  # pickle could not read numpy's state again, a tensor of uint32.
    torch.save(own, file)
    sent = world.gather_object(file.getvalue())
    return [torch.load(io.BytesIO(one), map_location="cpu", weights_only=True) for one in sent]


def rng_of(state: dict[str, Any], rank: int) -> dict[str, Any] | None:
    """What a checkpoint's state holds for a rank; None if it was made with fewer ranks."""
    states = [state["rng"], *state.get("rng_of_other_ranks", [])]
    return states[rank] if rank < len(states) else None


def restore_rng(state: dict[str, Any]) -> None:
    """Set the random generators to what `rng_state` returned, on the available devices."""
    torch.set_rng_state(state["torch"])
    for number, cuda in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda, number)
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy(), int(position), int(has_gauss), gauss))
    random.setstate(state["python"])
