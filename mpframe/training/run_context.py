"""What a run hands to each of its callbacks, once, before it trains."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpframe.data.loading import Loader
from mpframe.tracking.tracker import Tracker

if TYPE_CHECKING:
    from mpframe.training.callbacks.results import Results
    from mpframe.training.callbacks.throughput import Throughput


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
