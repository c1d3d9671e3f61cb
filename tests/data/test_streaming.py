"""Streams: what is read when, by which worker, and that a resumed run reads what it would have."""

import io
import os
import signal
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import refused
from in_process import assert_same_run, cut, train
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from mpframe.core.comm import Comm
from mpframe.core.errors import CheckpointError, ConfigError, DataError
from mpframe.data import Task
from mpframe.data.streaming import StreamLoader
from mpframe.data.task import make_loader

EPOCH = 5  # batches
NAN = float("nan")


class Numbers(IterableDataset[Tensor]):
    """0 to size - 1, each beside a random number; at 9 something may happen."""

    def __init__(self, size: int = 23, nine: Callable[[], Any] = lambda: 1.0) -> None:
        self.size, self.begin, self.first, self.step = size, 0, 0, 1
        self.next, self.nine = 0, nine

    def __iter__(self) -> Iterator[Tensor]:
        self.next, self.begin = self.begin, self.first
        while self.next < self.size:
            self.next += self.step
            row = torch.tensor([float(self.next - self.step), float(torch.rand(()))])
            yield row * (self.nine() if row[0] == 9 else 1.0)


class Stateful(Numbers):
    """Says where it is."""

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin = state["next"]


class Sharded(Stateful):
    def shard(self, num_shards: int, index: int) -> "Sharded":
        self.begin = self.first = index
        self.step = num_shards
        return self


class ByWorker(Numbers):
    """Splits itself by torch's worker, as its documentation shows."""

    def __iter__(self) -> Iterator[Tensor]:
        if (info := get_worker_info()) is not None:
            self.begin, self.step = info.id, info.num_workers
        return super().__iter__()


class Declared(ByWorker):
    splits_itself = True


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raises() -> None:
    raise ValueError("bad shard")


def ids(batches: Any) -> list[list[int]]:
    return [batch[:, 0].int().tolist() for batch in batches]


def loader(stream: Any = None, size: int = 4, **options: Any) -> StreamLoader:
    stream = Numbers() if stream is None else stream
    return StreamLoader(stream, size, **{"batches_per_epoch": EPOCH, "seed": 1} | options)


def read(own: StreamLoader, first: int, last: int) -> list[Any]:
    """The batches `first` to `last` - 1 of the run, epoch by epoch."""
    found: list[Any] = []
    while first < last:
        epoch, start = divmod(first, EPOCH)
        found += islice(own.epoch(epoch, start), last - first)
        first = (epoch + 1) * EPOCH
    return found


def assert_resumes(make: Callable[[], StreamLoader], places: Any, last: int = 12) -> list[Any]:
    whole = read(own := make(), 0, last)
    own.close()
    for place in places:
        read(first := make(), 0, place)
        torch.save(first.state_dict(), file := io.BytesIO())
        first.close()
        file.seek(0)
        second = make()
        second.load_state_dict(torch.load(file, weights_only=True))
        rest = read(second, place, last)
        second.close()
        assert torch.equal(torch.stack(rest), torch.stack(whole[place:])), place
    return whole


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stream", [Numbers, Stateful, Sharded, ByWorker, Declared])
def test_a_resumed_run_reads_what_it_would_have_read(stream: Any, workers: int) -> None:
    """From the beginning of an epoch, its middle, and where a pass over the stream has ended."""
    places = [1, 6] if workers else [0, 1, 5, 6, 9]
    whole = assert_resumes(lambda: loader(stream(), workers=workers), places)
    if not workers:
        assert ids(whole)[4:7] == [[16, 17, 18, 19], [20, 21, 22, 0], [1, 2, 3, 4]]
    seen = sorted(number for batch in ids(whole)[:4] for number in batch)
    assert len(set(seen)) == 16  # None twice: a worker that splits itself is not split again.
    assert len({float(row[1]) for batch in whole for row in batch}) == 12 * 4


def test_a_state_is_loaded_instead_of_reading_over_the_samples() -> None:
    read(first := loader(Stateful(1000)), 0, 30)
    second = loader(stream := Stateful(1000))
    second.load_state_dict(first.state_dict())
    began: list[int] = []
    stream.__class__ = type("Watched", (Stateful,), {
        "__iter__": lambda self: began.append(self.begin) or Stateful.__iter__(self)})  # fmt: skip
    read(second, 30, 31)
    assert began == [0, 116]  # The beginning, which is not read, and the last batch that was used.


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stream", [Numbers, Sharded, ByWorker])
def test_ranks_and_workers_share_the_samples(stream: Any, workers: int) -> None:
    """All in one pass, and in one of validation, in which a rank waits for the others with None."""
    seen: list[int] = []
    for rank in range(2):
        comm = Comm()
        comm.rank, comm.size = rank, 2
        options: Any = {"workers": workers, "comm": comm, "endless": False}
        own = loader(stream(), **options)
        for epoch in range(2):
            found = [number for batch in ids(own.epoch(epoch)) for number in batch]
            seen += found * (epoch == 1)
        assert own.size == len(found)
        own.close()
    assert sorted(seen) == list(range(23))


def test_another_epoch_is_read_from_wherever_it_is_asked_for() -> None:
    own = loader()
    whole = read(own, 0, 15)
    assert ids(own.epoch(0))[0] == [0, 1, 2, 3]  # As after a probe for the first loss scale.
    assert ids(own.epoch(1, 3)) == ids(whole[8:10])
    assert own.batch_ids(1, 3).tolist() == [32, 33, 34, 35]
    sized = type("Sized", (Numbers,), {"__len__": lambda self: 23})()
    assert len(make_loader(sized, 4, shuffle=True, drop_last=True)) == EPOCH
    text = refused(DataError, make_loader, [0], 1, batches_per_epoch=3)
    assert text.startswith("dataset: its Task has batches_per_epoch=3, which is for streams, and ")


LOADED = DataLoader(Numbers(), batch_size=4)


@pytest.mark.parametrize(("stream", "options", "text"), [
    (None, {"batches_per_epoch": None}, "dataset: Numbers does not have the length of an epoch; "
     "give its Task batches_per_epoch=N, after which validation is due"),
    (None, {"batches_per_epoch": 0}, "dataset.batches_per_epoch=0: must be a whole number >= 1"),
    *((LOADED, given, " DataLoader makes the batches of each rank itself, with batch_size=4 where ")
      for given in ({"size": 8}, {"workers": 2}, {"collate": list})),
])  # fmt: skip
def test_what_no_loader_can_be_made_of(stream: Any, options: dict[str, Any], text: str) -> None:
    assert text in refused((ConfigError, DataError), loader, stream, **options)


@pytest.mark.parametrize(("stream", "workers", "text"), [
    (Numbers(nine=lambda: NAN), 2, "dataset: training sample 9 holds NaN or inf (epoch 0, batch "),
    (Numbers(nine=raises), 0, "dataset: sample 9 cannot be read: ValueError (bad shard) at test_"),
    (Numbers(nine=killed), 1, "dataset.workers=1: worker 0 was killed by signal 9 at training samp"
     "le 9 (of its pass over the stream, near batch "),
    (Numbers(1), 2, "dataset: Numbers has no sample for worker 1 of 2 (all ranks together); use"),
    (Numbers(0), 0, "dataset: Numbers has no sample for worker 0 of 1"),
    (DataLoader(Numbers(nine=lambda: NAN), 4), 0, "dataset: training sample 1 holds NaN or inf (ep"
     "och 0, batch 2)"),
])  # fmt: skip
def test_a_stream_in_trouble_is_one_line(stream: Any, workers: int, text: str) -> None:
    own = loader(stream, workers=workers)
    assert refused(DataError, read, own, 0, 9).startswith(text)
    own.close()


def test_a_stream_that_cannot_be_resumed_says_so() -> None:
    read(first := loader(Numbers(30)), 0, 3)
    again = loader(Numbers(nine=lambda: 2.0))
    again.load_state_dict(first.state_dict())
    assert refused(DataError, read, again, 3, 4).startswith(
        "dataset: Numbers does not give the batch again that the run used last, so it cannot be "
    )
    for option, value in (("workers", 2), ("batch_size", 8), ("batches_per_epoch", 6)):
        other = loader(**{"size" if option == "batch_size" else option: value})
        text = refused(CheckpointError, other.load_state_dict, first.state_dict())
        assert text.startswith(f"dataset.{option}={value}: the stream was read with ")
    once = loader(iter(Numbers()))
    assert ids(read(once, 0, 2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    text = "resume=auto: generator can be read only once, so the run cannot be continued exactly; "
    assert refused(ConfigError, once.require_resumable, "resume=auto").startswith(text)


def regression(resumable: bool = True) -> Task:
    """The target is the random number beside each number."""
    stream: Any = Numbers(37)
    stream.resumable = resumable

    def pair(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
        rows = torch.stack(samples)
        return rows[:, :1] / 37, rows[:, 1:]

    return Task(stream, Numbers(10), loss=nn.MSELoss(), collate=pair, batches_per_epoch=3)


OWN = ["dataset=own", "dataset._target_=test_streaming.regression", "dataset.batch_size=4",
       "model=own", "model._target_=torch.nn.Linear", "+model.in_features=1",
       "+model.out_features=1", "trainer.max_steps=10", "trainer.checkpoint_every=1",
       "trainer.keep_last=20", "trainer.accumulate=2", "trainer.epochs=20", "dtype=mixed",
       "device=cpu"]  # fmt: skip


def test_a_killed_run_comes_to_the_same(tmp_path: Path) -> None:
    train(tmp_path / "whole", *OWN, "dataset.workers=2")
    resumed = cut(tmp_path / "whole", tmp_path / "resumed", 6)
    train(resumed, *OWN, "dataset.workers=2", "resume=auto")
    assert_same_run(tmp_path / "whole", resumed)


def test_a_run_that_would_not_be_exact_is_refused_before_it_begins(tmp_path: Path) -> None:
    once = [*OWN, "+dataset.resumable=false"]
    train(tmp_path, *once, "trainer.max_steps=1")
    assert refused(ConfigError, train, tmp_path, *once, "resume=auto").startswith(
        "resume=auto: Numbers can be read only once, so the run cannot be continued exactly; use "
        "resume=none, or take only the weights into a new run with init_from"
    )
