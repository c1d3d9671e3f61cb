"""The grid of ranks that divide a model, its refusals, and the part of a tensor that a rank has."""
# ruff: noqa: E501 - a table, one case a line

from typing import Any

import pytest
import torch
from fixtures import refused

from mpframe.core.comm import cut
from mpframe.core.errors import ConfigError
from mpframe.parallel.layout import Layout


def test_ranks_fill_a_grid_with_tensor_innermost() -> None:
    assert Layout().shape(6) == (1, 6, 1)
    assert Layout(replicas=2, tensor=3, plan={"*": "colwise"}).shape(12) == (2, 2, 3)


REFUSED = [
    ({"replicas": 0}, "distributed.replicas=0: must be an integer >= 1"),
    ({"blocks_together": True}, "distributed.blocks_together=True: must be an integer >= 1"),
    ({"tensor": 2}, "distributed.tensor=2: ranks divide the layers that distributed.plan names, and it names 0; give both or none"),
    ({"plan": {"*": "rowwise"}}, "distributed.tensor=1: ranks divide the layers that distributed.plan names, and it names 1; give both or none"),
    ({"replicas": 4}, "distributed.replicas=4: must divide the 6 ranks; choose 1, 2, 3, 6"),
    ({"replicas": 2, "tensor": 6, "plan": {"*": "colwise"}}, "distributed.replicas=2: 6 ranks are no multiple of replicas x tensor (6); choose smaller ones"),
    ({"replicas": 6}, "distributed.replicas=6: of 6 ranks each replica would have 1, and none to share its weights with; choose fewer replicas, or trainer.parallel=ddp"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "line"), REFUSED)
def test_a_grid_that_cannot_be_is_refused(options: dict[str, Any], line: str) -> None:
    assert refused(ConfigError, lambda: Layout(**options).shape(6)) == line


def test_a_part_is_cut_along_each_axis_and_the_last_may_be_empty() -> None:
    whole = torch.arange(40).view(5, 8)
    assert torch.equal(cut(whole, [(1, 2, 1), (0, 2, 1)]), whole[3:, 4:])
    assert torch.equal(cut(whole, [(0, 2, 0), (0, 2, 1)]), whole[2:3])  # A part of a part.
    assert cut(whole, [(0, 4, 3)]).shape == (0, 8)
    assert cut(whole, [(0, 2, 0)]).data_ptr() == whole.data_ptr()
