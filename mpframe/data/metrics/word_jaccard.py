"""How well a part of a text was found: the words that two strings share."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class WordJaccard:
    """The mean over samples of |A ∩ B| / |A ∪ B|, A and B the words of the found and true strings.

    Words are what stands between spaces, in lower case; each counts once. Where both strings have
    no word the value is 1. The string that is found lies between the tokens s <= e of the text with
    the largest start[s] + end[e].
    """

    name = "word_jaccard"
    higher_is_better = True

    def __init__(self) -> None:
        self._found: list[tuple[Tensor, Mapping[str, Any]]] = []

    def update(self, outputs: Mapping[str, Tensor], targets: Mapping[str, Any]) -> None:
        """Choose the tokens of one batch, on the device; strings are compared at the end.

        Args:
            outputs: `start_logits` and `end_logits`, [N, T].
            targets: `offsets` int64 [N, T, 2], where in the text each token begins and ends, -1 for
                tokens that are not the text's; and lists of N strings, `text` and `selected`.
        """
        chosen = best_spans(
            outputs["start_logits"], outputs["end_logits"], targets["offsets"][..., 0] >= 0
        )
        self._found.append((chosen, targets))

    def compute(self) -> Tensor:
        """The mean so far, 0-d float64; nan before the first update."""
        values = [
            jaccard(text[begin:end], selected)
            for chosen, targets in self._found
            for (begin, end), text, selected in zip(
                _places(chosen, targets["offsets"]),
                targets["text"],
                targets["selected"],
                strict=True,
            )
        ]
        return torch.tensor(values, dtype=torch.float64).mean()


def best_spans(start: Tensor, end: Tensor, allowed: Tensor) -> Tensor:
    """The tokens s <= e with the largest start[s] + end[e] of each sample: int64 [N, 2].

    Args:
        start: logits [N, T].
        end: the same.
        allowed: bool [N, T], at least one of each sample.
    """
    low = torch.finfo(torch.float64).min
    start, end = (logits.double().masked_fill(~allowed, low) for logits in (start, end))
    sums = start[:, :, None] + end[:, None, :]
    behind = torch.ones_like(sums, dtype=torch.bool).tril(-1)
    best = sums.masked_fill(behind, -torch.inf).flatten(1).argmax(1)
    length = start.shape[1]
    return torch.stack((best // length, best % length), dim=1)


def jaccard(found: str, true: str) -> float:
    """|A ∩ B| / |A ∪ B| of the words of two strings, in lower case."""
    a, b = set(found.lower().split()), set(true.lower().split())
    return len(a & b) / len(a | b) if a | b else 1.0


def _places(chosen: Tensor, offsets: Tensor) -> list[list[int]]:
    """Where in its text each sample's span begins and ends."""
    rows = torch.arange(len(chosen), device=chosen.device)
    first, last = offsets[rows, chosen[:, 0], 0], offsets[rows, chosen[:, 1], 1]
    places: list[list[int]] = torch.stack((first, last), dim=1).tolist()
    return places
