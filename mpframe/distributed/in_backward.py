"""Gradients that are averaged while the backward pass runs, by torch's DistributedDataParallel.

It sends the gradients of the last layers while those of the first are still computed: in the format
of the weights, so those of half weights are added in half. Each layer must be used in every step,
by a call of the model itself; what is not would stay as it is on each rank, and is refused.
"""

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mpframe.errors import ConfigError


class InBackward:
    """A model for the ranks to train together.

    Args:
        model: on its device; the same on all ranks.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._trained: list[int] = []
        self._parallel: _Parallel | None = None

    def model(self) -> nn.Module:
        """What is to be called in the place of the model in this step."""
        trained = [id(own) for own in self._model.parameters() if own.requires_grad]
        if self._parallel is None or trained != self._trained:  # Some are frozen for a while.
            self._parallel, self._trained = _Parallel(self._model), trained
        self._parallel.called = False
        return self._parallel

    def refuse_unused(self) -> None:
        """Refuse gradients that are not averaged, after the backward pass.

        Raises:
            ConfigError: the model was not called, or a parameter was not used.
        """
        way_out = "use trainer.reduce=after_backward"
        if self._parallel is not None and not self._parallel.called:
            raise ConfigError(
                "trainer.reduce=in_backward: the objective does not call the model, but a part of "
                f"it; {way_out}"
            )
        for name, own in self._model.named_parameters():
            if own.requires_grad and own.grad is None:
                raise ConfigError(
                    f"trainer.reduce=in_backward: {name} was not used in this step; {way_out}, or "
                    "freeze it"
                )


class _Parallel(DistributedDataParallel):
    """The model's attributes are its own, too: an objective may read them."""

    called = False

    def __init__(self, model: nn.Module) -> None:
        # Ranks begin with the same weights, and the trainer keeps the buffers the same.
        super().__init__(model, broadcast_buffers=False, init_sync=False)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        self.called = True
        return super().forward(*inputs, **named)  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)
