"""Perplexity of a language model."""

from torch import Tensor

from mpframe.data.metrics.nats import Nats


class Perplexity(Nats):
    """exp of the mean loss per token: as uncertain as among so many equally likely tokens."""

    name = "perplexity"

    def compute(self) -> Tensor:
        """The perplexity so far, 0-d float64; nan before the first update."""
        return super().compute().exp()
