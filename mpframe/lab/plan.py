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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpframe.core.comm import rows_of_a_part
from mpframe.core.tree import tensors_in

_AGREED = 3 * 4  # bytes: the amaxes of one rank and of the average, the loss
_BUCKET = 25 * 2**20  # bytes of gradients in a bucket of torch's DDP on a GPU
_PRIMES = (2, 3, 5, 7, 11, 13)  # The sizes of a stand-in tell its dimensions apart.


@dataclass(frozen=True)
class Weight:
    """A parameter, or this rank's part of it if a plan divides its layer."""

    shape: Sequence[int]  # its sizes
    stored: int = 4  # bytes of a value as one process stores it
    trained: bool = True
    state: int = 0  # bytes of the optimizer's state that has the weight's shape, of the whole
    whole_state: int = 0  # bytes of other state, which each rank holds
    block: int = 0  # which weights are gathered together; 0: the rest of the model

    @property
    def count(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)

    def part(self, shards: int) -> int:
        """How many values each of the ranks that divide its rows holds, with padding."""
        rows = self.shape[0] if self.shape else 1
        return rows_of_a_part(rows, shards) * (self.count // rows if rows else 0)


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


Traffic = Mapping[tuple[str, int], int]
"""Bytes that a rank hands over in a step, by the kind of the collective and its ranks."""


def payload(
    weights: Sequence[Weight],
    way: Way,
    *,
    buffers: int = 0,
    scaled: bool = True,
    reduce: str = "in_backward",
    activations: int = 0,
) -> Traffic:
    """Return what a rank hands to each kind of collective in a step of one micro-batch.

    Args:
        weights: of the model, all of one optimizer.
        way: of >= 2 ranks.
        buffers: bytes of the model's buffers.
        scaled: whether the loss is, so that the largest gradient of each rank is told.
        reduce: `trainer.reduce`, for ddp.
        activations: bytes of which the ranks along `tensor` sum their parts.
    """
    ddp, ranks = way.name == "ddp", way.ranks
    trained = [weight for weight in weights if weight.trained]
    told = scaled or not ddp or reduce == "after_backward"
    counts = 8 if ddp and reduce == "in_backward" else 3 * 8  # in float64
    found = Counter({("all_reduce", ranks): counts + _AGREED - (0 if told else 4)})
    found["broadcast", ranks] += buffers
    if ddp:  # Which weights were used goes as int64.
        found["all_reduce", ranks] += sum(4 * weight.count + 8 for weight in trained)
        return +found
    found["all_reduce", ranks] += 8  # The square of the norm, in float64.
    shards = way.shards
    found["all_gather", shards] = 2 * sum(w.stored * shards * w.part(shards) for w in weights)
    sums = 4 * sum(weight.part(shards) for weight in trained)
    found["reduce_scatter", shards] = shards * sums
    found["all_reduce", way.replicas] += sums if way.replicas > 1 else 0
    found["all_reduce", way.tensor] += activations
    return +found


def sent(handed: Traffic) -> float:
    """Return the bytes that a rank sends for them, by the ring algorithms."""
    total = 0.0
    for (kind, ranks), size in handed.items():
        share = (ranks - 1) / ranks
        total += size * {"all_reduce": 2 * share, "broadcast": float(ranks > 1)}.get(kind, share)
    return total


def longest_message(weights: Sequence[Weight], way: Way) -> int:
    """Return the bytes of the largest tensor that one collective of a step is called with."""
    if way.name != "ddp":
        blocks = _by_block(weights).values()
        gathers = (sum(w.stored * w.part(way.shards) for w in block) for block in blocks)
        sums = (sum(4 * w.part(way.shards) for w in block if w.trained) for block in blocks)
        return way.shards * max([*gathers, *sums], default=0)
    longest, bucket = 0, Counter[int]()
    for weight in reversed(weights):  # Buckets hold one format each, and are sent in fp32.
        bucket[weight.stored] += weight.count if weight.trained else 0
        longest = max(longest, 4 * bucket[weight.stored])
        if bucket[weight.stored] * weight.stored >= _BUCKET:
            bucket[weight.stored] = 0
    return longest


@dataclass(frozen=True)
class Held:
    """Bytes that a rank holds at the end of a step, without activations."""

    weights: int
    masters: int
    state: int  # the optimizer's, and averages of weights
    gradients: int
    gathered: int = 0  # fsdp: the rest of the model, a block and the next, a block's gradients

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.masters + self.state + self.gradients + self.gathered


def held(weights: Sequence[Weight], way: Way, *, master: int = 4, average: int = 0) -> Held:
    """Return what a rank holds. `master`, `average`: bytes of a half weight's master, of an EMA."""
    trained, shards = [weight for weight in weights if weight.trained], way.shards
    whole = sum(weight.whole_state for weight in trained)
    if way.name != "ddp":  # The part of a rank is its master.
        state = sum(w.state // max(w.count, 1) * w.part(shards) for w in trained)
        state += average * sum(w.part(shards) for w in trained) + whole
        sums = 4 * sum(w.part(shards) for w in trained)
        parts = 4 * sum(w.part(shards) for w in weights)
        return Held(parts, 0, state, sums, _gathered(weights, shards))
    state = sum(weight.state + average * weight.count for weight in trained) + whole
    masters = master * sum(weight.count for weight in weights if weight.stored < 4)
    gradients = sum(w.count * _bytes_of_gradient(w, way.ranks) for w in trained)
    return Held(sum(w.stored * w.count for w in weights), masters, state, gradients)


def _bytes_of_gradient(weight: Weight, ranks: int) -> int:
    """One process has it in the format of the weight, and ranks have an fp32 mean beside that."""
    return weight.stored + (4 if weight.stored < 4 and ranks > 1 else 0)


def _gathered(weights: Sequence[Weight], shards: int) -> int:
    blocks = _by_block(weights)
    rest = sum(w.stored * shards * w.part(shards) for w in blocks.pop(0, []))
    sizes = [[shards * w.part(shards) for w in block] for block in blocks.values()]
    stored = [[w.stored for w in block] for block in blocks.values()]
    gathers = sorted(sum(map(math.prod, zip(*both))) for both in zip(sizes, stored, strict=True))
    return rest + sum(gathers[-2:]) + 4 * max(map(sum, sizes), default=0)


def _by_block(weights: Iterable[Weight]) -> dict[int, list[Weight]]:
    blocks: dict[int, list[Weight]] = {}
    for weight in weights:
        blocks.setdefault(weight.block, []).append(weight)
    return blocks


def state_bytes(optimizers: Iterable[Optimizer]) -> dict[Tensor, tuple[int, int]]:
    """Step each optimizer once on tiny stand-ins, which replace its parameters.

    Returns by parameter: the bytes of its state that has its shape, and of the rest.
    """
    found = {}
    for optimizer in optimizers:
        stand_ins = {}
        for group in optimizer.param_groups:
            small = {p: _stand_in(p) for p in group["params"]}
            group["params"] = list(small.values())
            stand_ins |= small
        optimizer.step()
        for parameter, small in stand_ins.items():
            tensors = [*tensors_in(optimizer.state[small])]
            alike = [t for t in tensors if t.shape == small.shape]
            other = [t for t in tensors if t.shape != small.shape]
            sizes = [sum(_scaled(t, small, parameter) for t in kind) for kind in (alike, other)]
            found[parameter] = (sizes[0], sizes[1])
    return found


def _stand_in(parameter: Tensor) -> nn.Parameter:
    sizes = [min(size, prime) for size, prime in zip(parameter.shape, _PRIMES, strict=False)]
    made = nn.Parameter(torch.ones(sizes))
    made.grad = torch.ones_like(made)
    return made


def _scaled(state: Tensor, small: Tensor, parameter: Tensor) -> int:
    """Return the bytes of a state of `small` for the parameter, dimension by dimension."""
    if state.shape == small.shape:
        return state.itemsize * parameter.numel()
    sizes = dict(zip(small.shape, parameter.shape, strict=True))
    return state.itemsize * math.prod(sizes.get(size, size) for size in state.shape if size > 1)


Saved = dict[int, int]
"""Bytes of memory that autograd keeps for a backward pass, by address."""


@contextmanager
def watch_saved(model: nn.Module) -> Iterator[Saved]:
    """Context manager that collects the memory which autograd saves, without the model's own."""
    saved: Saved = {}
    alive: list[Tensor] = []  # So that no address is used twice.
    known = {_address(tensor) for tensor in (*model.parameters(), *model.buffers())}

    def pack(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        if _address(tensor) not in known:
            saved[_address(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class Activations(NamedTuple):
    """Bytes that a forward pass saves."""

    saved: int
    largest: int  # in one of the watched blocks
    summed: int  # bytes of activations that ranks along `tensor` sum, forwards and backwards


def measure(
    model: nn.Module,
    forward: Callable[[], Any],
    blocks: Iterable[nn.Module] = (),
    planned: Mapping[nn.Module, str] | None = None,
    tensor: int = 1,
) -> Activations:
    """Run a forward pass, and return what it saves on each of `tensor` ranks.

    `planned` has the style of each layer that these ranks divide. Outputs of colwise layers and
    inputs of rowwise ones are divided, and the other sides are summed.
    """
    sizes, begun, divided, summed = [0], [0], set[int](), [0]
    handles = []
    with watch_saved(model) as saved:

        def enter(module: Any, inputs: Any) -> None:
            begun[0] = sum(saved.values())

        def leave(module: Any, inputs: Any, output: Any) -> None:
            sizes.append(sum(saved.values()) - begun[0])

        def note(module: Any, inputs: Any, output: Any) -> None:
            style = (planned or {})[module]
            parts, whole = (
                (output, inputs[0]) if style.startswith("colwise") else (inputs[0], output)
            )
            if style in ("colwise", "rowwise"):
                divided.add(_address(parts))
            summed[0] += whole.nbytes if style != "sequence" else 0

        for block in blocks:
            handles += [block.register_forward_pre_hook(enter), block.register_forward_hook(leave)]
        handles += [module.register_forward_hook(note) for module in planned or {}]
        forward()
    for handle in handles:
        handle.remove()
    parts_of = (size // tensor if at in divided else size for at, size in saved.items())
    return Activations(sum(parts_of), max(sizes), summed[0])


def style_of(name: str, plan: Mapping[str, str]) -> str:
    """Return the style of the last pattern of `distributed.plan` that fits a module's name."""
    fitting = [str(style) for pattern, style in plan.items() if fnmatchcase(name, pattern)]
    return fitting[-1] if fitting else ""
