"""The Dice coefficient (F1 score) of classes of pixels."""

from torch import Tensor

from mpframe.data.metrics.overlap import Overlap


class Dice(Overlap):
    """2 |A ∩ B| / (|A| + |B|) of the areas A of the targets and B of the predictions."""

    name = "dice"

    def measure(self, shared: Tensor, wanted: Tensor, chosen: Tensor) -> Tensor:
        return 2 * shared / (wanted + chosen)
