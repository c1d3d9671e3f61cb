"""The context of a run that there is none of, for callbacks that are tested on their own."""

from pathlib import Path
from typing import Any

from mpframe.tracking.tracker import Tracker
from mpframe.training.callbacks.results import Results
from mpframe.training.callbacks.throughput import Throughput
from mpframe.training.run_context import RunContext


def context(folder: Path, tracker: Tracker | None = None, train: Any = None) -> RunContext:
    """The context of a run in `folder`; what is not given may not be used."""
    own: Any = tracker
    return RunContext(folder, "seed: 0\n", "a run", own, train, Throughput(1), Results())
