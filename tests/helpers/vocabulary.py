"""What tests say about formats: which kernels ran, what each was given, and what it gave.

A dispatch mode stands below autograd and below every Python spelling: what it sees is what the
kernels of forward and backward really get.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpframe.precision.op_lists import op_name

HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
INF, NAN = float("inf"), float("nan")

# Kernels whose business is to change a format, or to move values between formats.
CASTS = frozenset({"_to_copy", "copy_", "_foreach_copy_", "convert_element_type", "convert"})


class Kernel(NamedTuple):
    """One kernel that ran: its name in aten, and the formats of its floating inputs and outputs."""

    name: str
    given: frozenset[torch.dtype]
    gave: frozenset[torch.dtype]


class Kernels(TorchDispatchMode):
    """Lists the kernels that run in its block, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[Kernel] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.ran.append(Kernel(name, formats((args, kwargs)), formats(result)))
        return result

    def computing(self) -> Iterator[Kernel]:
        """The kernels that compute with floating numbers: neither casts nor pure data movement."""
        return (k for k in self.ran if k.name not in CASTS and k.given)

    def given(self) -> set[torch.dtype]:
        """Every floating format that a computing kernel was given."""
        return {dtype for kernel in self.computing() for dtype in kernel.given}


class NoSilentPromotion(TorchDispatchMode):
    """Fails on a kernel that is given two floating formats and widens one unasked.

    0-d tensors are numbers and do not count. Those of batch norms take fp32 statistics by design.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        found = formats([t for t in tensors((args, kwargs)) if t.dim()])
        if name not in CASTS and "batch_norm" not in name:
            shown = ", ".join(sorted(map(str, found)))
            assert len(found) < 2, f"{func} was given {shown}: a silent promotion"
        return func(*args, **(kwargs or {}))


class Living(TorchDispatchMode):
    """The bytes of new tensors that are in memory, and the most at once; perhaps of some only."""

    def __init__(self, counts: Callable[[Any, Tensor], bool] = lambda func, made: True) -> None:
        super().__init__()
        self.most, self._counts, self._made = 0, counts, dict[int, tuple[StorageWeakRef, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {tensor.untyped_storage()._cdata for tensor in tensors((args, kwargs))}
        for made in tensors(result):
            memory = made.untyped_storage()
            if memory._cdata not in known and self._counts(func, made):
                self._made[memory._cdata] = StorageWeakRef(memory), memory.nbytes()
        self.most = max(self.most, sum(self.alive()))
        return result

    def alive(self) -> list[int]:
        return [size for memory, size in self._made.values() if not memory.expired()]


def tensors(node: Any) -> list[Tensor]:
    """Every tensor in a nested value."""
    return [leaf for leaf in tree_leaves(node) if isinstance(leaf, Tensor)]


def formats(node: Any) -> frozenset[torch.dtype]:
    """The floating formats of the tensors in a nested value."""
    return frozenset(t.dtype for t in tensors(node) if t.dtype.is_floating_point)


def same_bits(first: Iterable[Tensor], second: Iterable[Tensor]) -> bool:
    """True where both hold tensors of the same formats and bits (nan equals nan)."""
    equal_nans = partial(torch.nan_to_num, nan=7.0, posinf=torch.inf, neginf=-torch.inf)
    return all(
        a.dtype == b.dtype and torch.equal(equal_nans(a), equal_nans(b))
        for a, b in zip(first, second, strict=True)
    )


def in_another_thread(call: Callable[[], Any]) -> Any:
    """What `call` returns there; what it raises is raised here."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(call).result()


def inside(precision: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """The function, run in a block of this precision."""

    def run(*inputs: Any) -> Any:
        with precision.cast():
            return call(*inputs)

    return run


class CalledOps(TorchFunctionMode):
    """Names the ops that a block calls, and not what those call in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(op_name(func))
        return func(*args, **(kwargs or {}))


def flat(state: Any, path: str = "") -> dict[str, Any]:
    """Every leaf of a nested state by its path."""
    entries = dict(enumerate(state)) if isinstance(state, list | tuple) else state
    if not isinstance(entries, dict) or not entries:
        return {path: state}
    leaves = (flat(value, f"{path}/{key}").items() for key, value in entries.items())
    return dict(chain.from_iterable(leaves))


def differing(first: Any, second: Any) -> list[str]:
    """The paths at which two nested states are not bit for bit the same (nan equals nan)."""
    a, b = flat(first), flat(second)
    return [p for p in {**a, **b} if p not in a or p not in b or not same(a[p], b[p])]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return same_bits([a], [b])
    return bool(a == b or (a != a and b != b))
