"""Tensors in any container: found in their order, and replaced in one of the same kind."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import FrozenInstanceError, dataclass, field

import pytest
import torch
from torch import Tensor

from mpframe.core.tree import map_tensors, tensors_in, to_fp32
from mpframe.data.fetching import named_tensors


@dataclass
class Output:
    logits: Tensor
    hidden: tuple[Tensor, ...] = ()
    made: int = field(default=0, init=False)


@dataclass(frozen=True, slots=True)
class Frozen:
    inner: Output


Pair = namedtuple("Pair", "left right")


def half(value):
    return torch.full((2,), value, dtype=torch.float16)


def test_containers_and_dataclasses_keep_their_kind() -> None:
    one, two = half(1), half(2)
    in_dicts = {"a": one, "b": {"c": two}}, OrderedDict(a=one, b=two), UserDict(a=one, b=two)
    output = Output(one, (two,))
    output.made = 7
    for node in ((one, [two]), Pair(one, two), *in_dicts, output, Frozen(output)):
        wide = to_fp32(node)
        assert type(wide) is type(node)
        found = [(tensor[0].item(), tensor.dtype) for tensor in tensors_in(wide)]
        assert found == [(1, torch.float32), (2, torch.float32)]
    assert (type(wide.inner), wide.inner.made) == (Output, 7)
    assert output.logits.dtype == torch.float16  # as it was
    with pytest.raises(FrozenInstanceError):
        wide.inner = output
    assert map_tensors(Tensor.float, Output) is Output  # A type is no container.
    assert list(tensors_in(Output)) == []


def test_tensors_by_their_path() -> None:
    batch = (half(1), [{"boxes": half(2), "name": "a"}, Pair(half(3), None)], Output(half(4)))
    expected = {"[0]": 1, "[1][0].boxes": 2, "[1][1].left": 3, "[2].logits": 4}
    assert {name: tensor[0].item() for name, tensor in named_tensors(batch)} == expected
    for node, names in (({"a": UserDict(b=half(1))}, ["a.b"]), (half(1), [""]), ("word", [])):
        assert [name for name, _ in named_tensors(node)] == names
