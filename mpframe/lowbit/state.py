"""The state of a run's products from step to step: random numbers, and the amax of earlier steps.

Both are part of a checkpoint, so a resumed run rounds like the one that it continues.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mpframe.core.casting.cast import count_steps
from mpframe.core.comm import Comm

ROLES = ("x", "w", "dy")
_SEED_OFFSET = 0x9E3779B9


class AmaxHistory:
    """The largest magnitude of one operand in each of the last optimizer steps.

    All passes between two steps count as one: the micro-batches of an accumulated step, and the
    forward pass that a checkpointed module repeats, have one scale. Steps without a finite number
    other than zero do not count.
    """

    def __init__(self, past: Tensor, present: Tensor | None = None) -> None:
        self.past = past  # float32, of each step, the latest first, or 0
        # 0-d float32, of the running step, or 0.
        self.present = past.new_zeros(()) if present is None else present
        self._step = -1
        self.not_agreed = False  # whether something was seen since the ranks agreed

    def amax(self, now: Tensor, length: int, record: bool) -> Tensor:
        """Return the largest of `length` past steps, or `now`, the tensor's, if there is none."""
        self.past, self.present = self.past.to(now.device), self.present.to(now.device)
        if self._step != count_steps():
            self._end_step(self.present > 0)
            self.present = torch.zeros_like(self.present)
        if record:
            # An overflow makes this step fail, and no later one.
            self.present = torch.maximum(self.present, torch.where(now.isfinite(), now, 0.0))
            self._step, self.not_agreed = count_steps(), True
        largest = self.past[:length].max()
        return torch.where(largest > 0, largest, now)

    def agree(self, largest: Tensor, step: int) -> None:
        """Take the largest of all ranks, 0-d, in the step that this rank counts as `step`."""
        if not self.not_agreed:  # `present` is of an earlier step.
            self.past, self.present = self.past.to(largest.device), self.present.to(largest.device)
            self._end_step((largest > 0) & (self.present > 0))
            largest = torch.where(largest > 0, largest, self.present)
        self.present, self._step, self.not_agreed = largest, step, False

    def _end_step(self, ended: Tensor) -> None:
        """Move `present` into the past, if `ended`."""
        self.past = torch.where(ended, torch.cat([self.present[None], self.past[:-1]]), self.past)


# Takes a weight's name (or an empty one), the product, the operand, and a row of `count_noise`.
Watch = Callable[[str, str, str, Tensor], None]


class ProductState:
    """The generators of stochastic rounding, and the amax histories of delayed scaling.

    Each history holds `longest` optimizer steps, the most that any recipe looks back. So a rank
    that has not used a weight, and does not know its recipe, keeps the same one.
    """

    def __init__(self, longest: int = 0) -> None:
        self.longest = longest
        self.watch: Watch | None = None  # called for each operand that is quantised
        self._generators: dict[str, torch.Generator] = {}
        self._histories: dict[str, AmaxHistory] = {}
        self._names: dict[int, str] = {}  # by the id of a weight that lives
        self._matrices: dict[str, None] = {}  # the names of weights of several axes
        self._step, self._device = -1, torch.device("cpu")  # of the last record

    def learn_names(self, model: nn.Module) -> None:
        """Learn the names of the model's weights, by which histories are kept."""
        for name, parameter in model.named_parameters():
            if id(parameter) not in self._names:
                self._names[id(parameter)] = name
                if is_lazy(parameter) or parameter.dim() > 1:
                    self._matrices[name] = None
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

    def track_amax(self, operand: str, now: Tensor, length: int, record: bool) -> Tensor:
        """Return the amax of `length` optimizer steps for the scale of an operand.

        `operand` names the weight and the role. `now` is the tensor's amax, 0-d. Without `record`
        the pass trains nothing and leaves no trace.
        """
        history = self._histories.get(operand)
        if history is None:
            history = AmaxHistory(torch.zeros(self.longest, device=now.device))
            if record:
                self._histories[operand] = history
        if record:
            self._step, self._device = count_steps(), now.device
        return history.amax(now, length, record)

    def agree(self, comm: Comm) -> None:
        """Give all ranks the histories of one process that sees all samples.

        All ranks of `comm` call it once in each step, after the backward pass. A weight that only
        one rank has used gets a history on the others.
        """
        operands = [f"{name} {role}" for name in self._matrices for role in ROLES]
        histories = [self._histories.get(operand) for operand in operands]
        nothing = torch.zeros((), device=self._device)
        seen = [nothing if h is None or not h.not_agreed else h.present for h in histories]
        for operand, history, largest in zip(
            operands, histories, comm.max(torch.stack(seen)), strict=True
        ):
            if history is None:
                history = AmaxHistory(torch.zeros(self.longest, device=self._device))
                self._histories[operand] = history
            history.agree(largest, self._step)

    def state_dict(self) -> dict[str, Any]:
        """Return the generators' states by device type, and the histories with numbers."""
        return {
            "generators": {device: g.get_state() for device, g in self._generators.items()},
            "amax": {
                name: {"past": history.past.clone(), "present": history.present.clone()}
                for name, history in self._histories.items()
                if history.present > 0 or history.past.any()
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`, which is empty for a run that had no products."""
        self._generators = {}
        for device, generator in state.get("generators", {}).items():
            self._generators[device] = torch.Generator(device)
            self._generators[device].set_state(generator.cpu())
        self._histories = {
            name: AmaxHistory(stored["past"].clone(), stored["present"])
            for name, stored in state.get("amax", {}).items()
        }
