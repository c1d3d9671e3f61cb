"""What the products of a run carry from step to step: random numbers, and the amax of steps before.

Both are part of a checkpoint, so a resumed run rounds as the run it goes on with.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mpframe.precision import optimizer_steps

_SEED_OFFSET = 0x9E3779B9


class AmaxHistory:
    """The largest magnitude of one operand in each of the optimizer steps before.

    What is seen between two steps counts as one: the micro-batches of an accumulated step, and the
    forward pass that a checkpointed module runs again, have one scale.

    Attributes:
        past: float32, of each step, the latest first; 0: not there yet.
        present: 0-d float32, of the step that is running; None: nothing was seen.
    """

    def __init__(self, past: Tensor, present: Tensor | None = None) -> None:
        self.past, self.present = past, present
        self._step = -1

    def amax(self, own: Tensor, record: bool) -> Tensor:
        """The largest of the past; `own`, that of the tensor itself, as long as there is none."""
        self.past = self.past.to(own.device)
        if self.present is not None and self._step != optimizer_steps.taken():
            self.past = torch.cat([self.present.to(own.device)[None], self.past[:-1]])
            self.present = None
        if record:
            # What is not finite makes its own step fail, and no later one.
            seen = torch.where(own.isfinite(), own, 0.0)
            self.present = seen if self.present is None else torch.maximum(self.present, seen)
            self._step = optimizer_steps.taken()
        largest = self.past.max()
        return torch.where(largest > 0, largest, own)


Watch = Callable[[str, str, str, Tensor], None]
"""Takes a weight's name (or an empty one), the product, the operand, and a row of noise.py."""


class ProductState:
    """The generators of stochastic rounding, and the amax histories of delayed scaling.

    Attributes:
        watch: called for each operand that is quantised; None: nothing is counted.
    """

    def __init__(self) -> None:
        self.watch: Watch | None = None
        self._generators: dict[str, torch.Generator] = {}
        self._histories: dict[str, AmaxHistory] = {}
        self._names: dict[int, str] = {}  # by the id of a weight that lives

    def learn_names(self, model: nn.Module) -> None:
        """Know the model's weights by name: a product's histories are kept under its weight's."""
        for name, parameter in model.named_parameters():
            if id(parameter) not in self._names:
                self._names[id(parameter)] = name
                weakref.finalize(parameter, self._names.pop, id(parameter)).atexit = False

    def name_of(self, weight: Any) -> str:
        """The name of a weight; empty for any other tensor."""
        return self._names.get(id(weight), "")

    def draw(self, like: Tensor) -> Tensor:
        """Uniform numbers in [0, 1), fp32, of the shape of `like`, seeded by the run's seed."""
        device = like.device.type
        if device not in self._generators:
            # Not the seed itself: by that the weights were drawn.
            seed = (torch.initial_seed() + _SEED_OFFSET) % 2**63
            self._generators[device] = torch.Generator(like.device).manual_seed(seed)
        return torch.rand(like.shape, generator=self._generators[device], device=like.device)

    def known_amax(self, operand: str, own: Tensor, length: int, record: bool) -> Tensor:
        """The amax that the scale of a product's operand comes from.

        Args:
            operand: the weight's name and the operand's.
            own: 0-d, of the tensor itself.
            length: of the history, in optimizer steps.
            record: False for a pass that trains nothing: it leaves no trace.
        """
        history = self._histories.get(operand)
        if history is None:
            history = AmaxHistory(torch.zeros(length, device=own.device))
            if record:
                self._histories[operand] = history
        return history.amax(own, record)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """The block may run the model; afterwards all is as before."""
        before = self.state_dict()
        try:
            yield
        finally:
            self.load_state_dict(before)

    def state_dict(self) -> dict[str, Any]:
        """The generators' states by device type, and the histories by operand."""
        return {
            "generators": {device: g.get_state() for device, g in self._generators.items()},
            "amax": {
                name: {"past": own.past.clone(), "present": own.present}
                for name, own in self._histories.items()
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned; nothing of a run that had no products."""
        self._generators = {}
        for device, generator in state.get("generators", {}).items():
            self._generators[device] = torch.Generator(device)
            self._generators[device].set_state(generator.cpu())
        self._histories = {
            name: AmaxHistory(own["past"].clone(), own["present"])
            for name, own in state.get("amax", {}).items()
        }
