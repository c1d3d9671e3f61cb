"""Whether casts are on is a matter of the present thread: blocks of two threads do not meet."""

from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vocabulary import HALVES, in_another_thread, same_bits

from mpframe import OpLists, Precision

FP32, HALF = torch.float32, torch.float16


def pinned(half: str = "float16") -> Precision:
    lists = OpLists.named()
    return Precision(
        "amp", half, ops=OpLists(lists.allow, lists.deny, lists.infer, {"head": "fp32"})
    )


class Net(nn.Module):
    """A half product, a recurrent layer and a pinned head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.cell, self.head = nn.Linear(8, 8), nn.GRU(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> list[Tensor]:
        body = self.body(x)
        cell, _ = self.cell(body)
        return [body, cell, self.head(cell)]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("mode", ["amp", "mixed"])
def test_a_block_within_another_threads_block(mode: str, half: str) -> None:
    precision, model, x = Precision(mode, half), Net(), torch.rand(2, 3, 8)
    model, _ = precision.prepare(model, torch.optim.SGD(model.parameters(), 0.1))

    def forward() -> list[Tensor]:
        with precision.cast():
            return model(x)

    expected = forward()
    assert {tensor.dtype for tensor in expected} == {HALVES[half]}
    with precision.cast():
        assert same_bits(in_another_thread(forward), expected)
        assert same_bits(model(x), expected)


def test_no_block_in_this_thread_although_there_is_one_in_another() -> None:
    precision, model, x = pinned(), Net(), torch.rand(2, 3, 8)
    precision.attach(model)
    with precision.cast():
        assert {tensor.dtype for tensor in in_another_thread(lambda: model(x))} == {FP32}


def test_an_fp32_block_in_another_thread_switches_nothing_off_here() -> None:
    precision, x = Precision("amp"), torch.rand(4, 4)
    opened, leave = Event(), Event()

    def hold() -> None:
        with precision.cast(), Precision("fp32").cast():
            opened.set()
            leave.wait(60)

    thread = Thread(target=hold)
    with precision.cast():
        thread.start()
        opened.wait(60)
        assert (x @ x).dtype == HALF
        leave.set()
        thread.join()
        assert (x @ x).dtype == HALF


@pytest.mark.parametrize("first_out", [True, False])
def test_blocks_that_overlap_end_on_their_own(first_out: bool) -> None:
    precision, model, x = pinned(), Net(), torch.rand(2, 3, 8)
    precision.attach(model)
    expected = [HALF, HALF, FP32]
    opened, leave = Event(), Event()

    def hold() -> list[torch.dtype]:
        with precision.cast():
            opened.set()
            leave.wait(60)
            return [tensor.dtype for tensor in model(x)]

    found: list[list[torch.dtype]] = []
    thread = Thread(target=lambda: found.append(hold()))
    with precision.cast():
        thread.start()
        opened.wait(60)
        if not first_out:
            leave.set()
            thread.join()
        assert [tensor.dtype for tensor in model(x)] == expected
    leave.set()
    thread.join()
    assert found == [expected]
    assert {tensor.dtype for tensor in model(x)} == {FP32}


def test_a_block_begun_while_another_thread_is_in_a_pinned_module() -> None:
    precision, model, x = pinned(), Net(), torch.rand(2, 3, 8)
    precision.attach(model)
    inside, leave = Event(), Event()

    def hold(*_: Any) -> None:
        inside.set()
        leave.wait(60)

    def forward() -> list[torch.dtype]:
        with precision.cast():
            return [tensor.dtype for tensor in model(x)]

    expected = forward()  # and there is a mode to be used again
    model.head.register_forward_pre_hook(hold)
    found: list[list[torch.dtype]] = []
    thread = Thread(target=lambda: found.append(forward()))
    thread.start()
    inside.wait(60)
    with precision.cast():
        assert (x @ x.mT).dtype == HALF
        leave.set()
        thread.join()
    assert found == [expected] == [[HALF, HALF, FP32]]


def test_many_threads_at_once() -> None:
    precision, model, x = pinned(), Net(), torch.rand(2, 3, 8)
    precision.attach(model)
    with torch.no_grad():
        plain = model(x)

    def step() -> list[Tensor]:
        with torch.no_grad(), precision.cast():
            return model(x)

    expected, found = step(), list[list[Tensor]]()
    threads = [Thread(target=lambda: found.extend(step() for _ in range(20))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    assert all(same_bits(result, expected) for result in found)
    with torch.no_grad():
        assert same_bits(model(x), plain)
