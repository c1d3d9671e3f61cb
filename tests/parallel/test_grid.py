"""Ranks in a grid, how they gather weights, and blocks that some of them do not use."""
# ruff: noqa: E501 - a table, one case a line

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from fixtures import Patch, refused
from in_process import differing
from ranked import SHARDED, adds_zeros, assert_same_but, on_ranks, two_formats
from ranks import Ranks
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from mpframe.core.comm import Comm, is_sharded
from mpframe.core.errors import ConfigError
from mpframe.run.resume import compare
from mpframe.training.parallel import sharding, unused
from mpframe.training.parallel.layout import Layout
from mpframe.training.parallel.unused import Usage
from mpframe.training.trainer import Trainer


def of(ranks: Ranks, mode: str, name: str, **options: Any) -> list[dict[str, Any]]:
    """What a short training with divided weights leaves on each rank."""
    left: list[Any] = ranks(counted, mode, {"name": name, "fsdp": True, "steps": 2, **options})
    assert not any(isinstance(own, str) for own in left), left
    return left


def counted(mode: str, options: dict[str, Any]) -> dict[str, Any]:
    """The same on this rank, and how often weights were gathered, or a graph compiled.

    The compiler leaves the ops as they are. No weight is whole after the steps and a validation.
    """
    calls: Counter[str] = Counter()
    gather, compiled, evaluate = DefaultAllGather.__call__, torch.compile, Trainer.evaluate

    def counting(*arguments: Any, **named: Any) -> Any:
        calls["gathered"] += 1
        return gather(*arguments, **named)

    def backend(graph: Any, inputs: Any) -> Any:
        calls["graphs"] += 1
        return lookup_backend("aot_eager")(graph, inputs)

    def watched(trainer: Trainer, *arguments: Any) -> Any:
        calls["gathered in steps"] = calls["gathered"]
        evaluation = evaluate(trainer, *arguments)
        assert all(map(is_sharded, trainer.model.parameters()))
        return evaluation

    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DefaultAllGather, "__call__", counting)
        patched.setattr(torch, "compile", partial(compiled, backend=backend, fullgraph=True))
        patched.setattr(Trainer, "evaluate", watched)
        return {**on_ranks(mode, options), "calls": calls}


@pytest.mark.slow
def test_two_by_two_ranks_are_two_that_accumulate(four: Ranks, two: Ranks) -> None:
    """A replica sums its half as two ranks sum a micro-batch: equal bit for bit, but for the norm.

    Its squares are summed over the ranks in two orders.
    """
    grid = of(four, SHARDED, "gpt", batch=16, layout={"replicas": 2})
    (window, _) = of(two, SHARDED, "gpt", batch=8, accumulate=2)
    for own in grid:
        assert own["results"] == grid[0]["results"]
        assert_same_but(own["states"], window["states"], "progress")
    for step, other in zip(grid[0]["results"], window["results"], strict=True):
        assert step == pytest.approx(other, rel=2**-22)


GATHERED = [  # How often in a step: two blocks and the rest of the model, forward and backward.
    ({"reshard_after_forward": False}, 3), ({"blocks_together": 2}, 4), ({"cpu_offload": True}, 6),
]  # fmt: skip


@pytest.mark.parametrize(
    "mode", ["amp", pytest.param("mixed", marks=[pytest.mark.slow, two_formats])]
)
def test_gathering_otherwise_changes_no_number(two: Ranks, mode: str) -> None:
    plain = of(two, mode, "gpt")
    calls = [own.pop("calls") for own in plain]
    assert [own["gathered in steps"] for own in calls] == [2 * 6] * 2
    for layout, often in GATHERED:
        other = of(two, mode, "gpt", layout=layout)
        assert [own.pop("calls")["gathered in steps"] for own in other] == [2 * often] * 2
        assert differing(plain, other) == [], layout


def test_outputs_of_a_model_whose_parts_are_on_the_host_come_there() -> None:
    """Of a GPU that torch only pretends to have."""
    with FakeTensorMode():
        outputs = {"logits": torch.empty(2, device="cuda"), "kept": (torch.empty(3), 1)}
        moved = sharding._to_host(torch.nn.Identity(), None, outputs)
    assert moved["logits"].device == torch.device("cpu")
    assert moved["kept"][0] is outputs["kept"][0]


@pytest.mark.slow
def test_a_block_is_compiled_whole_and_alike_ones_once(two: Ranks) -> None:
    """For training, for validation, and for its last batch of another size."""
    options = {"whole": True, "layout": {"reshard_after_forward": False}}
    plain, compiled = (of(two, "amp", "gpt", compile=c, **options) for c in (False, True))
    assert [own.pop("calls")["graphs"] for own in compiled] == [3, 3]
    assert [own.pop("calls")["graphs"] for own in plain] == [0, 0]
    assert differing(plain, compiled) == []


def test_a_resumed_run_may_gather_otherwise() -> None:
    then = {"distributed.replicas": 1, "distributed.cpu_offload": False}
    then |= {"distributed.reshard_after_forward": True, "distributed.blocks_together": 1}
    now = {"distributed.replicas": 2, "distributed.cpu_offload": True}
    now |= {"distributed.reshard_after_forward": False, "distributed.blocks_together": 3}
    assert compare(then, now) == (["distributed.replicas=2 (was 1)"], [])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"replicas": 0}, "distributed.replicas=0: must be a whole number >= 1"),
    ({"blocks_together": True}, "distributed.blocks_together=True: must be a whole number >= 1"),
    ({"tensor": 2}, "distributed.tensor=2: ranks divide the layers that distributed.plan names, and it names 0; give both or none"),
    ({"plan": {"*": "rowwise"}}, "distributed.tensor=1: ranks divide the layers that distributed.plan names, and it names 1; give both or none"),
    ({"replicas": 4}, "distributed.replicas=4: 6 ranks are no multiple of replicas x tensor (1); choose others"),
    ({"replicas": 2, "tensor": 6, "plan": {"*": "colwise"}}, "distributed.replicas=2: 6 ranks are no multiple of replicas x tensor (6); choose others"),
    ({"replicas": 6}, "distributed.replicas=6: of 6 ranks each replica would have 1, and none to share its weights with; choose fewer replicas"),
]  # fmt: skip


def test_ranks_fill_a_grid_with_tensor_innermost_and_one_that_cannot_be_is_refused() -> None:
    assert Layout().shape(6) == (1, 6, 1)
    assert Layout(replicas=2, tensor=3, plan={"*": "colwise"}).shape(12) == (2, 2, 3)
    for options, line in REFUSED:
        assert refused(ConfigError, lambda given=options: Layout(**given).shape(6)) == line


# Ranks that do not all use the same blocks.


class Chain(nn.Module):
    """Runs some of its three blocks, in any order, the first perhaps on inputs without a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(2, 2), nn.ModuleList(nn.Linear(2, 2) for _ in "012")

    def forward(self, inputs: Tensor, turns: list[int], graph: bool) -> Tensor:
        hidden = self.first(inputs) if graph else inputs
        for turn in turns:
            hidden = self.blocks[turn](hidden)
        return hidden


class Other(Comm):
    """Knows what another rank has sent."""

    sent: Any = ()

    def max_of(self, numbers: Any) -> list[int]:
        pairs = list(zip(numbers, self.sent or numbers, strict=True))
        self.sent = numbers
        return [max(pair) for pair in pairs]


def used_by(turns: list[int], graph: bool = True) -> tuple[Usage, list[str]]:
    """A rank that runs these blocks, and in which order they are gathered, forth and back."""
    model, order = Chain(), list[str]()
    usage = Usage(model, [*model.blocks])
    for turn, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda _, __, t=turn: order.append(f"{t}"))
        block.register_forward_hook(
            lambda _, __, output, t=turn: (
                output.register_hook(lambda _: order.append(f"back {t}")) and None
            )
        )
    model(torch.ones(1, 2), turns, graph).sum().backward()
    return usage, order


@adds_zeros
@pytest.mark.parametrize("turns", [[0, 1, 2], [1], [0, 2], [2], []])
def test_a_block_that_is_passed_by_takes_its_turn(turns: list[int]) -> None:
    usage, order = used_by(turns)
    assert order == ["0", "1", "2", "back 2", "back 1", "back 0"]
    usage.agree(comm := Other())
    used_by([0, 1, 2])[0].agree(comm)
    assert usage._used == {"first.weight", "first.bias"} | {
        f"blocks.{turn}.{name}" for turn in turns for name in ("weight", "bias")
    }


@adds_zeros
@pytest.mark.parametrize(
    ("one", "other", "line"),
    [(([0, 1, 2],), ([1, 0, 2],), "the ranks run the model's blocks in different orders; run them "
      "in the order in which the model lists them"),
     (([0, 1], False), ([0, 1], True), "one rank passes blocks.0 by, whose inputs have no "
      "gradients on another; call it on all ranks")],
)  # fmt: skip
def test_ranks_whose_backward_passes_would_not_fit_are_refused(
    one: Any, other: Any, line: str
) -> None:
    comm = Other()
    used_by(*one)[0].agree(comm)
    said = f"trainer.parallel=fsdp: {line}, or use trainer.parallel=ddp"
    assert refused(ConfigError, used_by(*other)[0].agree, comm) == said


def test_an_older_torch_that_adds_no_zeros_is_refused(monkeypatch: Patch) -> None:
    monkeypatch.setattr(unused, "ADDS_ZEROS", False)
    comm = Other()
    usage, order = used_by([0, 2])
    assert order == ["0", "2", "back 2", "back 0"]
    used_by([2, 1])[0].drop_unused(comm)
    assert refused(ConfigError, usage.drop_unused, comm) == (
        "trainer.parallel=fsdp: blocks.1.weight was not used on this rank: needs torch 2.15, which "
        f"adds zeros for it, and this is {torch.__version__}; use trainer.parallel=ddp"
    )
