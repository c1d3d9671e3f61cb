"""Mean average precision, the usual measure of a detector."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torchvision.ops import box_iou

Boxes = Mapping[str, Tensor]


class MeanAveragePrecision:
    """The area under the curve of precision over recall, averaged over the classes; 0 to 1.

    The boxes found in all images are taken by falling score. One is right if it has the class of a
    true box that none was given to before, and overlaps it by at least `iou` (intersection over
    union; it is given the one that it overlaps most). The precision at a recall is the largest at
    this recall or a larger one (PASCAL VOC 2010). Classes without a true box do not count.

    Args:
        iou: more than 0, at most 1.
    """

    name: str
    higher_is_better = True

    def __init__(self, iou: float = 0.5) -> None:
        self.name = f"map_{round(100 * iou)}"
        self._iou = iou
        self._images: list[tuple[Boxes, Boxes]] = []

    def update(self, outputs: Sequence[Boxes], targets: Sequence[Boxes]) -> None:
        """Keep the boxes of one batch; they are compared when the precision is computed.

        Args:
            outputs: of each image `boxes` [n, 4] as (left, top, right, bottom), `scores` [n] and
                `labels` [n].
            targets: of each image `boxes` and `labels`.
        """
        self._images += zip(outputs, targets, strict=True)

    def compute(self) -> Tensor:
        """The mean so far, 0-d float64; nan if there was no true box."""
        images = [(_on_host(found), _on_host(true)) for found, true in self._images]
        classes = sorted({label for _, true in images for label in true["labels"].tolist()})
        precisions = [self._of_class(label, images) for label in classes]
        return torch.tensor(precisions, dtype=torch.float64).mean()

    def _of_class(self, label: int, images: Sequence[tuple[Boxes, Boxes]]) -> float:
        scores, right, true_boxes = [], [], 0
        for found, true in images:
            mine = found["labels"] == label
            order = found["scores"][mine].argsort(descending=True, stable=True)
            wanted = true["boxes"][true["labels"] == label]
            scores.append(found["scores"][mine][order])
            right.append(self._hits(found["boxes"][mine][order], wanted))
            true_boxes += len(wanted)
        order = torch.cat(scores).argsort(descending=True, stable=True)
        return average_precision(torch.cat(right)[order], true_boxes)

    def _hits(self, found: Tensor, wanted: Tensor) -> Tensor:
        """Which boxes of an image, by falling score, are right: [n] of truth values."""
        overlaps = box_iou(found, wanted)
        hits = torch.zeros(len(found), dtype=torch.bool)
        for number, row in enumerate(overlaps):
            best = int(row.argmax()) if len(row) else 0
            if len(row) and row[best] >= self._iou:
                hits[number] = True
                overlaps[:, best] = -1.0  # It is taken.
        return hits


def average_precision(right: Tensor, true_boxes: int) -> float:
    """The area under precision over recall.

    Args:
        right: [n] of truth values, by falling score.
        true_boxes: how many there are to find, >= 1.
    """
    hits = right.double().cumsum(0)
    precision = hits / torch.arange(1, len(hits) + 1)
    highest = precision.flip(0).cummax(0).values.flip(0)
    return float((highest * right).sum() / true_boxes)


def _on_host(boxes: Boxes) -> Boxes:
    return {name: tensor.detach().cpu() for name, tensor in boxes.items()}
