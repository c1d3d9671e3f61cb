"""What a run hands to its callbacks: set up with it before the training, torn down after it."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpframe.core.callback import Callback, Callbacks, run_callbacks
from mpframe.data.loading import Loader
from mpframe.tracking.tracker import Tracker

if TYPE_CHECKING:
    from mpframe.training.callbacks.results import Results
    from mpframe.training.callbacks.throughput import Throughput
    from mpframe.training.trainer import Trainer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunContext:
    """What a callback may know and use of its run.

    Attributes:
        folder: the run's folder; exists, and a callback may write files into it.
        config: the resolved options as YAML, without secrets.
        identity: a name that no other run has; a resumed run keeps it.
        tracker: writes to TensorBoard.
        train: the loader of the training data, `len(train)` batches an epoch.
        throughput: samples and seconds of the training so far.
        results: the last loss, the last validation and the best one.
        usage: what a stranger must know to use the weights, as JSON values; see run/description.py.
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
    """Around the training: `setup` of each callback before it, `teardown` after it.

    Raises:
        UserCodeError: a user's callback raised, and nothing else did before.
    """
    with ExitStack() as stack:
        for name, callback in trainer.callbacks.items():
            run_callbacks({name: callback}, "setup", trainer, context)
            stack.push(partial(_tear_down, trainer, name, callback))
        yield


def _tear_down(
    trainer: "Trainer",
    name: str,
    callback: Callback,
    kind: object,
    error: BaseException | None,
    trace: object,
) -> None:
    try:
        run_callbacks({name: callback}, "teardown", trainer, error)
    except Exception as further:
        if error is None:
            raise
        log.warning("warning: %s", further)  # The error that came first ends the run.


def states_of(callbacks: Callbacks) -> dict[str, dict[str, Any]]:
    """The state of each callback that has one, by its name."""
    return run_callbacks({n: one for n, one in callbacks.items() if has_state(one)}, "state_dict")


def has_state(callback: Callback) -> bool:
    """Whether a checkpoint is to keep anything of a callback."""
    return type(callback).state_dict is not Callback.state_dict
