"""Ranks that train together take the step that one process takes on all their samples.

Two ranks with half a batch each equal one process that accumulates the two halves: bit for bit,
because both add two fp32 numbers and halve the sum.
"""

from typing import Any

import pytest
import torch
from ranked import CPU, assert_same, assert_same_but, bad_input, on_ranks, trained
from ranks import Ranks
from torch import Tensor, nn

from mpframe import MasterWeights
from mpframe.core.comm import SINGLE_PROCESS
from mpframe.core.objective import supervised
from mpframe.parallel import data_parallel
from mpframe.parallel.data_parallel import DataParallel
from mpframe.parallel.launch import init_comm
from mpframe.training.trainer import Trainer


def fit_and_halves(two: Ranks, mode: str, options: dict[str, Any]) -> Any:
    """What two ranks leave, which is what one process leaves that accumulates their halves."""
    first, second = two(on_ranks, mode, options)
    halves = {**options, "batch": options.get("batch", 16) // 2, "accumulate": 2}
    alone = trained(mode, SINGLE_PROCESS, halves)
    # One process counts twice as many batches.
    for other in (second, alone):
        assert_same_but(first["states"], other["states"], "progress")
    return first, second, alone


@pytest.mark.parametrize(
    ("mode", "reduce"),
    [("fp32", "in_backward"), ("amp", "after_backward"), ("mixed", "in_backward"),
     ("split", "after_backward")],
)  # fmt: skip
def test_two_ranks_equal_one_process_that_accumulates_their_halves(
    two: Ranks, mode: str, reduce: str
) -> None:
    """Also where a layer is used on one rank alone, or on none: it is left as it was."""
    first, second, alone = fit_and_halves(two, mode, {"reduce": reduce})
    assert_same(first, second)
    assert_same(first["weights"], alone["weights"])
    assert_same_but(first["results"], alone["results"], "dropped")
    assert first["metrics"] == alone["metrics"]
    # At most 67 fp32 losses are added in another order.
    assert first["loss"] == pytest.approx(alone["loss"], rel=67 * 2**-24)
    begin, end = (first["states"][step]["weights"] for step in (0, -1))
    assert torch.equal(begin["never.weight"], end["never.weight"])
    assert not torch.equal(begin["sometimes.weight"], end["sometimes.weight"])


OF_NOW = {
    "every": {"format": "e2m1", "per": "row"},
    "forward": {role: {"per": "block", "block": 4, "scale": "e8m0"} for role in ("x", "w")},
    "dw": {"x": {"per": "tensor"}, "dy": {"per": "tensor"}},
}
DELAYED = {"every": {"format": "e4m3fn", "history": 2}, "dx": {"dy": {"format": "e5m2"}}}


@pytest.mark.parametrize("recipe", [OF_NOW, DELAYED], ids=["now", "delayed"])
def test_products_below_16_bits_on_two_ranks(two: Ranks, recipe: dict[str, Any]) -> None:
    """Each micro-batch is quantised by itself, but delayed scales are of the samples of all ranks:
    also of a layer that the second rank uses first, alone."""
    first, _, _ = fit_and_halves(two, "mixed", {"recipe": recipe, "batch": 32})
    names = ("first.weight", "sometimes.weight", "last.weight") if recipe is DELAYED else ()
    histories = first["states"][-1]["products"]["amax"]
    assert set(histories) == {f"{name} {role}" for name in names for role in ("x", "w", "dy")}


def bad_gradient(trainer: Trainer, batches: Any) -> None:
    weight = trainer.model.get_parameter("last.weight")
    handle = weight.register_hook(lambda own: (handle.remove(), own * torch.nan)[1])


def bad_sum(trainer: Trainer, batches: Any) -> None:
    """inf on this rank alone, in what the ranks have already summed."""
    patch, sum_, receive = pytest.MonkeyPatch(), trainer.comm.sum_, DataParallel._receive

    def spoilt(tensors: Any) -> None:
        sum_(tensors)
        tensors[0].view(-1)[0] = torch.inf
        patch.undo()

    def spoilt_early(ranks: DataParallel, reduction: Any) -> Tensor:
        means = receive(ranks, reduction)
        means[0] = torch.inf
        patch.undo()
        return means

    patch.setattr(trainer.comm, "sum_", spoilt)
    patch.setattr(DataParallel, "_receive", spoilt_early)


@pytest.mark.parametrize(
    ("mode", "reduce"),
    [("fp32", "in_backward"), ("amp", "after_backward"), ("mixed", "in_backward")],
)
def test_what_overflows_on_one_rank_is_skipped_on_all(two: Ranks, mode: str, reduce: str) -> None:
    faults = {1: bad_input, 2: bad_gradient, 3: bad_sum}
    first, second = two(on_ranks, mode, {"faults": faults, "norm": True, "reduce": reduce})
    assert_same(first["states"], second["states"])
    skipped = [own["skipped"] for own in first["results"]]
    assert skipped == [own["skipped"] for own in second["results"]]
    assert skipped == [step in faults for step in range(len(skipped))]
    for step in faults:  # Buffers, masters, the optimizer's state and the average, too.
        before, after = ([first["states"][n]] for n in (step, step + 1))
        assert_same_but(before, after, "progress", "scaler")


def test_a_micro_batch_that_overflows_on_one_rank_is_dropped_on_all(two: Ranks) -> None:
    options = {"faults": {1: bad_input}, "norm": True, "accumulate": 2, "batch": 8, "steps": 3}
    first, second = two(on_ranks, "mixed", options)
    assert_same(first, second)
    told = [(own["skipped"], own["dropped"]) for own in first["results"]]
    assert told == [(False, 0), (False, 1), (False, 0)]


FAULTS = {1: bad_input, 3: bad_gradient}


@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        ("fp32", {"faults": FAULTS, "whole": True}),
        ("mixed", {"accumulate": 2, "whole": True}),  # Averaged after the last backward pass.
        ("amp", {"faults": FAULTS, "sync": True}),  # One rank may use a layer, or none.
        ("split", {"faults": FAULTS, "sync": True, "large": 100}),
    ],
)
def test_averaged_in_the_backward_pass_it_is_the_same_step(
    two: Ranks, mode: str, changes: dict[str, Any]
) -> None:
    """Weights, masters, optimizer and scaler, which is told what a rank's gradients alone reach."""
    options = {"norm": True, **changes}
    first, second = two(on_ranks, mode, {**options, "reduce": "in_backward"})
    after, _ = two(on_ranks, mode, {**options, "reduce": "after_backward"})
    assert_same(first["states"], second["states"])
    assert_same(first["states"], after["states"])
    assert_same(first["weights"], after["weights"])


def sent_before_the_first_layer(large: int) -> int:
    """How many pieces were under way when the backward pass came to the first of three layers."""
    with init_comm(None, lambda: CPU, 120) as comm, pytest.MonkeyPatch.context() as patched:
        patched.setattr(data_parallel, "_BUCKET_MB", large / 2**20)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1))
        trainer = Trainer(model, optimizer, supervised(nn.MSELoss()), comm=comm)
        started, start, counts = [], comm.start, list[int]()
        patched.setattr(comm, "start", lambda *a, **k: (started.append(1), start(*a, **k))[1])

        def look(_: Any, __: Any, output: Tensor) -> None:
            output.register_hook(lambda gradient: counts.append(len(started)))

        model[0].register_forward_hook(look)
        trainer.train_step((torch.ones(4, 4), torch.zeros(4, 4)))
        return counts[0]


@pytest.mark.parametrize(("large", "pieces_sent"), [(1, 5), (2**22, 1)])
def test_gradients_are_sent_while_the_backward_pass_runs(
    two: Ranks, large: int, pieces_sent: int
) -> None:
    """Weight and bias of the two later layers, each alone; or all at the end, as one piece.

    Before them goes the count, by which the ranks weigh.
    """
    assert two(sent_before_the_first_layer, large) == [pieces_sent, pieces_sent]
