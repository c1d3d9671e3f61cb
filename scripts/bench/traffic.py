"""A model, to plan with, of the bytes that several processes send and hold.

Usage, in scripts/: python -m bench.traffic, which prints the tables of docs/distributed.md.

The bytes that a step hands to the collectives are known exactly, and counted by a test. Each rank
then sends as the ring algorithms do (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms
for clusters of workstations", 2009), the least if only ranks add, for n ranks and S bytes:

    all-reduce                      2 S (n - 1) / n
    all-gather, reduce-scatter        S (n - 1) / n        S: of all ranks together
    broadcast                         S                    along a ring
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PARALLEL = ("in_backward", "after_backward", "fsdp")
"""`trainer.reduce` with ddp, or fsdp."""
MODES = WIDE, MIXED, SPLIT = "fp32, amp", "mixed", "mixed, split masters"
SIZES = (1, 2, 8, 64, 1024)

_AGREED = 3 * 4  # bytes: the amaxes of one rank and of the average, the loss
_ADAM = 8  # bytes for each weight: two moments in fp32


@dataclass(frozen=True)
class Weight:
    """A trained tensor."""

    shape: Sequence[int]  # its sizes
    half: bool = False  # whether it is stored in half

    @property
    def count(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)

    def padded(self, ranks: int) -> int:
        """The same where each rank holds equally many rows."""
        rows = self.shape[0]
        return -(-rows // ranks) * ranks * (self.count // rows)


def payload(
    weights: Sequence[Weight], parallel: str, ranks: int, buffers: int = 0, scaled: bool = True
) -> Mapping[str, int]:
    """The bytes that a rank hands to each kind of collective in a step of one micro-batch.

    Args:
        weights: all that are trained, by one optimizer.
        parallel: one of PARALLEL.
        ranks: >= 2.
        buffers: bytes of the model's buffers.
        scaled: whether the loss is, so that the largest gradient of each rank is told.
    """
    told = scaled or parallel in ("after_backward", "fsdp")
    found = Counter({"all_reduce": _AGREED if told else _AGREED - 4})
    found["all_reduce"] += 8 if parallel.startswith("in_backward") else 3 * 8  # Counts, in float64.
    if buffers:
        found["broadcast"] = buffers
    count = sum(weight.count for weight in weights)
    if parallel != "fsdp":
        found["all_reduce"] += 4 * count + 8 * len(weights)  # Which were used, as int64.
    else:
        found["all_reduce"] += 8  # The square of the norm, in float64.
        found["all_gather"] = 2 * sum((2 if w.half else 4) * w.padded(ranks) for w in weights)
        found["reduce_scatter"] = 4 * sum(w.padded(ranks) for w in weights)
    return found


def sent(handed: Mapping[str, int], ranks: int) -> float:
    """The bytes that a rank sends for them, by the ring algorithms."""
    share = (ranks - 1) / ranks
    factors = {"all_reduce": 2 * share, "broadcast": float(ranks > 1)}
    return sum(size * factors.get(kind, share) for kind, size in handed.items())


def held(mode: str, parallel: str, ranks: int) -> float:
    """The bytes that a rank holds for each weight with AdamW: weight, master, state and gradient.

    Activations, and what fsdp gathers of a block, come to that.

    Args:
        mode: one of MODES.
        parallel: one of PARALLEL.
        ranks: >= 1. One process has its gradients in the format of the weights.
    """
    stored = {WIDE: 4, MIXED: 2 + 4, SPLIT: 2 + 2}[mode]
    if parallel == "fsdp":  # The part of a rank is its master.
        return (4 + _ADAM + 4) / ranks
    if ranks == 1:
        return stored + _ADAM + (4 if mode == WIDE else 2)
    return stored + _ADAM + 4


def tables() -> str:
    """Return the bytes sent and held for each weight, as Markdown."""
    sends = {
        "ddp": ("in_backward", False),
        "fsdp in `fp32` and `amp`": ("fsdp", False),
        "fsdp in `mixed`": ("fsdp", True),
    }
    many = 2**30  # Beside so many weights the bytes that do not grow with them are nothing.
    holds = {
        "ddp in `fp32` and `amp`": (WIDE, "in_backward"),
        "ddp in `mixed`": (MIXED, "in_backward"),
        "ddp in `mixed` with split masters": (SPLIT, "in_backward"),
        "fsdp in every mode": (WIDE, "fsdp"),
    }
    return (
        _table(
            "sent by a rank in a step, bytes a weight",
            {
                name: [sent(payload([Weight((many,), half)], how, n), n) / many for n in SIZES]
                for name, (how, half) in sends.items()
            },
        )
        + "\n"
        + _table(
            "held by a rank, bytes a weight",
            {name: [held(*how, n) for n in SIZES] for name, how in holds.items()},
        )
    )


def _table(title: str, rows: Mapping[str, Sequence[float]]) -> str:
    ranks = [f"{size} ranks" if size > 1 else "1 rank" for size in SIZES]
    lines = [[title, *ranks], ["---"] * (len(SIZES) + 1)]
    lines += [[name, *(f"{value:.3g}" for value in values)] for name, values in rows.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    print(tables())
