"""The state of a run's products: random numbers, and for a watch the names of weights.

The random numbers are part of a checkpoint, so a resumed run rounds like the one that it continues.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_SEED_OFFSET = 0x9E3779B9

# Takes a weight's name (or an empty one), the product, the operand, and a row of `count_noise`.
Watch = Callable[[str, str, str, Tensor], None]


class ProductState:
    """The generators of stochastic rounding, and who watches the quantisation of which weights."""

    def __init__(self) -> None:
        self.watch: Watch | None = None  # called for each operand that is quantised
        self._generators: dict[str, torch.Generator] = {}
        self._names: dict[int, str] = {}  # by the id of a weight that lives

    def learn_names(self, model: nn.Module) -> None:
        """Learn the names of the model's weights, which a watch is told."""
        for name, parameter in model.named_parameters():
            if id(parameter) not in self._names:
                self._names[id(parameter)] = name
                weakref.finalize(parameter, self._names.pop, id(parameter)).atexit = False

    def name_of(self, weight: Any) -> str:
        """Return the name of a weight, or "" for any other tensor."""
        return self._names.get(id(weight), "")

    def draw(self, like: Tensor) -> Tensor:
        """Return uniforms in [0, 1), fp32, of the shape of `like`, by the run's seed."""
        device = like.device.type
        if device not in self._generators:
            # Not the seed itself, which has drawn the weights.
            seed = (torch.initial_seed() + _SEED_OFFSET) % 2**63
            self._generators[device] = torch.Generator(like.device).manual_seed(seed)
        return torch.rand(like.shape, generator=self._generators[device], device=like.device)

    def state_dict(self) -> dict[str, Any]:
        """Return the generators' states by device type."""
        return {"generators": {device: g.get_state() for device, g in self._generators.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`, which is empty for a run that had no products."""
        self._generators = {}
        for device, generator in state.get("generators", {}).items():
            self._generators[device] = torch.Generator(device)
            self._generators[device].set_state(generator.cpu())
