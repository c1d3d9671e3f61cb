"""An exponential moving average of the fp32 weights, used for validation.

    e <- d e + (1 - d) m

over the masters m after every step that was not skipped. The average is kept in fp32: in half it
would stop moving as soon as (1 - d)(m - e) is below half a unit in the last place of e.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mpframe.errors import CheckpointError, ConfigError


class Ema:
    """The moving average of some weights.

    Args:
        masters: parameter -> the fp32 tensor that is averaged (itself where it is fp32).
        decay: d, 0 < d < 1.

    Raises:
        ConfigError: the decay is out of its range.
    """

    def __init__(self, masters: Mapping[Tensor, Tensor], decay: float) -> None:
        if not 0.0 < decay < 1.0:
            raise ConfigError(
                f"trainer.ema_decay={decay}: must be a number > 0 and < 1, e.g. 0.999"
            )
        self.decay = decay
        self._masters = list(masters.items())
        self._averages = [master.detach().clone() for _, master in self._masters]

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the present masters."""
        targets = [master for _, master in self._masters]
        torch._foreach_lerp_(self._averages, targets, 1.0 - self.decay)

    def restart(self) -> None:
        """Begin again at the present masters, as where they have been loaded."""
        torch._foreach_copy_(self._averages, [master.detach() for _, master in self._masters])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block the model's weights are the averages, rounded to their format."""
        weights = [parameter.detach() for parameter, _ in self._masters]
        kept = [weight.clone() for weight in weights]
        torch._foreach_copy_(weights, self._averages)
        try:
            yield
        finally:
            torch._foreach_copy_(weights, kept)

    def by_name(self, model: nn.Module) -> dict[str, Tensor]:
        """Copies of the averages, by the names of the parameters of `model` they stand for."""
        averages = dict(zip((p for p, _ in self._masters), self._averages, strict=True))
        named = model.named_parameters()
        return {name: averages[p].clone() for name, p in named if p in averages}

    def load_by_name(self, model: nn.Module, averages: Mapping[str, Tensor]) -> None:
        """Continue from saved averages.

        Raises:
            CheckpointError: they belong to other weights; nothing is taken.
        """
        own = self.by_name(model)
        if {n: a.shape for n, a in own.items()} != {n: a.shape for n, a in averages.items()}:
            raise CheckpointError(
                "trainer.ema_decay: the saved averages are of other weights; resume with the model "
                "they were made with"
            )
        names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        ordered = [averages[names[parameter]] for parameter, _ in self._masters]
        torch._foreach_copy_(self._averages, ordered)
