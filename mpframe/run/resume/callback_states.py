"""Gives the callbacks their states of a checkpoint, by name."""

import logging
from collections.abc import Mapping
from typing import Any

from mpframe.errors import CheckpointError, RunInterrupted
from mpframe.training.callback import Callbacks, has_state

log = logging.getLogger(__name__)


def restore(callbacks: Callbacks, saved: Any) -> None:
    """Load each callback's state; warn of states without a callback, and of the reverse.

    Args:
        callbacks: new ones, by name.
        saved: their states, as the checkpoint has them; may be anything.

    Raises:
        CheckpointError: a state does not fit its callback.
    """
    if not isinstance(saved, dict):
        raise CheckpointError("its callbacks are no dict; use another checkpoint")
    for name in callbacks.keys() & saved.keys():
        try:
            callbacks[name].load_state_dict(saved[name])
        except RunInterrupted:
            raise
        except Exception as error:  # A checkpoint may hold anything there.
            raise CheckpointError(
                f"its state of callbacks.{name} does not fit ({error!r:.200}); "
                "resume from another checkpoint"
            ) from None
    _warn_of_the_rest(callbacks, saved)


def _warn_of_the_rest(callbacks: Callbacks, states: Mapping[str, Any]) -> None:
    dropped = [name for name in states if name not in callbacks]
    if dropped:
        log.warning(
            "warning: the checkpoint holds the state of %s, and this run has no such callback: "
            "the next checkpoint is without",
            ", ".join(f"callbacks.{name}" for name in dropped),
        )
    fresh = [name for name, c in callbacks.items() if has_state(c) and name not in states]
    if fresh:
        log.warning(
            "warning: the checkpoint holds no state of %s, which begins without",
            ", ".join(f"callbacks.{name}" for name in fresh),
        )
