"""An exponential moving average of the fp32 weights, used for validation.

    e <- d_t e + (1 - d_t) m,    d_t = min(d, (1 + t) / (10 + t))

over the masters m after every applied step. t counts the updates before it. The decay is
warmed up: with a constant decay the share of the first, random weights would be d^t, for d = 0.99
still 30 % after 120 steps. The average is fp32: in half it would stop moving as soon as
(1 - d)(m - e) is below half a unit in the last place of e.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mpframe.core.callback import Algorithm
from mpframe.core.comm import part_for, part_of, shard_like
from mpframe.core.errors import CheckpointError
from mpframe.core.optim.masters import round_into
from mpframe.core.ranges import Range, require
from mpframe.core.step_result import StepResult
from mpframe.core.tree import widest
from mpframe.training.trainer import Trainer


class Ema(Algorithm):
    """The moving average of a model's weights. It follows each applied step, and is validated.

    Args:
        masters: parameter -> the fp32 tensor that is averaged (itself if it is fp32).
        decay: d, 0 < d < 1, else ConfigError.
    """

    def __init__(self, model: nn.Module, masters: Mapping[Tensor, Tensor], decay: float) -> None:
        self.decay = require("trainer.ema_decay", decay, Range(above=0.0, below=1.0), "e.g. 0.999")
        self._model, self._masters = model, dict(masters)
        self._averages = [master.detach().clone() for master in masters.values()]
        self.updates: int | Tensor = 0  # t, on the device (0-d) from the first late verdict on

    @torch.no_grad()
    def update(self, skipped: Tensor | None = None) -> None:
        """Move the averages towards the present masters, unless `skipped` (0-d bool) is true."""
        if skipped is None and not isinstance(self.updates, Tensor):
            decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
            torch._foreach_lerp_(self._averages, self._present(), 1.0 - decay)
            self.updates += 1
            return
        # The same on the device, in float64, which gives the same numbers.
        device = self._averages[0].device
        skipped = torch.zeros((), dtype=torch.bool, device=device) if skipped is None else skipped
        count = torch.as_tensor(self.updates, dtype=widest(device), device=device)
        weight = 1.0 - ((1 + count) / (10 + count)).clamp(max=self.decay)
        for average, master in zip(self._averages, self._present(), strict=True):
            moved = torch.lerp(average, master, weight.to(average.dtype))
            # Not a weight of 0: 0 * inf is nan, and -0 + 0 is 0.
            average.copy_(torch.where(skipped, average, moved))
        self.updates = count + ~skipped

    def after_update(self, trainer: Any, result: StepResult) -> None:
        """Move at once, before the weights change. A verdict on the device decides there."""
        if result.verdict is None:
            self.update(result.skipped)
        elif not result.verdict.skipped:
            self.update()

    def on_load_weights(self, trainer: Any) -> None:
        """Begin again at the present masters."""
        torch._foreach_copy_(self._averages, self._present())
        self.updates = 0

    def _present(self) -> list[Tensor]:
        return [master.detach() for master in self._masters.values()]

    @contextmanager
    def evaluating(self, trainer: Any) -> Iterator[None]:
        """Set the model's weights to the averages within the block, rounded as masters are."""
        weights = [part_of(parameter).detach() for parameter in self._masters]
        kept = [weight.clone() for weight in weights]
        round_into(zip(weights, self._averages, strict=True))
        try:
            yield
        finally:
            torch._foreach_copy_(weights, kept)
            for parameter, weight in zip(self._masters, weights, strict=True):
                if parameter.dtype != weight.dtype:  # The model has set its `.data` to half.
                    parameter.data = weight

    def by_name(self) -> dict[str, Tensor]:
        """Return copies of the averages, by all names of their parameters in the model."""
        averages = zip(self._masters, self._averages, strict=True)
        copies = {p: shard_like(p, average.clone()) for p, average in averages}
        named = self._model.named_parameters(remove_duplicate=False)
        return {name: copies[p] for name, p in named if p in copies}

    def load_by_name(self, averages: Mapping[str, Tensor], updates: int = 0) -> None:
        """Continue from what `by_name` gave after `updates` updates. CheckpointError if unfit."""
        known = self.by_name()
        if {n: a.shape for n, a in known.items()} != {n: a.shape for n, a in averages.items()}:
            raise CheckpointError(
                "trainer.ema_decay: the saved averages are of other weights; resume with the model "
                "they were made with"
            )
        names: dict[Tensor, str] = {p: name for name, p in self._model.named_parameters()}
        for average, parameter in zip(self._averages, self._masters, strict=True):
            average.copy_(part_for(parameter, averages[names[parameter]]))
        self.updates = updates

    def state_dict(self) -> dict[str, Any]:
        return {"ema": self.by_name(), "ema_updates": int(self.updates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("ema") is not None:
            self.load_by_name(state["ema"], state["ema_updates"])


def ema_of(trainer: Trainer) -> Ema | None:
    """Return the average that a trainer keeps, or None."""
    return next((a for a in trainer.algorithms.values() if isinstance(a, Ema)), None)
