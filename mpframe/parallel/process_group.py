"""`Comm` for many processes, over torch.distributed: gloo on CPUs, NCCL between GPUs.

What the host has to know (signals, objects) goes through gloo on either kind of device, so that no
rank waits for its GPU because of it, and a rank that has ended is noticed at once.

A rank that finds another one gone says so in the store that torchrun keeps, and waits a moment for
what the others say there: so it can tell which rank it was, and why.

Small tensors are sent together in pieces, large ones by themselves.
"""

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from mpframe.core.buffers import Buffers
from mpframe.core.comm import Comm, Count, Loss, MicroBatch, Scale
from mpframe.core.errors import LostRankError
from mpframe.parallel.data_parallel import DataParallel
from mpframe.parallel.launch import Place
from mpframe.parallel.sync_batchnorm import synchronize

_LARGE = 2**22  # bytes of a tensor that is sent alone, from where it is
# Bytes that are sent together. Each piece has its own cost, and the last one is sent when there is
# nothing left to compute. Between two processes on a CPU this size took the least time.
_TOGETHER_ON_CPU = 2**22
_TOGETHER = 2**25


def pieces(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in pieces, each in the place where its last tensor comes."""
    piece: list[Tensor] = []
    size = 0
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


T = TypeVar("T")


def answer_within(seconds: float, ask: Callable[[], T]) -> T | None:
    """What `ask` returns; None if it raises a RuntimeError or ValueError, or has not ended in time.

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
    """The store, with names of their own for each time that torchrun starts the ranks.

    Ranks that it started again would read the addresses of those before them otherwise.

    Args:
        place: of this process; rank 0 keeps the store itself if no agent of torchrun does.
        timeout: seconds to wait for an answer, > 0.
        prefix: what the names are for.

    Raises:
        RuntimeError: it does not answer.
    """
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        place.size,
        is_master=place.rank == 0 and not agent,
        timeout=timedelta(seconds=timeout),
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"mpframe/{attempt}/{prefix}", store)


_LISTEN = 2.0  # seconds in which ranks tell each other why they end
_JOINS = itertools.count()


class ProcessGroup(Comm):
    """The ranks that torchrun started.

    Args:
        place: of this process.
        device: what it computes on.
        timeout: seconds without an answer of another rank after which it counts as lost.

    Raises:
        LostRankError: here and below: a rank has ended or does not answer.
    """

    def __init__(self, place: Place, device: torch.device, timeout: float) -> None:
        self.rank, self.size = place.rank, place.size
        self._timeout = timeout
        limit = timedelta(seconds=timeout)
        on_gpu = device.type == "cuda"
        self._store: Any = None
        with self._answered():
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
        """The largest of all ranks' values >= 0, each by itself; inf where one is inf or nan."""
        value = _without_nan(magnitude)
        with self._answered():
            dist.all_reduce(value, dist.ReduceOp.MAX)
        return value

    def mean(self, value: Tensor) -> Tensor:
        """The mean over the ranks, on the device."""
        total = value.detach().clone()
        with self._answered():
            dist.all_reduce(total)
        return total / self.size

    def norm(self, of_part: Tensor) -> Tensor:
        """The 2-norm of what all ranks hold, each a part with this norm; 0-d, on the device."""
        square = of_part.double().square()  # Of fp32's largest, too.
        with self._answered():
            dist.all_reduce(square)
        return square.sqrt().to(of_part.dtype)

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over the ranks in place; bit for bit the same on all of them."""
        for flat, give_back in _flattened(tensors):
            with self._answered():
                dist.all_reduce(flat)
            give_back()

    def start_broadcast_(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Begin to give tensors the values of rank 0, in place; the returned function ends it.

        What `start` began on one rank and not yet on another does not stop it.
        """
        started = []
        for flat, give_back in _flattened(tensors):
            with self._answered():
                work = dist.broadcast(flat, 0, async_op=True)
            started.append((work, give_back))

        def end() -> None:
            for work, give_back in started:
                self.wait(work)
                give_back()

        return end

    def max_of(self, numbers: Sequence[int]) -> list[int]:
        """The largest of all ranks' numbers at each place, on the host."""
        values = torch.tensor(numbers, dtype=torch.int64)
        with self._answered():
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self._host)
        return [int(value) for value in values.tolist()]

    def gather_object(self, value: T) -> list[T]:
        """On rank 0 the values of all ranks in their order; an empty list on the others."""
        values: list[Any] | None = [None] * self.size if self.is_main else None
        with self._answered():
            dist.gather_object(value, values, dst=0, group=self._host)
        return values or []

    def broadcast_object(self, value: Any) -> Any:
        """The value that rank 0 has."""
        values = [value]
        with self._answered():
            dist.broadcast_object_list(values, src=0, group=self._host)
        return values[0]

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        self.max_of([0])

    def synchronize_batchnorm(self, model: nn.Module) -> None:
        """Let BatchNorm use the statistics of all ranks, in place."""
        synchronize(model)

    def begin_step(self, optimizer: Any, reduce: str) -> None:
        """Begin a step; see `Comm.begin_step`."""
        self._reducer = None
        if reduce == "in_backward" and self.sharding is None:
            if optimizer not in self._reducers:
                self._reducers[optimizer] = self.in_backward()
            self._optimizer, self._reducer = optimizer, self._reducers[optimizer]

    def backward(self, loss: Tensor, scale: Scale, count: Count, inputs: Any) -> None:
        """Run the backward pass of loss * scale; divided weights are summed within it."""
        known = (torch.ones((), dtype=torch.float64, device=loss.device) * count).detach()
        if self._reducer is not None:
            self._reducer.backward(loss, scale, known, self._optimizer.parameters)
            return
        if self.sharding is not None:
            self.sharding.weight = self.weight(known)
        super().backward(loss, scale, count, inputs)
        if self.sharding is not None:
            self.sharding.refuse_unused()

    def accumulate(self, optimizer: Any, losses: Sequence[Loss]) -> Tensor:
        """Let the optimizer take a micro-batch's gradients, unless they are averaged already."""
        if self._reducer is not None:
            return torch.zeros(())  # `reduce` gives the optimizer its amax.
        return super().accumulate(optimizer, losses)

    def reduce(
        self, optimizer: Any, micro_batches: Sequence[MicroBatch], buffers: Buffers
    ) -> list[Tensor]:
        """Give all ranks rank 0's buffers and the mean losses, and the optimizer its gradients."""
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
        """Make what averages gradients while a backward pass runs."""
        if self._early is None:  # Layers that compare notes send meanwhile, as BatchNorm does.
            with self._answered():
                self._early = dist.new_group(timeout=timedelta(seconds=self._timeout))
        with self._answered():
            return DataParallel(self)

    def start(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, on_host: bool = False) -> Any:
        """Begin to sum a tensor over the ranks in place, or another `op`; see `wait`.

        Other collectives may run meanwhile. What is started is started in one order by all ranks.
        """
        with self._answered():
            group = self._host if on_host else self._early
            return dist.all_reduce(tensor, op, group=group, async_op=True)

    def wait(self, started: Any) -> None:
        """Wait for what `start` gave."""
        with self._answered():
            started.wait()

    def refuse_lost(self, error: BaseException | None) -> None:
        """Raise LostRankError if an error in a model, which may send, says that a rank is lost."""
        if isinstance(error, RuntimeError) and (
            isinstance(error, dist.DistError) or "gloo" in str(error)
        ):
            raise LostRankError(self._why_lost(error)) from error
        if self.sharding is not None:
            self.sharding.refuse_partial(error)

    def report_failure(self, error: str) -> None:
        """Tell the other ranks why this one ends, so that they can say it."""
        with suppress(RuntimeError):  # The store may be gone.
            self._store.set(f"failed/{self.rank}", error)

    def leave(self) -> None:
        """Close the connections."""
        self._early = self._host = self._optimizer = self._reducer = None
        self._reducers.clear()  # Connections stay open as long as anybody has them.
        dist.destroy_process_group()

    @contextmanager
    def _answered(self) -> Iterator[None]:
        """Within the block other ranks must answer."""
        try:
            yield
        except RuntimeError as error:  # gloo's own, and all errors of torch.distributed
            raise LostRankError(self._why_lost(error)) from error

    def _why_lost(self, error: RuntimeError) -> str:
        """What the rank that ended said, or which ranks say nothing."""
        why = answer_within(2 * _LISTEN, partial(self._ask_why, error))
        return why or self._gave_no_answer("0")

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
        return (
            f"rank {ranks}: was killed, or gave no answer for {self._timeout:g} s "
            "(trainer.timeout); continue with resume=auto"
        )


def _without_nan(magnitude: Tensor) -> Tensor:
    """inf for nan, which gloo's maximum keeps in one order of the ranks and loses in the other."""
    return torch.where(magnitude < torch.inf, magnitude, torch.inf)


def _flattened(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Callable[[], None]]]:
    """The tensors in flat pieces, each with what copies its values back into them."""
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
    own = [part.view_as(tensor) for part, tensor in zip(parts, piece, strict=True)]
    torch._foreach_copy_(piece, own)
