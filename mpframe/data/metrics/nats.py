"""The mean loss of predicted tokens, which perplexity and bits per byte are other units of."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mpframe.data.metrics.shapes import require_same_shape


class Nats:
    """The mean of -ln p(target) over all tokens, summed in float64.

    Attributes:
        name: of the metric that this becomes.
    """

    name = "nats"
    higher_is_better = False

    def __init__(self) -> None:
        self._nats: Tensor | float = 0.0
        self._seen = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add the losses of one batch.

        Args:
            outputs: logits [N, T, vocabulary], any floating dtype.
            targets: tokens [N, T], int64.

        Raises:
            DataError: the shapes do not belong together.
        """
        require_same_shape(self.name, outputs[..., 0], targets)
        logits = outputs.flatten(0, -2).to(torch.promote_types(outputs.dtype, torch.float32))
        losses = cross_entropy(logits, targets.flatten(), reduction="none")
        self._nats = self._nats + losses.double().sum()
        self._seen += targets.numel()

    def merge(self, other: "Nats") -> None:
        """Take in what another rank has measured."""
        self._nats = self._nats + other._nats
        self._seen += other._seen

    def compute(self) -> Tensor:
        """The mean so far, 0-d float64; nan before the first update."""
        return torch.as_tensor(self._nats, dtype=torch.float64) / self._seen
