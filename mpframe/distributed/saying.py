"""An error that many ranks meet is printed once: by rank 0, or by the rank that alone met it.

The ranks tell each other what they print through the store that torchrun keeps. That works before
they have joined, too, and after one of them has ended.
"""

import time

from mpframe.distributed.launch import place
from mpframe.errors import LostRankError, MpframeError

_WAIT = 3.0  # seconds in which rank 0 comes to the same error


def line_of(error: MpframeError) -> str | None:
    """What this rank is to print of the error that ends it; None: another rank prints it.

    With one process it is the error's text. The line of a rank above 0 begins with its number.
    """
    own = place()
    text = str(error)
    if own.size == 1:
        return text
    line = text if own.rank == 0 or isinstance(error, LostRankError) else f"rank {own.rank}: {text}"
    from mpframe.distributed.store import answer_within  # torch comes in here.

    # The store may be gone: then it is said twice.
    said = answer_within(3 * _WAIT, lambda: _said(text, line, wait=own.rank > 0))
    return None if said else line


def _said(text: str, line: str, wait: bool) -> bool:
    """Whether another rank prints it; if not, this one tells the others that it does."""
    from mpframe.distributed.store import store_at

    store = store_at(place(), _WAIT, "said")
    known = (text, line, text.removeprefix("rank 0: "))
    limit = time.monotonic() + (_WAIT if wait else 0.0)
    while time.monotonic() < limit:
        if any(store.check([own]) for own in known):
            return True
        time.sleep(0.1)
    # By both names: rank 0 may come to the same error after all, later than anybody waits.
    return max(store.add(own, 1) for own in {line, text}) > 1
