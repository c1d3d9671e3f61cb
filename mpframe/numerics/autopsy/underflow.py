"""Underflow: gradients below half's normal range.

Below it the smaller a number is, the fewer bits half keeps of it, and in the end none. Elements are
counted in the gradients of every op's result and of every weight, and compared with those of the
fp32 replay: a number that is 0 there is not lost.
"""

from collections.abc import Mapping, Sequence

import torch

from mpframe.numerics.autopsy.case import Case
from mpframe.numerics.autopsy.culprit import Culprit
from mpframe.numerics.autopsy.replay import Pass, Replay
from mpframe.numerics.autopsy.watch import OpCall
from mpframe.tree import dtype_name


def underflow_share(own: Replay, full: Replay, kept_as: str = "normal") -> float:
    """The share of half gradients below half's normal range, among those that fp32 has.

    Gradients of op results and of weights count alike, each element once; 0 to 1. Only gradients
    that are stored in half count. With `kept_as="nonzero"` it is the share of those that are 0.
    """
    nonzero, kept = _kept(own.passes, full.passes, kept_as)
    return 1.0 - sum(kept.values()) / sum(nonzero.values()) if sum(nonzero.values()) else 0.0


def culprit_of_underflow(case: Case, own: Replay, full: Replay) -> Culprit | None:
    """The module with the largest share of underflow, and its largest gradient."""
    nonzero, kept = _kept(own.passes, full.passes)
    if not nonzero:
        return None
    module = max(nonzero, key=lambda name: (1 - kept[name] / nonzero[name], nonzero[name]))
    observations = [
        (call, seen.inputs.largest)
        for call, seen in full.passes[0].trace.backward.items()
        if call.module == module
    ]
    call, largest = max(
        observations, key=lambda pair: pair[1], default=(OpCall(module, "weight"), 0.0)
    )
    info = torch.finfo(case.half)
    value = largest * own.passes[0].scale
    return Culprit(call, "backward", value, "gradient", info.smallest_normal, dtype_name(case.half))


def largest_gradient(own: Replay, full: Replay) -> float:
    """The largest unscaled gradient, in fp32, of those that the run stores in half."""
    found = [0.0]
    for narrow, wide in zip(own.passes, full.passes, strict=True):
        there = wide.trace.gradients
        held = (key for key, count in narrow.trace.gradients.items() if count.narrow)
        found += [there[key].largest for key in held if key in there]
    return max(found)


def _kept(
    own: Sequence[Pass], full: Sequence[Pass], kept_as: str = "normal"
) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """By module: gradients that fp32 has, and how many of them half keeps, as `Count` says."""
    nonzero: dict[str, int] = {}
    kept: dict[str, int] = {}
    for one, wide in zip(own, full, strict=True):
        for key, count in one.trace.gradients.items():
            there = wide.trace.gradients.get(key)
            if there is None or not count.narrow or not there.nonzero:
                continue
            module = key[0].rpartition(".")[0] if key[1] == "weight" else key[0]
            nonzero[module] = nonzero.get(module, 0) + there.nonzero
            kept[module] = kept.get(module, 0) + min(getattr(count, kept_as), there.nonzero)
    return nonzero, kept
