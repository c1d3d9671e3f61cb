"""The store of keys and values that torchrun keeps for its ranks; it outlives each of them."""

import os
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from mpframe.distributed.launch import Place


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
