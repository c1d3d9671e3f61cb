"""How the ranks divide a model with `trainer.parallel=fsdp`: the group `distributed`.

The ranks are a grid of replicas x shards x tensor, in this order, so neighbours share the innermost
axis. Ranks along `tensor` hold parts of each planned layer and read the same samples. Ranks along
`shards` hold parts of every weight and gather it for its block. `replicas` hold the same parts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpframe.core.errors import ConfigError
from mpframe.core.ranges import require_whole

AXES = ("replicas", "shards", "tensor")


@dataclass(frozen=True)
class Layout:
    """How ranks divide a model.

    ConfigError: a number is not whole and >= 1, or only one of `tensor` and `plan` is given.
    """

    replicas: int = 1  # how many groups of ranks each hold a whole model (HSDP)
    tensor: int = 1  # how many ranks divide each layer that `plan` names
    # By patterns of modules' names, how: a word of `STYLES` in tensor_parallel.py, or one of
    # torch's ParallelStyles.
    plan: Mapping[str, Any] | None = None
    reshard_after_forward: bool = True  # gathered weights are given back until the backward pass
    cpu_offload: bool = False  # parts and the optimizer's state stay on the host
    blocks_together: int = 1  # how many neighbouring blocks are gathered at once

    def __post_init__(self) -> None:
        for name in ("replicas", "tensor", "blocks_together"):
            require_whole(f"distributed.{name}", getattr(self, name))
        if (self.tensor > 1) != bool(self.plan):
            raise ConfigError(
                f"distributed.tensor={self.tensor}: ranks divide the layers that distributed.plan "
                f"names, and it names {len(self.plan or ())}; give both or none"
            )

    def shape(self, ranks: int) -> tuple[int, int, int]:
        """Return the lengths of `AXES`. ConfigError if the ranks do not fill the grid."""
        shards, rest = divmod(ranks, self.replicas * self.tensor)
        if rest:
            raise ConfigError(
                f"distributed.replicas={self.replicas}: {ranks} ranks are no multiple of replicas "
                f"x tensor ({self.tensor}); choose others"
            )
        if shards == 1 < self.replicas:  # FSDP would not let us weigh them.
            raise ConfigError(
                f"distributed.replicas={self.replicas}: of {ranks} ranks each replica would have "
                f"{self.tensor}, and none to share its weights with; choose fewer replicas"
            )
        return self.replicas, shards, self.tensor
