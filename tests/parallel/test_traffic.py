"""The model of traffic, beside what a step really hands to the collectives."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from bench.traffic import PARALLEL, Weight, held, payload, sent, tables
from checkout import ROOT
from rank_training import CPU, setup
from ranks import Ranks
from torch.utils._python_dispatch import TorchDispatchMode

from mpframe.core.comm import SINGLE_PROCESS
from mpframe.core.tree import HALF, tensors_in
from mpframe.parallel.launch import init_comm

KINDS = {
    "allreduce_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
}
"""Of an op its kind, and which argument has the values of all ranks."""
NET = {"whole": True, "norm": True, "batch": 16}


class Counted(TorchDispatchMode):
    """Counts the bytes of the tensors that collectives are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "c10d":
            kind, at = KINDS[op._opname]
            self.bytes[kind] += sum(tensor.nbytes for tensor in tensors_in(args[at]))
        return op(*args, **(kwargs or {}))


def counted(mode: str, parallel: str) -> tuple[Mapping[str, int], list[Weight], int]:
    """What a rank hands over in a step; the weights, and the bytes of the buffers.

    In its third step: with its second, DDP tells the ranks how it has divided the weights.
    """
    with init_comm(None, lambda: CPU, 120) as comm:
        options = {"name": "mlp", "fsdp": True, "clip_norm": None}
        if parallel != "fsdp":
            options = {**NET, "reduce": parallel}
        trainer, train, _ = setup(mode, comm, options)
        stored = setup(mode, SINGLE_PROCESS, {**options, "fsdp": False})[0].model
        *others, last = list(train.epoch(0))[:3]
        for batch in others:
            trainer.train_step(batch)
        with Counted() as counter:
            trainer.train_step(last)
        weights = [Weight(tuple(p.shape), p.dtype in HALF) for p in stored.parameters()]
        return counter.bytes, weights, sum(own.nbytes for own in trainer.model.buffers())


@pytest.mark.parametrize(
    ("mode", "parallel", "size"),
    [
        ("fp32", "after_backward", 2),
        ("mixed", "in_backward", 2),
        ("mixed", "fsdp", 2),
        *(pytest.param("mixed", own, 4, marks=pytest.mark.slow) for own in PARALLEL),
        pytest.param("fp32", "fsdp", 4, marks=pytest.mark.slow),
    ],
)
def test_the_model_tells_the_traffic_of_a_step(
    request: pytest.FixtureRequest, mode: str, parallel: str, size: int
) -> None:
    ranks: Ranks = request.getfixturevalue({2: "two", 4: "four"}[size])
    for handed, weights, buffers in ranks(counted, mode, parallel):
        assert handed == payload(weights, parallel, size, buffers, scaled=mode != "fp32")


def test_a_ring_sends_twice_what_is_summed_but_for_a_share() -> None:
    handed = {"all_reduce": 100, "all_gather": 40, "reduce_scatter": 40, "broadcast": 8}
    assert sent(handed, 1) == 0
    assert sent(handed, 4) == 2 * 75 + 30 + 30 + 8


def test_parts_of_equal_size_are_padded() -> None:
    assert Weight((5, 3)).padded(4) == 8 * 3
    assert payload([Weight((5, 3), half=True)], "fsdp", 4) == {
        "all_reduce": 12 + 8 + 24,
        "all_gather": 2 * 2 * 24,
        "reduce_scatter": 4 * 24,
    }


def test_the_page_has_the_tables_of_the_model() -> None:
    page = (ROOT / "docs" / "distributed.md").read_text()
    assert tables() in page
    assert held("mixed", "after_backward", 1) == 16
