"""The bytes that each of many ranks will hold and send, from shapes, for `mpframe plan`.

A step's bytes of weights, masters, optimizer state and gradients follow from the shapes of the
weights and from how the ranks divide them. Activations are what autograd saves in a forward pass
without values. Each rank sends what it hands to the collectives as the ring algorithms do
(Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009),
the least if only ranks add, for n ranks and S bytes:

    all-reduce                      2 S (n - 1) / n
    all-gather, reduce-scatter        S (n - 1) / n        S: of all ranks together
    broadcast                         S                    along a ring
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpframe.core.comm import rows_of_a_part
from mpframe.core.tree import tensors_in
from mpframe.training.memory import weight_behind

_AGREED = 3 * 4  # bytes: the amaxes of one rank and of the average, the loss
_BUCKET = 25 * 2**20  # bytes of gradients in a bucket of torch's DDP on a GPU
_UPDATED = 2**26  # half weights that are updated at once on a GPU
_PRIMES = (2, 3, 5, 7, 11, 13)  # The sizes of a stand-in tell its dimensions apart.


@dataclass(frozen=True)
class Weight:
    """A parameter, or a rank's part of it if a plan divides its layer."""

    shape: Sequence[int]  # its sizes
    stored: int = 4  # bytes of a value as one process stores it
    trained: bool = True
    state: int = 0  # bytes of the optimizer's state for each value
    whole_state: int = 0  # bytes of its other state, which each rank holds
    update: int = 0  # bytes of each value that the optimizer's step takes for a while
    block: int = 0  # which weights are gathered together; 0: the rest of the model

    def part(self, shards: int = 1) -> int:
        """Return how many values each rank holds, with padding, if so many divide its rows."""
        rows, *others = (*self.shape, 1) if self.shape else (1, 1)
        return rows_of_a_part(rows, shards) * math.prod(others)


class Way(NamedTuple):
    """How ranks share the work: `replicas` x `shards` x `tensor` of them."""

    name: str  # ddp, fsdp, hsdp or tp
    replicas: int = 1
    shards: int = 1
    tensor: int = 1

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.replicas * self.shards * self.tensor


def payload(
    weights: Sequence[Weight], way: Way, *, buffers: int = 0, activations: int = 0
) -> Counter[tuple[str, int]]:
    """Return the bytes that each of >= 2 ranks hands over in a step of one micro-batch.

    They are counted by the kind of the collective and its ranks. The weights have one optimizer.
    `buffers` are bytes of the model's buffers, and `activations` bytes of which the ranks along
    `tensor` sum their parts.
    """
    counts = 8 if way.name == "ddp" else 3 * 8  # in float64
    found = Counter(
        {("all_reduce", way.ranks): counts + _AGREED, ("broadcast", way.ranks): buffers}
    )
    if way.name == "ddp":  # Which weights were used goes as int64.
        found["all_reduce", way.ranks] += sum(4 * w.part() + 8 for w in weights if w.trained)
        return +found
    blocks = _by_block(weights, way.shards)
    gathered, summed = map(sum, zip(*blocks.values(), strict=True))
    # The square of the norm in float64; as int64 which weights were used, and of which blocks.
    found["all_reduce", way.ranks] += 8 * (1 + len(weights) + 2 * len({*blocks} - {0}) + 2)
    found["all_gather", way.shards] = 2 * gathered
    found["reduce_scatter", way.shards] = summed
    found["all_reduce", way.replicas] += summed // way.shards if way.replicas > 1 else 0
    found["all_reduce", way.tensor] += activations
    return +found


def sent(handed: Mapping[tuple[str, int], int]) -> float:
    """Return the bytes that a rank sends for a `payload`, by the ring algorithms."""
    total = 0.0
    for (kind, ranks), size in handed.items():
        share = (ranks - 1) / ranks
        total += size * {"all_reduce": 2 * share, "broadcast": float(ranks > 1)}.get(kind, share)
    return total


def longest_message(weights: Sequence[Weight], way: Way) -> int:
    """Return the bytes of the largest tensor that one collective of a step is called with."""
    if way.name != "ddp":
        return max(max(sizes) for sizes in _by_block(weights, way.shards).values())
    longest, bucket = 0, Counter[int]()
    for weight in reversed(weights):  # Buckets hold one format each, and are sent in fp32.
        bucket[weight.stored] += weight.part() if weight.trained else 0
        longest = max(longest, 4 * bucket[weight.stored])
        if bucket[weight.stored] * weight.stored >= _BUCKET:
            bucket[weight.stored] = 0
    return longest


def held(
    weights: Sequence[Weight], way: Way, *, master: int = 4, average: int = 0
) -> dict[str, int]:
    """Return the bytes that a rank holds at the end of a step, without activations.

    `gathered` is the rest of the model, a block, the next one, and the block's gradients. `update`
    is held without these. `master` and `average` are the bytes of a half weight's master, and of a
    weight's moving average.
    """
    ddp, parts = way.name == "ddp", [(weight, weight.part(way.shards)) for weight in weights]
    trained = [(weight, part) for weight, part in parts if weight.trained]
    half = 4 if way.ranks > 1 else 0  # Beside a half gradient ranks have the fp32 mean.
    gradients = (part * (w.stored + (w.stored < 4) * half if ddp else 4) for w, part in trained)
    in_buckets = sum(part * w.update for w, part in trained if ddp and w.stored < 4)
    update = sum(part * w.update for w, part in trained) - in_buckets
    return {
        "weights": sum(part * (weight.stored if ddp else 4) for weight, part in parts),
        "masters": sum(part * master for w, part in parts if ddp and w.stored < 4),
        "state": sum(part * (w.state + average) + w.whole_state for w, part in trained),
        "gradients": sum(gradients),
        "gathered": 0 if ddp else _count_gathered(_by_block(weights, way.shards)),
        "update": max(update, min(in_buckets, 4 * _UPDATED)),
    }


def _count_gathered(blocks: dict[int, tuple[int, int]]) -> int:
    rest, _ = blocks.pop(0, (0, 0))
    gathered = sorted(size for size, _ in blocks.values())
    return rest + sum(gathered[-2:]) + max((size for _, size in blocks.values()), default=0)


def _by_block(weights: Iterable[Weight], shards: int) -> dict[int, tuple[int, int]]:
    """Return the bytes of each block when it is gathered, and of its fp32 gradients."""
    found: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for weight in weights:
        (gathered, summed), size = found[weight.block], shards * weight.part(shards)
        found[weight.block] = gathered + weight.stored * size, summed + 4 * weight.trained * size
    return found


def state_bytes(optimizers: Iterable[Optimizer]) -> dict[Tensor, tuple[int, int, int]]:
    """Step each optimizer once on tiny stand-ins, which replace its parameters.

    Returns by parameter: the bytes of its state for each value, the bytes of other state, and the
    bytes for each value that a step takes for a while: 4 (as of AdamW) if it steps many at once.
    """
    found = {}
    for optimizer in optimizers:
        stand_ins: dict[Tensor, Tensor] = {}
        update: dict[Tensor, int] = {}
        for group in optimizer.param_groups:
            at_once = group.get("foreach", False) is not False and not group.get("fused")
            update |= dict.fromkeys(group["params"], 4 * at_once)
            small = {parameter: _stand_in(parameter) for parameter in group["params"]}
            group["params"] = list(small.values())
            stand_ins |= small
        optimizer.step()
        for parameter, small_one in stand_ins.items():
            states = [*tensors_in(optimizer.state[small_one])]
            alike = sum(s.itemsize for s in states if s.shape == small_one.shape)
            sizes = dict(zip(small_one.shape, parameter.shape, strict=True))
            other = sum(
                state.itemsize * math.prod(sizes.get(n, n) for n in state.shape)
                for state in states
                if state.shape != small_one.shape
            )
            found[parameter] = alike, other, update[parameter]
    return found


def _stand_in(parameter: Tensor) -> Tensor:
    made = torch.ones([min(*pair) for pair in zip(parameter.shape, _PRIMES, strict=False)])
    made.requires_grad_().grad = torch.ones_like(made)
    return made


def measure(
    model: nn.Module,
    forward: Callable[[], Any],
    blocks: Iterable[nn.Module] = (),
    planned: Mapping[nn.Module, str] | None = None,
    tensor: int = 1,
) -> tuple[int, int, int]:
    """Run a forward pass, and return the bytes that autograd saves beside the model.

    The second result is the largest share of one of the `blocks`. The third is of the layers that
    `tensor` ranks divide, by the style `planned` for each. Outputs of colwise layers and inputs of
    rowwise ones are divided. The bytes of the other sides, which these ranks sum, are the result.
    Casts of sharded weights, made by a precision that `use_shards`, do not count.
    """
    saved, alive, styles = dict[int, int](), list[Tensor](), planned or {}
    known = {_address(own) for own in (*model.parameters(), *model.buffers())}
    begun, largest, summed, divided = 0, 0, 0, set[int]()

    def pack(value: Tensor) -> Tensor:
        alive.append(value)  # So that no address is used twice.
        if _address(value) not in known and weight_behind(value) is None:
            saved[_address(value)] = value.untyped_storage().nbytes()
        return value

    def enter(module: Any, inputs: Any) -> None:
        nonlocal begun
        begun = sum(saved.values())

    def leave(module: Any, inputs: Any, output: Any) -> None:
        nonlocal largest
        largest = max(largest, sum(saved.values()) - begun)

    def note(module: Any, inputs: Any, output: Any) -> None:
        nonlocal summed
        colwise = styles[module].startswith("colwise")
        part, whole = (output, inputs[0]) if colwise else (inputs[0], output)
        summed += whole.nbytes
        divided.update({_address(part)} if styles[module] in ("colwise", "rowwise") else ())

    handles = [block.register_forward_pre_hook(enter) for block in blocks]
    handles += [block.register_forward_hook(leave) for block in blocks]
    handles += [module.register_forward_hook(note) for module in styles]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        forward()
    for handle in handles:
        handle.remove()
    total = sum(size // tensor if at in divided else size for at, size in saved.items())
    return total, largest, summed


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
