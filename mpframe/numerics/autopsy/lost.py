"""What a scale loses at the small end: gradients below half's normal range.

There half has fewer bits the smaller the number, and none in the end. Elements are counted in the
gradients of every op's result and of every weight, and held against the fp32 replay's, which has
them all: what is 0 there is no loss.
"""

from collections.abc import Mapping, Sequence

import torch

from mpframe.numerics.autopsy.case import Case
from mpframe.numerics.autopsy.findings import Finding, format_name
from mpframe.numerics.autopsy.replay import Pass, Replay
from mpframe.numerics.autopsy.watch import Place


def lost_share(own: Replay, full: Replay) -> float:
    """The share of half gradients below half's normal range, among those that fp32 has.

    Gradients of op results and of weights count alike, each element once; 0 to 1. Only gradients
    that are stored in half count.
    """
    nonzero, kept = _kept(own.passes, full.passes)
    return 1.0 - sum(kept.values()) / sum(nonzero.values()) if sum(nonzero.values()) else 0.0


def most_lost(case: Case, own: Replay, full: Replay) -> Finding | None:
    """The module that loses most of its gradients, the innermost, with its largest gradient."""
    nonzero, kept = _kept(own.passes, full.passes)
    if not nonzero:
        return None
    module = max(nonzero, key=lambda name: (1 - kept[name] / nonzero[name], nonzero[name]))
    sights = [
        (place, sight.given.largest)
        for place, sight in full.passes[0].trace.backward.items()
        if place.module == module
    ]
    place, largest = max(sights, key=lambda pair: pair[1], default=(Place(module, "weight"), 0.0))
    info = torch.finfo(case.half)
    value = largest * own.passes[0].scale
    return Finding(
        place, "backward", value, "gradient", info.smallest_normal, format_name(case.half)
    )


def largest_gradient(full: Replay) -> float:
    """The largest unscaled gradient of any result or weight, in fp32."""
    sights = [sight for one in full.passes for sight in one.trace.backward.values()]
    return max((max(s.given.largest, s.gave.largest) for s in sights), default=0.0)


def _kept(own: Sequence[Pass], full: Sequence[Pass]) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """By module: gradients fp32 has, and those of them that stand in half's normal range."""
    nonzero: dict[str, int] = {}
    kept: dict[str, int] = {}
    for one, wide in zip(own, full, strict=True):
        for key, count in one.trace.gradients.items():
            there = wide.trace.gradients.get(key)
            if there is None or not count.narrow or not there.nonzero:
                continue
            module = key[0].rpartition(".")[0] if key[1] == "weight" else key[0]
            nonzero[module] = nonzero.get(module, 0) + there.nonzero
            kept[module] = kept.get(module, 0) + min(count.normal, there.nonzero)
    return nonzero, kept
