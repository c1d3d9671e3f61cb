"""How much of a run's log the console shows: `trainer.verbosity`.

    quiet      warnings, errors, and the result of the run
    normal     also what the run says about itself, and a line at every validation
    verbose    also a line at every `trainer.log_every` steps, and all else that is logged as debug

train.log holds what `normal` shows, and with `verbose` the rest, too.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

RESULT = {"result": True}
"""`extra` of the log line that says how a run ended, which `quiet` shows, too."""


@contextmanager
def console(verbosity: str, rank: int = 0) -> Iterator[None]:
    """Within the block the console shows that much; train.log must be opened later, within it.

    Of several ranks only rank 0 says anything, since all of them would say the same.
    """
    shown = _nothing if rank else _is_loud
    quiet = rank or verbosity == "quiet"
    own, handlers = logging.getLogger("mpframe"), _of_console() if quiet else []
    before = own.level
    for handler in handlers:
        handler.addFilter(shown)
    if verbosity == "verbose":
        own.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        own.setLevel(before)
        for handler in handlers:
            handler.removeFilter(shown)


def _of_console() -> list[logging.Handler]:
    """The root logger's handlers that do not write to a file."""
    known = logging.getLogger().handlers
    return [handler for handler in known if not isinstance(handler, logging.FileHandler)]


def _is_loud(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or hasattr(record, "result")


def _nothing(record: logging.LogRecord) -> bool:
    return False
