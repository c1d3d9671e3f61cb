"""The door for ops that run in another way: products below 16 bits, or a handler of a user.

A `Handler` runs one call of an op. The cast makes one for each op from the lists (handlers.py). An
`OpHandler` comes before the lists: the cast asks it for each op, with the recipe that is named
where the op runs. It answers with a handler of its own, or with None.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from mpframe.distributed.world import World

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Handler = Callable[[Any, Args, Kwargs], Any]
"""Takes the function that was called, and its arguments before any cast; returns the result."""


class OpHandler:
    """A base class: each method may be overridden, and none has to be.

    `Precision(..., op_handlers=[...])` takes them.
    """

    def handler_of(self, op: str, recipe: str | None) -> Handler | None:
        """Return what runs an op, or None to leave it to the lists.

        The answer is kept, so it must be the same each time. While a handler runs, nothing is cast.
        It may return NotImplemented: then the lists decide about that call.

        Args:
            op: its name, as the lists write it.
            recipe: the name in `dtype.products`, or in a pin of the module that runs; None: there
                is none.
        """
        return None

    def attach(self, model: nn.Module) -> None:
        """Look at a model before it runs, and refuse what cannot be done on its device."""

    def sync(self, world: World) -> None:
        """Bring what is measured in a step in line with the other ranks; called after each step."""

    def state_dict(self) -> dict[str, Any]:
        """What lasts from step to step, under names that no other handler uses."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned; the names may be missing."""
