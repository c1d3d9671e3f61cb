"""Gives the callbacks their states of a checkpoint, by name.

An older checkpoint, from before the callbacks had names, holds their states by the name of the
class, and `NAME 2` for the second callback of a class.
"""

import logging
from collections import Counter
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
    states = _by_name(callbacks, saved)
    for name in callbacks.keys() & states.keys():
        try:
            callbacks[name].load_state_dict(states[name])
        except RunInterrupted:
            raise
        except Exception as error:  # A checkpoint may hold anything there.
            raise CheckpointError(
                f"its state of callbacks.{name} does not fit ({error!r:.200}); "
                "resume from another checkpoint"
            ) from None
    _say_what_is_left(callbacks, states)


def _say_what_is_left(callbacks: Callbacks, states: Mapping[str, Any]) -> None:
    dropped = [name for name in states if name not in callbacks]
    if dropped:
        log.warning(
            "warning: the checkpoint holds the state of %s, and this run has no such callback: "
            "the next checkpoint is without",
            ", ".join(f"callbacks.{name}" for name in dropped),
        )
    fresh = [name for name, own in callbacks.items() if has_state(own) and name not in states]
    if fresh:
        log.warning(
            "warning: the checkpoint holds no state of %s, which begins without",
            ", ".join(f"callbacks.{name}" for name in fresh),
        )


def _by_name(callbacks: Callbacks, saved: dict[str, Any]) -> dict[str, Any]:
    """The states by today's names; a state without a callback keeps its name."""
    states = _with_results(saved) if "LastEvaluation" in saved else dict(saved)
    seen: Counter[str] = Counter()
    for name, callback in callbacks.items():
        kind = type(callback).__name__
        seen[kind] += 1
        older = kind if seen[kind] == 1 else f"{kind} {seen[kind]}"
        if name not in states and older in states:
            states[name] = states.pop(older)
    return states


def _with_results(saved: dict[str, Any]) -> dict[str, Any]:
    """The loss and the validation, which two callbacks kept, now belong to `results`."""
    states = dict(saved)
    last, curves = states.pop("LastEvaluation"), saved.get("Curves")
    if not isinstance(last, dict):
        raise CheckpointError("its state of LastEvaluation does not fit; use another checkpoint")
    loss = curves.get("train_loss") if isinstance(curves, dict) else None
    evaluation = _with_metrics(last.get("value"))
    return {**states, "results": {"loss": loss, "evaluation": evaluation}}


def _with_metrics(evaluation: Any) -> Any:
    """A validation with metrics by name; an older one had a single metric."""
    if not isinstance(evaluation, dict) or "metric" not in evaluation:
        return evaluation
    name = str(evaluation["metric"])
    return {
        "loss": evaluation.get("loss"),
        "metrics": {name: evaluation.get("value")},
        "higher_is_better": {name: evaluation.get("higher_is_better")},
        "monitor": name,
    }
