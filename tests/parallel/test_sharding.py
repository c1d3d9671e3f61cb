"""Ranks that divide the weights (FSDP) take the steps of ranks that each have all of them.

Without clipping and accumulation both add the same two fp32 numbers for each gradient, so all is
equal bit for bit.
"""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from rank_training import (
    CPU,
    assert_same,
    assert_same_but,
    bad_input,
    on_ranks,
    parts,
    setup,
    whole_of,
)
from ranks import Ranks
from torch import Tensor, nn

from mpframe import Precision
from mpframe.core.comm import SINGLE_PROCESS, Comm, is_sharded, part_of
from mpframe.core.errors import ConfigError, MpframeError, UserCodeError
from mpframe.core.objective import StepOutput
from mpframe.parallel.launch import init_comm
from mpframe.run.trainer import shard
from mpframe.training.trainer import Trainer


def ddp_and_fsdp(ranks: Ranks, mode: str, options: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """What the same training leaves on each rank, with whole weights and with divided ones."""
    given = {"name": "mlp", "steps": 3, "clip_norm": None, **options}
    return [ranks(on_ranks, mode, {**given, "fsdp": fsdp}) for fsdp in (False, True)]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("mlp", "amp"),
        ("gpt", "mixed"),
        ("tied", "fp32"),
        pytest.param("resnet18", "mixed", marks=SLOW),
        pytest.param("gpt", "amp", marks=SLOW),
    ],
)
def test_divided_weights_take_the_steps_of_whole_ones(two: Ranks, name: str, mode: str) -> None:
    """Weights, averages, optimizer state, buffers, loss scale, losses, and what is validated."""
    options = {"name": name, "sync": True, "steps": 2}
    (whole, _), (first, second) = ddp_and_fsdp(two, mode, options)
    norms = [[step.pop("grad_norm") for step in own["results"]] for own in (whole, first, second)]
    assert_same_but([whole], [first], "weights")  # Those of ddp are stored in half.
    assert first["results"] == second["results"]
    assert norms[1] == norms[2]
    # Of n values: sums of n squares in fp32 in two orders, halved by the root.
    assert norms[0] == pytest.approx(norms[1], rel=2**-13)


@pytest.mark.slow
def test_four_ranks_divide_five_rows(four: Ranks) -> None:
    """The last rank has none of them. After a step of SGD all is that of ddp.

    A gradient is a sum of 4 fp32 numbers, added in whatever order: see the bound below.
    """
    options = {"steps": 1, "optimizer": torch.optim.SGD}
    (whole, *_), (first, *others) = ddp_and_fsdp(four, "fp32", options)
    assert all(own["results"] == first["results"] for own in others)
    assert_near(first, whole)


def assert_near(first: dict[str, Any], whole: dict[str, Any]) -> None:
    """Steps of SGD that add 2 or 4 fp32 numbers for a gradient in another order.

    Its two values differ by less than 3 units of 2^-24 of the largest addend. That is one of 2^-20
    of the gradients' norm while no addend is 5 times as large; plain SGD moves a weight by less
    than lr times this.
    """
    for own, other in zip(first["results"], whole["results"], strict=True):
        assert own == pytest.approx(other, rel=2**-11)
    begin, last = (whole["states"][step]["weights"] for step in (0, -1))
    for name, weight in first["states"][-1]["weights"].items():
        assert torch.allclose(weight, last[name], rtol=0, atol=1e-2 * 2**-12), name
    assert not torch.equal(begin["4.weight"], last["4.weight"])


def bad_weight(trainer: Trainer, batches: Any) -> None:
    """The gradient of the last layer's weight is nan on this rank, before the ranks add theirs."""
    last = list(trainer.model.modules())[-1]

    def spoil(module: nn.Module, inputs: Any) -> None:
        handle.remove()
        weight: Any = module.weight  # As it is gathered: the same tensor in each step.
        once = weight.register_hook(lambda own: (once.remove(), own * torch.nan)[1])

    handle = last.register_forward_pre_hook(spoil)


def bad_sum(trainer: Trainer, batches: Any) -> None:
    """inf on this rank alone, in what the ranks have already summed."""
    sharding: Any = trainer.comm.sharding
    check = sharding.refuse_unused

    def spoilt() -> None:
        check()
        part_of(next(trainer.model.parameters()).grad)[0] = torch.inf  # type: ignore[arg-type]
        sharding.refuse_unused = check

    sharding.refuse_unused = spoilt


@pytest.mark.parametrize("mode", ["fp32", "mixed"])
def test_what_overflows_on_one_rank_is_skipped_on_all(two: Ranks, mode: str) -> None:
    """Before the sum, or only in it; nothing changes but the scale, and the ranks agree."""
    faults = {1: bad_input, 2: bad_weight, 3: bad_sum}
    options = {"name": "mlp", "fsdp": True, "clip_norm": None, "faults": faults, "steps": 4}
    first, second = two(on_ranks, mode, options)
    assert str(first["results"]) == str(second["results"])  # nan is not equal to itself.
    skipped = [own["skipped"] for own in first["results"]]
    assert skipped == [step in faults for step in range(len(skipped))]
    for step in faults:
        before, after = ([first["states"][n]] for n in (step, step + 1))
        assert_same_but(before, after, "progress", "scaler")
    del faults[3]  # It has no place in ddp, whose sums are other tensors.
    (whole, _), (sharded, _) = ddp_and_fsdp(two, mode, {"faults": faults})
    assert_same(sharded["states"], whole["states"])


def test_a_window_drops_a_micro_batch_on_all_ranks_and_clips_by_the_norm_of_all_parts(
    two: Ranks,
) -> None:
    """ddp adds the micro-batches first and the ranks then; here it is the other way round."""
    options: dict[str, Any] = {"faults": {1: bad_input}, "accumulate": 2, "clip_norm": 0.5}
    (whole, _), (first, second) = ddp_and_fsdp(
        two, "amp", {**options, "optimizer": torch.optim.SGD}
    )
    assert [own["dropped"] for own in first["results"]] == [0, 1, 0]
    assert first["results"] == second["results"]
    assert_near(first, whole)
    options = {"name": "mlp", "fsdp": True, "faults": {1: bad_sum}, "accumulate": 2, "steps": 3}
    first, second = two(on_ranks, "amp", options)
    assert first["results"] == second["results"]
    told = [(own["skipped"], own["dropped"]) for own in first["results"]]
    assert told == [(False, 0), (False, 1), (False, 0)]


def test_each_value_of_a_part_is_clipped_as_it_is_in_the_whole(two: Ranks) -> None:
    options = {"clip_value": 2.0**-8, "steps": 2, "optimizer": torch.optim.SGD}
    (whole, _), (sharded, _) = ddp_and_fsdp(two, "mixed", options)
    assert_same(sharded["states"], whole["states"])
    _, (free, _) = ddp_and_fsdp(two, "mixed", {**options, "clip_value": None})
    assert not torch.equal(*(own["states"][-1]["weights"]["4.weight"] for own in (sharded, free)))


def cleared(mode: str, set_to_none: bool) -> tuple[float, float]:
    """The sum of all gradients' magnitudes before and after `zero_grad`; no step comes between."""
    with init_comm(None, lambda: CPU, 120) as comm:
        trainer, train, _ = setup(mode, comm, {"name": "mlp", "fsdp": True})
        inputs, targets = next(train.epoch(0))
        with trainer.precision.cast():
            loss = nn.functional.cross_entropy(trainer.model(inputs), targets)
        loss.backward()

        def size() -> float:
            gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
            return float(sum(whole_of(gradient).abs().sum() for gradient in gradients))

        before = size()
        trainer.optimizer.zero_grad(set_to_none)  # type: ignore[call-arg]
        return before, size()


@pytest.mark.parametrize(("mode", "set_to_none"), [("fp32", True), ("amp", False)])
def test_gradients_of_parts_are_cleared(two: Ranks, mode: str, set_to_none: bool) -> None:
    for before, after in two(cleared, mode, set_to_none):
        assert before > 0
        assert after == 0


def kept(mode: str) -> dict[str, Any]:
    """Two steps and a validation: whether parts stay where they are, and what is gathered."""
    gathered_in: dict[str, torch.dtype] = {}
    with init_comm(None, lambda: CPU, 120) as comm:
        trainer, train, _ = setup(mode, comm, {"name": "gpt", "fsdp": True, "steps": 2})
        block: Any = trainer.model.get_submodule("blocks.0")
        weights, whole_weight = _divided_alone(comm)
        assert whole_weight() is None
        assert all(map(is_sharded, weights))
        for name in ("norm1.weight", "attention.qkv.weight"):
            owner = block.get_submodule(name.rpartition(".")[0])
            owner.register_forward_hook(
                lambda own, *_, name=name: gathered_in.update({name: own.weight.dtype})
            )

        def places() -> list[tuple[int, int]]:
            named = trainer.model.parameters()
            assert all(map(is_sharded, named))
            parts = [(own, trainer.optimizer.master_of(own)) for own in trainer.model.parameters()]
            assert all(part_of(own).data_ptr() == master.data_ptr() for own, master in parts)
            return [(master.data_ptr(), len(master)) for _, master in parts]

        before, first = places(), part_of(next(trainer.model.parameters())).clone()
        trainer.fit(train)
        trainer.evaluate(train)
        assert places() == before
        assert not torch.equal(part_of(next(trainer.model.parameters())), first)
        held = sum(own.numel() for own in trainer.optimizer.optimizer.param_groups[0]["params"])
        formats = {own.dtype for own in trainer.optimizer.optimizer.param_groups[0]["params"]}
    return {"gathered": gathered_in, "held": held, "formats": formats}


def _divided_alone(comm: Comm) -> tuple[list[Tensor], Any]:
    """The weights of a layer after it was divided, and where the whole one was."""
    model = nn.Linear(4, 4)
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), weakref.ref(model.weight)
    comm = copy.copy(comm)  # It knows one model.
    shard(model, {"": optimizer}, Precision("amp"), comm, CPU)
    gc.collect()
    return list(model.parameters()), before


@pytest.mark.parametrize("mode", ["amp", "mixed"])
def test_a_rank_holds_half_of_the_weights_in_fp32(two: Ranks, mode: str) -> None:
    """In the same memory all the time. Blocks are gathered as one process stores them."""
    ends = two(kept, mode)
    total = sum(own.numel() for own in parts("gpt")[0].parameters())
    assert [end["held"] for end in ends] == [total / 2, total / 2]
    half = torch.float16 if mode == "mixed" else torch.float32
    for end in ends:
        assert end["formats"] == {torch.float32}
        assert end["gathered"] == {"norm1.weight": torch.float32, "attention.qkv.weight": half}


class Parts(nn.Module):
    """Of its two weights the forward pass uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Parameter(torch.ones(8, 4)), nn.Parameter(torch.ones(2, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.used


def whole(model: nn.Module, batch: Any) -> Tensor:
    outputs: Tensor = model(batch).sum()
    return outputs


def huge() -> nn.Module:
    layer = nn.Linear(8, 4)
    nn.init.constant_(layer.weight, 1e5)
    return layer


REFUSED: dict[str, tuple[Any, Any, Any]] = {
    "a part of the model": (
        lambda: nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4)),
        lambda model, batch: model[0](batch).sum(),
        "trainer.parallel=fsdp: 1.weight was not used in this step; use trainer.parallel=ddp, or "
        "freeze it",
    ),
    "a part of a block": (
        Parts,
        whole,
        "trainer.parallel=fsdp: a weight of the model was not used in this step; use "
        "trainer.parallel=ddp, or freeze it",
    ),
    "a weight alone": (
        Parts,
        lambda model, batch: (batch @ model.used).sum(),
        "trainer.parallel=fsdp: the objective does not call the model, but a part of it; use "
        "trainer.parallel=ddp",
    ),
    "float64": (
        lambda: nn.Linear(8, 4).double(),
        whole,
        "trainer.parallel=fsdp: weight is float64 [4, 8], and the ranks divide the rows of float32 "
        "weights; use trainer.parallel=ddp",
    ),
    "sparse": (
        lambda: nn.Sequential(nn.Embedding(8, 4, sparse=True)),
        whole,
        "trainer.parallel=fsdp: the gradient of 0 is sparse, and ranks sum dense ones; make the "
        "layer with sparse=False",
    ),
    "beyond the range": (
        huge,
        whole,
        "trainer.parallel=fsdp: weight lies beyond the range of float16, in which it is gathered; "
        "use dtype.half=bfloat16, or ops.modules=...:fp32",
    ),
}


def refusals() -> list[str]:
    """What this rank says to trainings that it does not take."""
    said = []
    with init_comm(None, lambda: CPU, 120) as comm:
        for make, objective, _ in REFUSED.values():
            try:
                _step_once(make(), objective, comm)
            except UserCodeError as error:
                with pytest.raises(MpframeError) as refused:
                    comm.refuse_lost(error.__cause__)
                said.append(str(refused.value))
            except MpframeError as error:
                said.append(str(error))
    return said


def _step_once(model: nn.Module, objective: Any, comm: Comm) -> None:
    precision, optimizer = Precision("mixed"), torch.optim.SGD(model.parameters(), lr=0.1)
    shard(model, {"": optimizer}, precision, comm, CPU)
    _, masters = precision.prepare(model, optimizer)
    trainer = Trainer(
        model,
        masters,
        lambda model, batch: StepOutput(objective(model, batch)),
        precision,
        comm=comm,
    )
    trainer.train_step(torch.ones(2, 8))


def test_what_cannot_be_divided_is_refused(two: Ranks) -> None:
    said = [text for *_, text in REFUSED.values()]
    assert two(refusals) == [said, said]


class Own(torch.optim.SGD):
    """May do anything in its step."""


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, Own])
def test_an_optimizer_that_looks_at_whole_weights_is_refused(kind: Any) -> None:
    model = nn.Linear(2, 2)
    said = f"^optimizer={kind.__name__}: may look at a whole weight, of which a rank has a part "
    with pytest.raises(ConfigError, match=said + "with trainer.parallel=fsdp; use trainer"):
        shard(model, {"": kind(model.parameters(), lr=0.1)}, Precision(), SINGLE_PROCESS, CPU)
