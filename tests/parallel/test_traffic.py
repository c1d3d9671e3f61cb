"""The model of traffic, beside what a step really hands to the collectives."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from bench.traffic import PARALLEL, Weight, held, payload, sent, tables
from checkout import ROOT
from ranked import in_group, setup
from torch.utils._python_dispatch import TorchDispatchMode

from mpframe.core.comm import SINGLE_PROCESS, Comm
from mpframe.core.tree import HALF, tensors_in

# Of an op its kind, and which argument has the values of all ranks.
KINDS = {
    "allreduce_": ("all_reduce", 0), "broadcast_": ("broadcast", 0),
    "_allgather_base_": ("all_gather", 0), "_reduce_scatter_base_": ("reduce_scatter", 1),
}  # fmt: skip


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


def counted(comm: Comm, mode: str, parallel: str) -> tuple[Mapping[str, int], list[Weight], int]:
    """What a rank hands over in a step; the weights, and the bytes of the buffers.

    In its third step: with its second, DDP tells the ranks how it has divided the weights.
    """
    options = {"name": "mlp", "fsdp": True, "clip_norm": None}
    if parallel != "fsdp":
        options = {"whole": True, "norm": True, "batch": 16, "reduce": parallel}
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
    ],
)
def test_the_model_tells_the_traffic_of_a_step(
    request: pytest.FixtureRequest, mode: str, parallel: str, size: int
) -> None:
    ranks = request.getfixturevalue({2: "two", 4: "four"}[size])
    for handed, weights, buffers in ranks(in_group, counted, mode, parallel):
        assert handed == payload(weights, parallel, size, buffers, scaled=mode != "fp32")


def test_a_ring_sends_twice_what_is_summed_and_the_page_has_the_tables() -> None:
    handed = {"all_reduce": 100, "all_gather": 40, "reduce_scatter": 40, "broadcast": 8}
    assert (sent(handed, 1), sent(handed, 4)) == (0, 2 * 75 + 30 + 30 + 8)
    assert held("mixed", "after_backward", 1) == 16
    assert tables() in (ROOT / "docs" / "distributed.md").read_text()
