"""The label error rate: how many labels of a sequence were read wrongly."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class LabelErrorRate:
    """Wrong, missing and additional labels over all labels, >= 0; 0 is perfect.

    What a model reads of a sequence is the best class of each frame, each run of one class taken
    once, without the blanks (greedy decoding). Its distance from the target is the least number of
    labels to replace, put in or take out (Levenshtein 1966).

    Args:
        blank: the class of a frame without a label.
    """

    name = "label_error_rate"
    higher_is_better = False

    def __init__(self, blank: int = 0) -> None:
        self._blank = blank
        self._batches: list[tuple[Tensor, Sequence[int], Tensor, Sequence[int]]] = []

    def update(self, outputs: Any, targets: Any) -> None:
        """Keep one batch's best classes; they are read when the rate is computed.

        Args:
            outputs: `logits` [N, T, classes] and `lengths`, N whole numbers.
            targets: `labels` [N, L] and `lengths`, N whole numbers.
        """
        best = outputs["logits"].argmax(dim=2)
        self._batches.append((best, outputs["lengths"], targets["labels"], targets["lengths"]))

    def compute(self) -> Tensor:
        """The rate so far, 0-d float64; nan before the first update."""
        wrong = labels = 0
        for best, frames, targets, lengths in self._batches:
            rows = zip(best.tolist(), frames, targets.tolist(), lengths, strict=True)
            for classes, frame_count, target, length in rows:
                read = collapsed(classes[:frame_count], self._blank)
                wrong += edit_distance(read, target[:length])
                labels += length
        return torch.tensor(wrong, dtype=torch.float64) / labels


def collapsed(classes: Sequence[int], blank: int) -> list[int]:
    """The labels that CTC reads from the classes of the frames."""
    before = [blank, *classes]
    return [now for last, now in zip(before, classes, strict=False) if now not in (last, blank)]


def edit_distance(first: Sequence[int], second: Sequence[int]) -> int:
    """The least number of items to replace, put in or take out that turns one into the other."""
    row = list(range(len(second) + 1))
    for number, item in enumerate(first, start=1):
        diagonal, row[0] = row[0], number
        for place, other in enumerate(second, start=1):
            replaced = diagonal + (item != other)
            diagonal, row[place] = row[place], min(replaced, row[place] + 1, row[place - 1] + 1)
    return row[-1]
