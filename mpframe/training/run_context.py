"""A run as its callbacks see it, and their setup and teardown around the training."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import getmembers
from pathlib import Path
from typing import Any

from mpframe.core.callback import Algorithm, Callback
from mpframe.core.errors import nearest
from mpframe.data.loading import Loader
from mpframe.tracking.logger import Loggers
from mpframe.training.results import Results, Throughput
from mpframe.training.trainer import Trainer, run_callbacks

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunContext:
    """The parts of a run that a callback may read and use."""

    folder: Path  # exists, and a callback may write files into it
    config: str  # the resolved options as YAML, without secrets
    identity: str  # a name that no other run has, and that a resumed run keeps
    tracker: Loggers  # TensorBoard's, and those that callbacks add
    train: Loader  # of the training data, `len(train)` batches an epoch
    throughput: Throughput  # samples and seconds of the training so far
    results: Results  # the last loss, the last validation and the best one
    usage: Mapping[str, Any] = field(default_factory=dict)  # JSON values, see run/description.py


@contextmanager
def set_up(trainer: Trainer, context: Any) -> Iterator[None]:
    """Call `setup` of each callback before the block, and `teardown` after it."""
    with ExitStack() as stack:
        for name, callback in trainer.callbacks.items():
            for event, _ in getmembers(type(callback), callable):
                if event.startswith("on_") and not hasattr(Algorithm, event):
                    hint = nearest(event, dir(Algorithm), 1, "; ")
                    log.warning("warning: callbacks.%s: there is no event %s%s", name, event, hint)
            run_callbacks({name: callback}, "setup", trainer, context)
            stack.push(partial(_tear_down, trainer, name, callback))
        yield


def _tear_down(
    trainer: Trainer, name: str, callback: Callback, kind: Any, error: Any, trace: Any
) -> None:
    try:
        run_callbacks({name: callback}, "teardown", trainer, error)
    except Exception as further:
        if error is None:
            raise
        log.warning("warning: %s", further)  # The error that came first ends the run.


def has_state(callback: Callback) -> bool:
    """Whether a checkpoint keeps any state of a callback."""
    return type(callback).state_dict is not Callback.state_dict
