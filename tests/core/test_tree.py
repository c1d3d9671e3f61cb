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
    name: str = "head"
    made: int = field(default=0, init=False)


@dataclass(frozen=True, slots=True)
class Frozen:
    logits: Tensor
    inner: Output


Pair = namedtuple("Pair", "left right")


def half(value):
    return torch.full((2,), value, dtype=torch.float16)


def found(node):
    return [(t[0].item(), t.dtype) for t in tensors_in(node)]


def test_dataclasses_frozen_ones_and_one_inside() -> None:
    output = Output(half(1), (half(2), half(3)))
    output.made = 7
    wide = to_fp32([output, Frozen(half(4), Output(half(5)))])
    assert [type(own) for own in (*wide, wide[1].inner)] == [Output, Frozen, Output]
    assert found(wide) == [(n, torch.float32) for n in range(1, 6)]
    assert (wide[0].name, wide[0].made) == ("head", 7)
    assert output.logits.dtype == torch.float16  # as it was
    with pytest.raises(FrozenInstanceError):
        wide[1].logits = half(0)
    assert map_tensors(Tensor.float, Output) is Output  # A type is no container.
    assert list(tensors_in(Output)) == []


def test_containers_keep_their_kind() -> None:
    one, two = half(1), half(2)
    in_dicts = {"a": one, "b": {"c": two}}, OrderedDict(a=one, b=two), UserDict(a=one, b=two)
    for node in ((one, [two]), Pair(one, two), *in_dicts):
        wide = to_fp32(node)
        assert type(wide) is type(node)
        assert found(wide) == [(1, torch.float32), (2, torch.float32)]


def test_tensors_by_their_path() -> None:
    batch = (half(1), [{"boxes": half(2), "name": "a"}, Pair(half(3), None)], Output(half(4)))
    expected = {"[0]": 1, "[1][0].boxes": 2, "[1][1].left": 3, "[2].logits": 4}
    assert {name: tensor[0].item() for name, tensor in named_tensors(batch)} == expected
    for node, names in (({"a": UserDict(b=half(1))}, ["a.b"]), (half(1), [""]), ("word", [])):
        assert [name for name, _ in named_tensors(node)] == names
