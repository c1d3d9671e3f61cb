"""The state of every random generator a step may draw from, loadable without unpickling code."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


def rng_state() -> dict[str, Any]:
    """The states of torch's generators (CPU and every CUDA device), numpy's and python's."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys).copy()), *map(float, rest)],
        "python": random.getstate(),
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Set the random generators to what `rng_state` returned, on the available devices."""
    torch.set_rng_state(state["torch"])
    for number, cuda in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda, number)
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy(), int(position), int(has_gauss), gauss))
    random.setstate(state["python"])


@dataclass(frozen=True)
class RandomState:
    """The states of torch's generators, from which models draw.

    Attributes:
        cpu: state of the CPU's generator.
        device: state of the model's CUDA device's, or None.
    """

    cpu: Tensor
    device: Tensor | None = None

    @classmethod
    def now(cls, device: torch.device) -> "RandomState":
        """The present states; does not wait for the device."""
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), on_device)

    def restore(self, device: torch.device) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.cpu)
        if self.device is not None and device.type == "cuda":
            torch.cuda.set_rng_state(self.device, device)
