"""The store of keys and values that torchrun keeps for its ranks; it outlives each of them."""

import os
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import TypeVar

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from mpframe.distributed.launch import Place

T = TypeVar("T")


def answer_within(seconds: float, ask: Callable[[], T]) -> T | None:
    """What `ask` returns; None if it raises a RuntimeError or ValueError, or has not ended in time.

    Without torchrun's agent rank 0 keeps the store. If it hangs, a question to it never ends,
    whatever its timeout.
    """
    answers: list[T] = []

    def answer() -> None:
        with suppress(RuntimeError, ValueError):
            answers.append(ask())

    asking = Thread(target=answer, daemon=True)
    asking.start()
    asking.join(seconds)
    return answers[0] if answers else None


def store_at(place: Place, timeout: float, prefix: str) -> Store:
    """The store, with names of their own for each time that torchrun starts the ranks.

    Ranks that it started again would read the addresses of those before them otherwise.

    Args:
        place: of this process; rank 0 keeps the store itself if no agent of torchrun does.
        timeout: seconds to wait for an answer, > 0.
        prefix: what the names are for.

    Raises:
        RuntimeError: it does not answer.
    """
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        place.size,
        is_master=place.rank == 0 and not agent,
        timeout=timedelta(seconds=timeout),
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"mpframe/{attempt}/{prefix}", store)
