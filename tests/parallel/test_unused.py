"""Ranks that divide the weights, and do not all use the same ones, or step whole matrices."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from fixtures import refused
from ranked import SHARDED, adds_zeros, assert_same_but, on_ranks, two_formats, whole_of
from ranks import Ranks
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Muon

from mpframe.core.comm import Comm
from mpframe.core.errors import ConfigError
from mpframe.core.tree import map_tensors
from mpframe.lowbit.handler import watch_products
from mpframe.parallel import unused
from mpframe.parallel.unused import Usage
from mpframe.training.callbacks.freeze import set_requires_grad
from mpframe.training.callbacks.step_hooks import LARC, Penalty
from mpframe.training.trainer import Trainer


def assert_as_ddp(ranks: Ranks, mode: str, options: dict[str, Any], *but: str) -> Any:
    """Divided weights take the steps of whole ones, bit for bit; what the first rank found."""
    given = {"clip_norm": None, **options}
    (whole, _), (first, second) = (ranks(on_ranks, mode, {**given, "fsdp": f}) for f in (0, 1))
    norms = [[step.pop("grad_norm") for step in own["results"]] for own in (whole, first, second)]
    assert_same_but([whole], [first], "weights", *but)  # Those of ddp are stored in half.
    assert first["results"] == second["results"]
    assert norms[1] == norms[2]
    assert norms[0] == pytest.approx(norms[1], rel=2**-13)
    return first


@adds_zeros
@pytest.mark.parametrize(("name", "mode"), [("skipping", "amp"), ("net", "mixed")])
def test_a_layer_that_some_ranks_do_not_use_counts_as_zero_there(
    two: Ranks, name: str, mode: str
) -> None:
    found = assert_as_ddp(two, mode, {"name": name, "steps": 6})
    before, after = found["states"][0]["weights"], found["states"][-1]["weights"]
    kept = {key for key, value in before.items() if torch.equal(value, after[key])}
    never = "never" if name == "net" else "blocks.3"
    assert kept >= {key for key in before if never in key}
    assert 0 < len(kept) < len(before)


def freeze_for_a_step(trainer: Trainer, step: int) -> None:
    frozen = [own for name, own in trainer.model.named_parameters() if name.startswith(("1.", "4"))]
    if step < 4:
        set_requires_grad(trainer.optimizer, frozen, requires_grad=step not in (0, 2))


@two_formats
def test_layers_are_frozen_and_trained_again(two: Ranks) -> None:
    """From the start, and later, when they have a state: a block, and one with others after it."""
    options = {"name": "tied", "steps": 5, "before": freeze_for_a_step}
    found = assert_as_ddp(two, "mixed", options)
    for name in ("1.weight", "4.bias"):
        values = [state["weights"][name] for state in found["states"]]
        moved = [not torch.equal(own, other) for own, other in pairwise(values)]
        assert moved[:5] == [False, True, False, True, True], name


def reload(trainer: Trainer, step: int) -> None:
    """Go on from the whole state, as one process would have saved it."""
    if step == 2:
        state = map_tensors(whole_of, trainer.optimizer.state_dict())
        trainer.optimizer.load_state_dict(copy.deepcopy(state))


@pytest.mark.parametrize("kinds", [{"": Adafactor}, {"matrices": Muon, "rest": AdamW}])
def test_a_matrix_is_whole_for_its_step(two: Ranks, kinds: Any) -> None:
    """Also one of a single row, of which the second rank has none, and one of five rows."""
    options = {"name": "mlp", "steps": 4, "optimizers": kinds, "before": reload}
    assert_as_ddp(two, "amp", options)


def penalise(trainer: Trainer, step: int) -> None:
    if step == 0:
        Penalty(lambda weight: weight.amax(0).sum(), 0.5, ["*bias"]).setup(trainer, Any)


def scale_gradients(trainer: Trainer, step: int) -> None:
    if step == 0:
        LARC(eta=0.01, mode="scale", without=["4.*"]).setup(trainer, Any)


def test_a_penalty_sees_whole_weights(two: Ranks) -> None:
    assert_as_ddp(two, SHARDED, {"name": "mlp", "steps": 3, "before": penalise})


def test_larc_knows_the_norms_of_whole_weights(two: Ranks) -> None:
    """Norms of n values, in fp32 in two orders, differ by less than n 2^-24 of themselves.

    So a step of plain SGD, eta * lr * |w| long, does as well: n <= 128, |w| < 8, 3 steps.
    """
    given = {"name": "mlp", "steps": 3, "before": scale_gradients, "optimizer": SGD}
    given |= {"clip_norm": None}
    whole, divided = (two(on_ranks, "amp", {**given, "fsdp": fsdp})[0] for fsdp in (0, 1))
    first = whole["states"][0]["weights"]
    last, other = whole["states"][-1]["weights"], divided["states"][-1]["weights"]
    for name, weight in last.items():
        assert torch.allclose(weight, other[name], rtol=0, atol=3 * 1e-4 * 8 * 2**-17), name
    moved = (last["0.weight"] - first["0.weight"]).norm() / first["0.weight"].norm()
    assert moved == pytest.approx(3e-4, rel=0.5)


LOW_BITS = {
    "every": {"format": "e2m1", "per": "row"},
    "forward": {"w": {"per": "block", "block": 4, "scale": "e8m0"}},
    "dx": {"dy": {"rounding": "stochastic"}},
}


def require_names(trainer: Trainer, _: int) -> None:
    """A watch is told the name of every weight, also of a gathered one."""

    def watch(weight: str, product: str, operand: str, row: Tensor) -> None:
        assert weight.endswith("weight"), (product, operand)

    watch_products(trainer.precision, watch)


def test_products_below_16_bits(two: Ranks) -> None:
    """Blocks of the whole weight have their scales, and it has its name."""
    options = {"name": "gpt", "steps": 3, "recipe": LOW_BITS, "before": require_names}
    assert_as_ddp(two, SHARDED, options)


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
