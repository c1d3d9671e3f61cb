"""A `Comm` for ranks that are threads. Two of them train as one process does."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from in_process import differing
from torch import nn

from mpframe import Backoff, Precision
from mpframe.core.comm import SINGLE_PROCESS, Comm
from mpframe.core.errors import ConfigError
from mpframe.core.objective import supervised
from mpframe.core.trainer import StepOptions, StepTrainer


class ThreadComm(Comm):
    """Ranks that are threads of one process: all that a step needs to know of them."""

    def __init__(self, rank, values, barrier):
        self.rank, self.size = rank, len(values)
        self._values, self._barrier = values, barrier

    def _all(self, value):
        self._values[self.rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()  # Nobody puts in the next value before all have read this one.
        return values

    def max(self, magnitude):
        largest = torch.stack(self._all(magnitude)).amax(0)
        return torch.where(largest < torch.inf, largest, torch.inf)

    def mean(self, value):
        return torch.stack(self._all(value.detach())).mean(0)

    def sum_(self, tensors):
        for tensor in tensors:
            tensor.copy_(torch.stack(self._all(tensor.clone())).sum(0))

    def max_of(self, numbers):
        return [max(each) for each in zip(*self._all(numbers), strict=True)]


def _trained(model, mode, comm, steps):
    model, precision = copy.deepcopy(model), Precision(mode)
    model, optimizer = precision.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.03))
    trainer = StepTrainer(
        model,
        optimizer,
        supervised(nn.CrossEntropyLoss()),
        precision,
        scaler=Backoff(init_scale=1024.0),
        plan=StepOptions(clip_norm=1.0),
        comm=comm,
    )
    results = [trainer.train_step(*micro_batches) for micro_batches in steps]
    losses = [result.loss.item() for result in results]
    return losses, optimizer.masters_by_name(model), trainer.scaler.state_dict()


@pytest.mark.parametrize("mode", ["fp32", "mixed", "amp"])
def test_ranks_that_are_threads_train_as_one_process_that_accumulates(mode):
    torch.manual_seed(0)
    inputs = torch.randn(24, 4, 8).unbind()
    batches = [(values, values[:, :4].argmax(1)) for values in inputs]
    shares = batches[::2], batches[1::2]
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    values, barrier = [None, None], threading.Barrier(2, timeout=60)

    def rank(number):
        comm = ThreadComm(number, values, barrier)
        return _trained(model, mode, comm, [(batch,) for batch in shares[number]])

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(rank, range(2))
    single = _trained(model, mode, SINGLE_PROCESS, zip(*shares, strict=True))
    assert first[0] == second[0] == single[0]
    assert sum(single[0][-4:]) < 0.9 * sum(single[0][:4])
    assert differing(first[1:], second[1:]) == differing(first[1:], single[1:]) == []


@pytest.mark.parametrize("mode", ["fp32", "mixed"])
def test_ranks_average_gradients_that_only_the_step_finds(mode):
    """A loop by hand that calls no `accumulate`: backward, then step."""
    torch.manual_seed(0)
    first, inputs = nn.Linear(4, 2), torch.randn(2, 3, 4)

    def trained(comm, *shares):
        model, precision = copy.deepcopy(first), Precision(mode)
        model, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        optimizer.set_comm(comm)
        for share in shares:
            with precision.cast():
                loss = model(share).square().mean()
            (loss / len(shares)).backward()
        result = optimizer.step()
        with pytest.raises(ConfigError, match="has consumed the gradients"):
            optimizer.step()
        return [result.grad_norm, *optimizer.masters_by_name(model).values()]

    values, barrier = [None, None], threading.Barrier(2, timeout=60)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda n: trained(ThreadComm(n, values, barrier), inputs[n]), (0, 1))
    assert differing(one, other) == []
    # In one process two half gradients are added in half: their sum is rounded once.
    close = {"fp32": 0.0, "mixed": 2.0**-11}[mode]
    torch.testing.assert_close(one, trained(SINGLE_PROCESS, *inputs), rtol=close, atol=close)
