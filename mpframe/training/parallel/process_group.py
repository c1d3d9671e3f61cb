"""`Comm` for many processes, over torch.distributed: gloo on CPUs, NCCL between GPUs.

Signals and objects, which the host needs, go through gloo on either kind of device. So no rank
waits for its GPU because of them, and a rank that has ended is noticed at once.

A rank that finds another one gone says so in the store that torchrun keeps, and waits a moment for
the other ranks' words there. So it can tell which rank it was, and why.
"""

import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from mpframe.core.buffers import Buffers
from mpframe.core.comm import Comm, Count, Loss, MicroBatch, Scale
from mpframe.core.errors import ConfigError, LostRankError
from mpframe.training.parallel.data_parallel import DataParallel
from mpframe.training.parallel.place import Place, address, keeps_store
from mpframe.training.parallel.sync_batchnorm import note_weight

T = TypeVar("T")
_MAX: Any = dist.ReduceOp.MAX
_LARGE = 2**22  # bytes of a tensor that is sent by itself, from where it is
# Bytes of small tensors that are sent together. Each bucket has its cost, and the last one is sent
# after all computing. Between two processes on a CPU this size took the least time.
_TOGETHER_ON_CPU = 2**22
_TOGETHER = 2**25
_PARTIAL = re.compile("mixed torch.Tensor and DTensor|root module first")  # in FSDP's errors
_LISTEN = 2.0  # seconds in which ranks tell each other why they end
_JOINS = itertools.count()
_KEPT: dict[tuple[str, int, int], TCPStore] = {}


def pieces(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Collect small tensors in buckets, each yielded where its last tensor comes."""
    piece, size = list[Tensor](), 0
    for tensor in tensors:
        if tensor.nbytes >= _LARGE:
            yield [tensor]
            continue
        piece.append(tensor)
        size += tensor.nbytes
        if size >= (_TOGETHER_ON_CPU if tensor.is_cpu else _TOGETHER):
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def answer_within(seconds: float, ask: Callable[[], T]) -> T | None:
    """Return `ask()`, or None if it raises RuntimeError or ValueError, or takes longer.

    Without torchrun's agent rank 0 keeps the store. If it hangs, a question to it never ends,
    whatever its timeout.
    """
    answers: list[T] = []

    def answer() -> None:
        with suppress(RuntimeError, ValueError):
            answers.append(ask())

    asking = Thread(target=answer, daemon=True)
    asking.start()
    asking.join(seconds)
    return answers[0] if answers else None


def store_at(place: Place, timeout: float, prefix: str) -> Store:
    """Return the store, with other names each time that torchrun starts the ranks.

    Restarted ranks would otherwise read the addresses of those before them. Rank 0 keeps the store
    itself if no agent of torchrun does. RuntimeError if it does not answer for `timeout` seconds.
    """
    at, limit = (*address(), place.size), timedelta(seconds=timeout)
    store = _KEPT.get(at) or TCPStore(*at, is_master=keeps_store(), timeout=limit)
    if keeps_store():  # It ends with this process, as others may still ask it.
        _KEPT[at] = store
    store.set_timeout(limit)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"mpframe/{attempt}/{prefix}", store)


class ProcessGroup(Comm):
    """The ranks of a run, of which this process computes on `device`.

    LostRankError, here and below: a rank has ended, or has given no answer for `timeout` seconds.
    """

    def __init__(self, place: Place, device: torch.device, timeout: float) -> None:
        self.rank, self.size = place.rank, place.size
        self._timeout = timeout
        self._store: Any = None
        limit, on_gpu = timedelta(seconds=timeout), device.type == "cuda"
        with self._require_answer():
            if on_gpu:
                torch.cuda.set_device(device)
            self._store = store_at(place, timeout, f"group/{next(_JOINS)}")
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
                store=self._store,
                rank=place.rank,
                world_size=place.size,
                timeout=limit,
            )
            self._early: Any = None
            self._reducers: WeakKeyDictionary[Any, DataParallel] = WeakKeyDictionary()
            self._optimizer: Any = None
            self._reducer: DataParallel | None = None
            self._host: Any = dist.new_group(backend="gloo", timeout=limit) if on_gpu else None

    def max(self, magnitude: Tensor) -> Tensor:
        # gloo's maximum keeps nan in one order of the ranks and loses it in the other.
        value = torch.where(magnitude < torch.inf, magnitude, torch.inf)
        return self._all_reduce(value, _MAX)

    def mean(self, value: Tensor) -> Tensor:
        return self._all_reduce(value.detach().clone()) / self.size

    def norm(self, of_part: Tensor) -> Tensor:
        square = of_part.double().square()  # In fp64 the square of fp32's maximum is finite.
        return self._all_reduce(square).sqrt().to(of_part.dtype)

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        for flat, give_back in _flatten(tensors):
            if self.rank % self.tensor:  # The first rank of each share adds it.
                flat.zero_()
            self._all_reduce(flat)
            give_back()

    def start_broadcast_(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Begin to give tensors rank 0's values, in place, which the returned function ends.

        It does not wait for collectives that `start` has begun on one rank only.
        """
        started = []
        for flat, give_back in _flatten(tensors):
            with self._require_answer():
                started.append((dist.broadcast(flat, 0, async_op=True), give_back))

        def end() -> None:
            for work, give_back in started:
                self.wait(work)
                give_back()

        return end

    def max_of(self, numbers: Sequence[int]) -> list[int]:
        values = torch.tensor(numbers, dtype=torch.int64)
        return [int(value) for value in self._all_reduce(values, _MAX, self._host).tolist()]

    def gather_object(self, value: T) -> list[T]:
        values: list[Any] | None = [None] * self.size if self.is_main else None
        with self._require_answer():
            dist.gather_object(value, values, dst=0, group=self._host)
        return values or []

    def broadcast_object(self, value: Any) -> Any:
        values = [value]
        with self._require_answer():
            dist.broadcast_object_list(values, src=0, group=self._host)
        return values[0]

    def begin_step(self, optimizer: Any, reduce: str) -> None:
        self._reducer = None
        if reduce == "in_backward" and self.sharding is None:
            if optimizer not in self._reducers:
                self._reducers[optimizer] = self.in_backward()
            self._optimizer, self._reducer = optimizer, self._reducers[optimizer]

    def backward(self, loss: Tensor, scale: Scale, count: Count, inputs: Any) -> None:
        known = (torch.ones((), dtype=torch.float64, device=loss.device) * count).detach()
        note_weight(self, known)
        if self._reducer is not None:
            self._reducer.backward(loss, scale, known, self._optimizer.parameters)
            return
        if self.sharding is None:
            super().backward(loss, scale, count, inputs)
            return
        self.sharding.begin_backward(self.weight(known))
        self.sharding.usage.agree(self)
        super().backward(loss, scale, count, None)  # All others are frozen.
        self.sharding.usage.drop_unused(self)

    def accumulate(self, optimizer: Any, losses: Sequence[Loss]) -> Tensor:
        if self._reducer is not None:
            return torch.zeros(())  # `reduce` gives the optimizer its amax.
        return super().accumulate(optimizer, losses)

    def reduce(
        self, optimizer: Any, micro_batches: Sequence[MicroBatch], buffers: Buffers
    ) -> list[Tensor]:
        end_broadcast = self.start_broadcast_(buffers.tensors())  # While gradients are sent.
        if self._reducer is None:
            end_broadcast()
            return super().reduce(optimizer, micro_batches, buffers)
        ((loss,), _) = micro_batches[0]
        means, amax, before, mean = self._reducer.means(loss.value)
        end_broadcast()
        optimizer.set_reduced_grads(means, amax, before)
        self._optimizer = self._reducer = None  # As long as anybody has them, so do connections.
        return [mean]

    def in_backward(self) -> DataParallel:
        """Make an object that averages gradients while a backward pass runs."""
        with self._require_answer():
            if self._early is None:  # Layers such as BatchNorm communicate meanwhile.
                self._early = dist.new_group(timeout=timedelta(seconds=self._timeout))
            return DataParallel(self)

    def _all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> Tensor:
        with self._require_answer():
            dist.all_reduce(tensor, op, group=group)
        return tensor

    def start(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, on_host: bool = False) -> Any:
        """Begin to sum a tensor over the ranks in place, or another `op`, until `wait`.

        Other collectives may run meanwhile. All ranks start these in the same order.
        """
        with self._require_answer():
            group = self._host if on_host else self._early
            return dist.all_reduce(tensor, op, group=group, async_op=True)

    def wait(self, started: Any) -> None:
        """Wait for a collective that `start` returned."""
        with self._require_answer():
            started.wait()

    def refuse_lost(self, error: BaseException | None) -> None:
        if not isinstance(error, RuntimeError):
            return
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise LostRankError(self._why_lost(error)) from error
        if self.sharding is not None and _PARTIAL.search(str(error)):
            raise ConfigError(
                "trainer.parallel=fsdp: the objective does not call the model, but a part of it; "
                "use trainer.parallel=ddp"
            ) from error

    def report_failure(self, error: str) -> None:
        with suppress(RuntimeError):  # The store may be gone.
            self._store.set(f"failed/{self.rank}", error)

    def aside(self) -> Comm:
        """Return these ranks with connections for objects that another thread may use meanwhile."""
        comm = copy(self)
        with self._require_answer():
            limit = timedelta(seconds=self._timeout)
            comm._host = dist.new_group(backend="gloo", timeout=limit)
        return comm

    def leave(self) -> None:
        """Close the connections."""
        self._early = self._host = self._optimizer = self._reducer = None
        self._reducers.clear()  # Connections stay open as long as anybody has them.
        dist.destroy_process_group()

    @contextmanager
    def _require_answer(self) -> Iterator[None]:
        """Raise LostRankError if another rank does not answer within the block."""
        try:
            yield
        except RuntimeError as error:  # gloo's own, and all errors of torch.distributed
            raise LostRankError(self._why_lost(error)) from error

    def _why_lost(self, error: RuntimeError) -> str:
        """Return the last words of the rank that ended, or which ranks do not answer."""
        ask = partial(self._ask_why, error)
        return answer_within(2 * _LISTEN, ask) or self._gave_no_answer("0")

    def _ask_why(self, error: RuntimeError) -> str:
        store, others = self._store, [r for r in range(self.size) if r != self.rank]
        with suppress(RuntimeError, AttributeError):  # The store is gone, or was never there.
            store.set(f"alive/{self.rank}", "")
            for _ in range(20):
                for rank in others:
                    if store.check([f"failed/{rank}"]):
                        return f"rank {rank}: {store.get(f'failed/{rank}').decode()}"
                time.sleep(_LISTEN / 20)
            gone = [str(rank) for rank in others if not store.check([f"alive/{rank}"])]
            if gone:
                return self._gave_no_answer(", ".join(gone))
        return f"rank {self.rank}: lost the other ranks ({str(error).splitlines()[0]:.200})"

    def _gave_no_answer(self, ranks: str) -> str:
        # A rank that waits for this one in another group of ranks is silent as well.
        others = " or waits for a silent one" if "," in ranks else ""
        return (
            f"rank {ranks}: was killed, or gave no answer for {self._timeout:g} s "
            f"(trainer.timeout){others}; continue with resume=auto"
        )


def _flatten(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Callable[[], None]]]:
    """Yield the tensors in flat buckets, each with a function that copies its values back."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for alike in by_kind.values():
        for piece in pieces(alike):
            if len(piece) == 1 and piece[0].is_contiguous():
                yield piece[0].view(-1), lambda: None
            else:
                flat = torch.cat([tensor.reshape(-1) for tensor in piece])
                yield flat, partial(_give_back, flat, piece)


def _give_back(flat: Tensor, piece: list[Tensor]) -> None:
    parts = torch.split(flat, [tensor.numel() for tensor in piece])
    torch._foreach_copy_(piece, [part.view_as(t) for part, t in zip(parts, piece, strict=True)])
