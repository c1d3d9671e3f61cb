"""Ranks that divide the weights, and do not all use the same ones."""

from typing import Any

import pytest
import torch
from fixtures import refused
from ranked import adds_zeros
from torch import Tensor, nn

from mpframe.core.comm import Comm
from mpframe.core.errors import ConfigError
from mpframe.parallel import unused
from mpframe.parallel.unused import Usage


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


def test_an_older_torch_that_adds_no_zeros_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unused, "ADDS_ZEROS", False)
    comm = Other()
    usage, order = used_by([0, 2])
    assert order == ["0", "2", "back 2", "back 0"]
    used_by([2, 1])[0].drop_unused(comm)
    assert refused(ConfigError, usage.drop_unused, comm) == (
        "trainer.parallel=fsdp: blocks.1.weight was not used on this rank: needs torch 2.15, which "
        f"adds zeros for it, and this is {torch.__version__}; use trainer.parallel=ddp"
    )
