"""Ranks that divide the weights (FSDP) take the steps of ranks that each have all of them.

Without clipping and accumulation both add the same two fp32 numbers for each gradient, so all is
equal bit for bit.
"""

import copy
from functools import partial
from typing import Any

import pytest
import ranked
import torch
from fixtures import refused
from ranked import CPU, SHARDED, assert_same_but, in_group, on_ranks, setup, two_formats, whole_of
from ranks import Ranks
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Muon

from mpframe import Precision
from mpframe.config.command_line import check_config, compose_named, without_hydra
from mpframe.config.schema import Config
from mpframe.core.comm import Comm, is_sharded, part_of
from mpframe.core.errors import ConfigError
from mpframe.core.objective import StepOutput
from mpframe.core.tree import map_tensors
from mpframe.precision.lowbit.handler import watch_products
from mpframe.run.sharding import _step_parts as refuse_whole_weights
from mpframe.run.sharding import refuse_beside_sharding, shard
from mpframe.training.callbacks.freeze import set_requires_grad
from mpframe.training.callbacks.step_hooks import LARC, Penalty
from mpframe.training.parallel.layout import Layout
from mpframe.training.probe import probe_amax
from mpframe.training.trainer import Trainer


def reload(trainer: Trainer, step: int) -> None:
    """Go on from the whole state, as one process would have saved it."""
    if step == 2:
        state = map_tensors(whole_of, trainer.optimizer.state_dict())
        trainer.optimizer.load_state_dict(copy.deepcopy(state))


def penalise(trainer: Trainer, step: int) -> None:
    if step == 0:
        Penalty(lambda weight: weight.amax(0).sum(), 0.5, ["*bias"]).setup(trainer, Any)


LOW_BITS = {
    "every": {"format": "e2m1", "per": "row"},
    "forward": {"w": {"per": "block", "block": 4, "scale": "e8m0"}},
    "dx": {"dy": {"rounding": "stochastic"}},
}


def require_names(trainer: Trainer, _: int) -> None:
    """A watch is told the name of every weight, also of a gathered one."""

    def watch(weight: str, product: str, operand: str, row: Tensor) -> None:
        assert weight.endswith("weight"), (product, operand)

    watch_products(trainer.precision.op_handlers, watch)


def freeze_for_a_step(trainer: Trainer, step: int) -> None:
    """From the start, and later, when they have a state: a block, and one with others after it."""
    frozen = [own for name, own in trainer.model.named_parameters() if name.startswith(("1.", "4"))]
    if step < 4:
        set_requires_grad(trainer.optimizer, frozen, requires_grad=step not in (0, 2))


MUON = {"matrices": Muon, "rest": AdamW}
STEPS = [
    pytest.param("mlp", "amp", {"sync": True, "clip_value": 2.0**-8}, id="mlp"),
    pytest.param("gpt", "mixed", {}, marks=two_formats, id="gpt"),
    pytest.param("tied", "fp32", {}, id="tied"),
    pytest.param("resnet18", SHARDED, {"sync": True}, marks=pytest.mark.slow, id="resnet18"),
    # Also a matrix of a single row, of which the second rank has none, and one of five rows.
    pytest.param("mlp", "amp", {"optimizers": {"": Adafactor}, "before": reload}, id="matrix"),
    pytest.param("mlp", "amp", {"optimizers": MUON, "before": reload}, id="matrix of some"),
    pytest.param("mlp", SHARDED, {"before": penalise}, id="penalty"),
    pytest.param(
        "tied", "mixed", {"steps": 5, "before": freeze_for_a_step}, marks=two_formats, id="frozen"
    ),
    # On some ranks a layer counts as zero.
    pytest.param("net", "mixed", {"steps": 6}, marks=ranked.adds_zeros, id="unused"),
    # Blocks of the whole weight have their scales, and it has its name.
    pytest.param("gpt", SHARDED, {"recipe": LOW_BITS, "before": require_names}, id="products"),
]


@pytest.mark.parametrize(("name", "mode", "options"), STEPS)
def test_divided_weights_take_the_steps_of_whole_ones(
    two: Ranks, name: str, mode: str, options: Any
) -> None:
    """Weights, averages, optimizer state, buffers, loss scale, losses, and what is validated."""
    given = {"name": name, "steps": 4, "clip_norm": None, **options}
    (whole, _), (first, second) = (two(on_ranks, mode, {**given, "fsdp": f}) for f in (0, 1))
    norms = [[step.pop("grad_norm") for step in own["results"]] for own in (whole, first, second)]
    assert_same_but([whole], [first], "weights")  # Those of ddp are stored in half.
    assert first["results"] == second["results"]
    assert norms[1] == norms[2]
    # Of n values: sums of n squares in fp32 in two orders, halved by the root.
    assert norms[0] == pytest.approx(norms[1], rel=2**-13)


def scale_gradients(trainer: Trainer, step: int) -> None:
    if step == 0:
        LARC(eta=0.01, mode="scale", without=["4.*"]).setup(trainer, Any)


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


def test_a_window_drops_a_micro_batch_and_clips_by_the_norm_of_all_parts(two: Ranks) -> None:
    """ddp adds the micro-batches first and the ranks then; here it is the other way round.

    Two values of a gradient, sums of 4 fp32 numbers, differ by less than 3 units of 2^-24 of the
    largest addend. That is one of 2^-20 of the gradients' norm while no addend is 5 times as large;
    plain SGD moves a weight by less than lr times this.
    """
    options = {"name": "mlp", "steps": 3, "accumulate": 2, "clip_norm": 0.5, "optimizer": SGD}
    options["faults"] = {1: ranked.bad_input}
    (whole, _), (first, second) = (two(on_ranks, "amp", {**options, "fsdp": f}) for f in (0, 1))
    assert [own["dropped"] for own in first["results"]] == [0, 1, 0]
    assert first["results"] == second["results"]
    for own, other in zip(first["results"], whole["results"], strict=True):
        assert own == pytest.approx(other, rel=2**-11)
    last = whole["states"][-1]["weights"]
    for name, weight in first["states"][-1]["weights"].items():
        assert torch.allclose(weight, last[name], rtol=0, atol=1e-2 * 2**-12), name
    assert not torch.equal(whole["states"][0]["weights"]["4.weight"], last["4.weight"])


def kept(comm: Comm) -> dict[str, Any]:
    """Two steps and a validation: parts stay where they are; what is gathered, and held.

    Their gradients can be cleared.
    """
    gathered_in: dict[str, torch.dtype] = {}
    trainer, train, _ = setup("mixed", comm, {"name": "gpt", "fsdp": True, "steps": 2})
    block: Any = trainer.model.get_submodule("blocks.0")
    for name in ("norm1.weight", "attention.qkv.weight"):
        owner = block.get_submodule(name.rpartition(".")[0])
        owner.register_forward_hook(
            lambda own, *_, name=name: gathered_in.update({name: own.weight.dtype})
        )

    def places() -> list[tuple[int, int]]:
        assert all(map(is_sharded, trainer.model.parameters()))
        parts = [(own, trainer.optimizer.master_of(own)) for own in trainer.model.parameters()]
        assert all(part_of(own).data_ptr() == master.data_ptr() for own, master in parts)
        return [(master.data_ptr(), len(master)) for _, master in parts]

    before, first = places(), part_of(next(trainer.model.parameters())).clone()
    trainer.fit(train)
    trainer.evaluate(train)
    assert places() == before
    assert not torch.equal(part_of(next(trainer.model.parameters())), first)
    for set_to_none in (True, False):  # Where no step has come between.
        with trainer.precision.cast():
            trainer.model(next(train.epoch(0))[0]).float().square().sum().backward()
        gradients = [own.grad for own in trainer.model.parameters()]
        assert all(whole_of(own).any() for own in gradients)
        trainer.optimizer.zero_grad(set_to_none)
        gradients = [own.grad for own in trainer.model.parameters()]
        assert not any(own is not None and whole_of(own).any() for own in gradients)
    stepped = trainer.optimizer.optimizer.param_groups[0]["params"]
    held = sum(own.numel() for own in stepped)
    return {"gathered": gathered_in, "held": held, "formats": {own.dtype for own in stepped}}


@two_formats
def test_a_rank_holds_half_of_the_weights_in_fp32(two: Ranks) -> None:
    """In the same memory all the time. Blocks are gathered as one process stores them."""
    expected = {
        "gathered": {"norm1.weight": torch.float32, "attention.qkv.weight": torch.float16},
        "held": sum(own.numel() for own in ranked.parts("gpt")[0].parameters()) / 2,
        "formats": {torch.float32},
    }
    assert two(in_group, kept) == [expected, expected]


def probed(comm: Comm, fsdp: bool) -> tuple[float, bool]:
    """What a probe finds, and whether it leaves weights and gradients as they were."""
    trainer, train, _ = setup("amp", comm, {"name": "mlp", "fsdp": fsdp})
    before = [whole_of(own.detach()).clone() for own in trainer.model.parameters()]
    batch = next(train.epoch(0))
    amax = probe_amax(trainer.model, trainer.objective, trainer.precision, batch, comm)
    after = list(trainer.model.parameters())
    same = all(map(torch.equal, before, [whole_of(own.detach()) for own in after]))
    return float(comm.max(amax)), same and all(own.grad is None for own in after)


def test_a_probe_finds_the_largest_gradient_of_any_rank(two: Ranks) -> None:
    """Before the sums, which are larger."""
    expected = two(in_group, probed, False)
    assert two(in_group, probed, True) == expected
    assert [left for _, left in expected] == [True, True]


def whole(model: Any, batch: Any) -> Any:
    return StepOutput(model(batch).sum())


def huge() -> nn.Module:
    nn.init.constant_((layer := nn.Linear(8, 4)).weight, 1e5)
    return layer


REFUSED: list[tuple[Any, Any, str]] = [
    (lambda: nn.Linear(8, 4), lambda model, batch: StepOutput((batch @ model.weight.t()).sum()),
     "the objective does not call the model, but a part of it; use trainer.parallel=ddp"),
    (lambda: nn.Linear(8, 4).double(), whole, "weight is float64 [4, 8], and the ranks divide the "
     "rows of float32 weights; use trainer.parallel=ddp"),
    (huge, whole, "weight lies beyond the range of float16, in which it is gathered; use "
     "dtype.half=bfloat16, or ops.modules=...:fp32"),
]  # fmt: skip
if SHARDED == "amp":
    REFUSED.pop()  # Weights are gathered in fp32.


def step(comm: Comm, make: Any, loss: Any) -> None:
    model, precision = make(), Precision(SHARDED)
    optimizer = SGD(model.parameters(), lr=0.1)
    shard(model, {"": optimizer}, precision, comm, CPU)
    _, masters = precision.prepare(model, optimizer)
    Trainer(model, masters, loss, precision, comm=comm).train_step(torch.ones(2, 8))


def refusals(comm: Comm) -> list[str]:
    """What this rank says to trainings that it does not take."""
    return [ranked.refusal_of(comm, partial(step, comm, make, loss)) for make, loss, _ in REFUSED]


def test_what_cannot_be_divided_is_refused(two: Ranks) -> None:
    said = [f"trainer.parallel=fsdp: {text}" for *_, text in REFUSED]
    assert two(in_group, refusals) == [said, said]


def test_an_optimizer_that_may_look_at_whole_weights_is_refused() -> None:
    own: Any = type("Own", (SGD,), {})
    weights = nn.Linear(2, 2).parameters
    for kind in (torch.optim.LBFGS, torch.optim.SparseAdam, own):
        line = refused(ConfigError, refuse_whole_weights, kind(weights(), lr=0.1))
        assert line == (
            f"optimizer={kind.__name__}: may look at several weights or at a whole one, of which a "
            "rank has a part with trainer.parallel=fsdp; if it treats each value by itself, set "
            "by_value = True in its class, else use trainer.parallel=ddp"
        )
    own.by_value = True
    refuse_whole_weights(own(weights(), lr=0.1))


def composed(*words: str) -> Config:
    own = [*words, "loss_scaling=LogMax", "trainer.parallel=fsdp"]
    return check_config(without_hydra(compose_named(own)[1]))


def test_what_needs_whole_weights_is_refused() -> None:
    refuse_beside_sharding(composed())
    refuse_beside_sharding(composed("optimizer=muon_adamw", "callbacks=[larc,freeze]"))
    refuse_beside_sharding(composed("trainer.compile=true"))
    for option, said in (
        ("trainer.channels_last=true", "FSDP takes contiguous"),
        ("trainer.reduce=after_backward", "a block's gradients are"),
        ("dtype.master_weights=false", "the parts, in fp32, are "),
    ):
        line = refused(ConfigError, refuse_beside_sharding, composed(option))
        assert line.startswith(f"{option}: does not go with trainer.parallel=fsdp ({said}")
    layers = Layout(tensor=2, plan={"head": "colwise"})
    refuse_beside_sharding(composed(), layers)
    line = refused(ConfigError, refuse_beside_sharding, composed("numerics=on"), layers)
    assert line == (
        "callbacks.ranges.every=100: does not go with distributed.tensor=2 (torch: "
        "aten.bincount.default has no sharding strategy); use numerics=off"
    )
