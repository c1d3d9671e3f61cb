"""Intersection over union (the Jaccard index) of classes of pixels."""

from torch import Tensor

from mpframe.data.metrics.overlap import Overlap


class IoU(Overlap):
    """|A ∩ B| / |A ∪ B| of the areas A of the targets and B of the predictions."""

    name = "iou"

    def measure(self, shared: Tensor, wanted: Tensor, chosen: Tensor) -> Tensor:
        return shared / (wanted + chosen - shared)
