"""Evidence keeps a batch of any shape, in a file that names no class, bit for bit."""

from collections import UserDict, namedtuple
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mpframe.core.tree import named_tensors
from mpframe.lab.autopsy import evidence
from mpframe.lab.autopsy.evidence import Evidence

Pair = namedtuple("Pair", "left right")
IDS = torch.arange(6).reshape(2, 3)


@dataclass(frozen=True)
class Holder:
    image: Tensor
    target: dict[str, Any]


def saved(folder: Path, *batches: Any) -> Evidence:
    """Written and read again."""
    samples = [[4, 5]] * len(batches)
    step = Evidence(3, "asked", list(batches), samples, 0, 2, {"": 1.0}, {}, "none")
    step = replace(step, updates=2, clips=True)
    return evidence.load(evidence.save(folder, step, {"weight": torch.ones(1)}, "a: 1"))[0]


def same(left: Any, right: Any) -> bool:
    pairs = zip(named_tensors(left), named_tensors(right), strict=True)
    return all(a == b and x.dtype == y.dtype and torch.equal(x, y) for (a, x), (b, y) in pairs)


def test_tuples_lists_and_dicts_as_they_are(tmp_path: Path) -> None:
    """What is no tensor is kept as a number or its text."""
    images = [torch.randn(3, 4, 5).bfloat16(), torch.randn(3, 6, 5)]
    plain = {"name": ["a", "b"], "share": 0.5, "none": None}
    batches = [
        {"ids": IDS, **plain, "file": Path("a.png"), "size": np.float32(0.5), "box": np.arange(4)},
        (images, [{"boxes": torch.zeros(0, 4)}, {"boxes": torch.ones(2, 4)}]),
        ((IDS, (IDS + 1, IDS + 2)), torch.tensor([1, 0])),
        IDS,
    ]
    step = saved(tmp_path, *batches)
    assert (step.plain, step.updates, step.clips) == (True, 2, True)
    assert [type(batch) for batch in step.batches] == [dict, tuple, tuple, Tensor]
    assert all(map(same, step.batches[1:], batches[1:]))
    first: Any = step.batches[0]
    assert torch.equal(first["ids"], IDS)
    assert {name: first[name] for name in plain} == plain
    assert (first["file"], first["size"], first["box"].tolist()) == ("a.png", 0.5, [0, 1, 2, 3])


@pytest.mark.parametrize(
    "batch",
    [
        Holder(IDS, {"boxes": IDS + 1}),
        UserDict(input_ids=IDS, inner={"a": IDS}),
        (IDS, [Pair(IDS, "a"), Pair(IDS + 1, "b")]),
    ],
)
def test_a_class_comes_back_by_the_example_of_another_batch(batch: Any, tmp_path: Path) -> None:
    step = saved(tmp_path, batch)
    (plain,), (restored,) = step.batches, step.like(batch).batches
    assert not step.plain
    assert type(plain) in (dict, tuple)
    assert same(plain, batch)
    assert type(restored) is type(batch)
    assert same(restored, batch)
    if isinstance(batch, tuple):
        assert [type(item) for item in restored[1]] == [Pair, Pair]


def test_an_example_of_another_form_changes_nothing(tmp_path: Path) -> None:
    (batch,) = saved(tmp_path, Pair(IDS, IDS)).like({"left": IDS, "middle": IDS}).batches
    assert (type(batch), list(batch)) == (dict, ["left", "right"])


def test_a_view_is_saved_without_what_it_is_a_view_of(tmp_path: Path) -> None:
    saved(tmp_path, {"x": torch.zeros(2**20)[:2]})
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.pt")) < 2**16


@pytest.mark.parametrize("batch", [1, [[], {"a": 1}]])
def test_a_batch_without_a_tensor_is_no_evidence(batch: Any, tmp_path: Path) -> None:
    with pytest.raises(evidence.CheckpointError, match="not the evidence of a step"):
        saved(tmp_path, batch)
