"""A run as its callbacks see it, and their setup and teardown around the training."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpframe.core.callback import Callback, Callbacks, call
from mpframe.data.loading import Loader
from mpframe.tracking.tracker import Tracker

if TYPE_CHECKING:
    from mpframe.training.callbacks.results import Results
    from mpframe.training.callbacks.throughput import Throughput
    from mpframe.training.trainer import Trainer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunContext:
    """The parts of a run that a callback may read and use.

    Attributes:
        folder: the run's existing folder, into which a callback may write files.
        config: the resolved options as YAML, without secrets.
        identity: a name that no other run has, and that a resumed run keeps.
        tracker: writes to TensorBoard.
        train: the loader of the training data, `len(train)` batches an epoch.
        throughput: samples and seconds of the training so far.
        results: the last loss, the last validation and the best one.
        usage: all that using the weights takes, as JSON values (see run/description.py).
    """

    folder: Path
    config: str
    identity: str
    tracker: Tracker
    train: Loader
    throughput: "Throughput"
    results: "Results"
    usage: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def set_up(trainer: "Trainer", context: Any) -> Iterator[None]:
    """Call `setup` of each callback before the training, and `teardown` after it.

    Raises UserCodeError if a user's callback raised, and nothing else did before.
    """
    with ExitStack() as stack:
        for name, callback in trainer.callbacks.items():
            call({name: callback}, "setup", trainer, context)
            stack.push(partial(_tear_down, trainer, name, callback))
        yield


def _tear_down(
    trainer: "Trainer", name: str, callback: Callback, kind: Any, error: Any, trace: Any
) -> None:
    try:
        call({name: callback}, "teardown", trainer, error)
    except Exception as further:
        if error is None:
            raise
        log.warning("warning: %s", further)  # The error that came first ends the run.


def states_of(callbacks: Callbacks) -> dict[str, dict[str, Any]]:
    """Return the state of each callback that has one, by its name."""
    return call({n: one for n, one in callbacks.items() if has_state(one)}, "state_dict")


def has_state(callback: Callback) -> bool:
    """Whether a checkpoint keeps any state of a callback."""
    return type(callback).state_dict is not Callback.state_dict
