"""Ranks that train together take the step that one process takes on all their samples.

Two ranks with half a batch each equal one process that accumulates the two halves: bit for bit,
because both add two fp32 numbers and halve the sum. Against one process with the whole batch the
sums over samples are rounded in another order, and the bound below is derived.
"""

import copy
import math
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from mpframe import LogMax, MasterWeights, Precision
from mpframe.core.comm import SINGLE_PROCESS, Comm
from mpframe.core.errors import ConfigError, MpframeError
from mpframe.core.objective import supervised
from mpframe.data import Loader
from mpframe.data.metrics import Accuracy
from mpframe.lowbit.recipe import Recipe
from mpframe.parallel import data_parallel, process_group
from mpframe.parallel.data_parallel import DataParallel
from mpframe.parallel.launch import init_comm
from mpframe.training.callbacks.ema import AverageWeights, Ema
from mpframe.training.evaluation import Evaluator
from mpframe.training.optimizers.split_master import SplitMaster
from mpframe.training.plan import Plan
from mpframe.training.trainer import Trainer

CPU = torch.device("cpu")
MODES = ("fp32", "amp", "mixed")
STEPS = 6


class FirstOutputs:
    """A metric that cannot be merged, and that depends on the order of the samples."""

    name, higher_is_better = "first", True
    sync_on_compute = True  # as torchmetrics'

    def __init__(self) -> None:
        self.value = 0.0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        for row in outputs.float():
            self.value = self.value / 2 + float(row[0] > row[1])

    def compute(self) -> float:
        assert not self.sync_on_compute
        return self.value


class Net(nn.Module):
    """Two layers, perhaps a BatchNorm, and a layer that negative sums of the first sample use."""

    def __init__(self, norm: bool, whole: bool) -> None:
        super().__init__()
        self.whole = whole
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        if not whole:
            self.sometimes, self.never = nn.Linear(16, 16), nn.Linear(2, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.first(inputs)).relu()
        if not self.whole and self.training and inputs[0].sum() < 0:
            hidden = self.sometimes(hidden)
        return self.last(hidden)


def setup(mode: str, comm: Comm, options: dict[str, Any]) -> tuple[Trainer, Loader, Loader]:
    torch.manual_seed(0)
    split = mode == "split"  # Its masters have memory only while they are updated.
    products = Recipe.from_mapping("own", options["recipe"]) if "recipe" in options else "none"
    if split:
        precision = Precision("mixed", "bfloat16", master_weights=SplitMaster)
    else:
        precision = Precision(mode, products=products)
    model = Net(options.get("norm", False), options.get("whole", False))
    if options.get("sync"):
        comm.synchronize_batchnorm(model)
    _, optimizer = precision.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    inputs = torch.randn(67, 8, generator=torch.Generator().manual_seed(1))
    samples = TensorDataset(inputs, inputs[:, :4].argmax(1))
    plan = {"accumulate": options.get("accumulate", 1), "max_steps": options.get("steps", STEPS)}
    plan["reduce"] = options.get("reduce", "in_backward")
    ema = None if split else Ema({p: optimizer.master_of(p) for p in model.parameters()}, 0.9)
    trainer = Trainer(
        model,
        optimizer,
        supervised(nn.CrossEntropyLoss()),
        precision,
        scaler=None if mode == "fp32" else LogMax(init_scale=2.0**10),
        algorithms={} if ema is None else {"ema": AverageWeights(ema, model)},
        plan=Plan(epochs=9, clip_norm=1.0, **plan),
        evaluator=Evaluator({"accuracy": Accuracy, "first": FirstOutputs}),
        comm=comm,
    )
    train = Loader(samples, options.get("batch", 16), shuffle=True, drop_last=True, comm=comm)
    # 67 samples in batches of 16: the last one has 3, and one of 2 ranks a single one of these.
    return trainer, train, Loader(samples, 16, shuffle=False, comm=comm)


def trained(mode: str, comm: Comm, options: dict[str, Any]) -> dict[str, Any]:
    """All that a short run leaves: the states before each step and at the end, a validation."""
    trainer, train, val = setup(mode, comm, options)
    results, states, step = [], [], trainer.train_step

    def watched(*batches: Any) -> Any:
        states.append(copy.deepcopy(trainer.state_dict()))
        fault = options.get("faults", {}).get(len(results))
        if fault is not None and comm.rank == 1:
            fault(trainer, batches)
        result = step(*batches)
        dropped = None if result.dropped is None else int(result.dropped)
        results.append(
            (bool(result.skipped), dropped, float(result.grad_norm), float(result.loss))  # type: ignore[arg-type]
        )
        return result

    trainer.train_step = watched  # type: ignore[method-assign]
    trainer.fit(train)
    return {
        "states": [*states, trainer.state_dict()],
        "weights": [own.detach().clone() for own in trainer.model.parameters()],
        "results": results,
        "evaluation": trainer.evaluate(val),
    }


def on_ranks(mode: str, options: dict[str, Any]) -> dict[str, Any]:
    """`trained` as one of the ranks; tensors of `large` bytes are sent alone."""
    with init_comm(None, lambda: CPU, 120) as comm, pytest.MonkeyPatch.context() as patched:
        large = options.get("large", 2**22)
        patched.setattr(process_group, "_LARGE", large)
        patched.setattr(data_parallel, "_BUCKET_MB", large / 2**20)
        return trained(mode, comm, options)


def assert_same(first: Any, second: Any, path: str = "") -> None:
    """Bit for bit, at any depth."""
    if isinstance(first, Tensor):
        assert torch.equal(first, second), path
    elif isinstance(first, dict):
        assert first.keys() == second.keys(), path
        for key in first:
            assert_same(first[key], second[key], f"{path}/{key}")
    elif isinstance(first, list | tuple):
        assert len(first) == len(second), path
        for number, pair in enumerate(zip(first, second, strict=True)):
            assert_same(*pair, f"{path}/{number}")
    else:
        assert first == second, path


@pytest.mark.parametrize("mode", [*MODES, "split"])
@pytest.mark.parametrize("reduce", ["in_backward", "after_backward"])
def test_two_ranks_equal_one_process_that_accumulates_their_halves(
    two: Ranks, mode: str, reduce: str
) -> None:
    """Also where a layer is used on one rank alone, or on none: it is left as it was."""
    first, second = two(on_ranks, mode, {"reduce": reduce})
    alone = trained(mode, SINGLE_PROCESS, {"accumulate": 2, "batch": 8})
    assert_same(first, second)
    for own in (*first["states"], *alone["states"]):
        del own["progress"]  # It counts batches, of which one process has twice as many.
    assert_same(first["states"], alone["states"])
    assert_same(first["weights"], alone["weights"])
    assert [(s, norm, loss) for s, _, norm, loss in first["results"]] == [
        (s, norm, loss) for s, _, norm, loss in alone["results"]
    ]
    assert first["evaluation"].metrics == alone["evaluation"].metrics
    weights = [state["weights"] for state in (first["states"][0], first["states"][-1])]
    assert torch.equal(weights[0]["never.weight"], weights[1]["never.weight"])
    assert not torch.equal(weights[0]["sometimes.weight"], weights[1]["sometimes.weight"])


OF_NOW = {
    "every": {"format": "e2m1", "per": "row"},
    "forward": {role: {"per": "block", "block": 4, "scale": "e8m0"} for role in ("x", "w")},
    "dw": {"x": {"per": "tensor"}, "dy": {"per": "tensor"}},
}
DELAYED = {"every": {"format": "e4m3fn", "history": 2}, "dx": {"dy": {"format": "e5m2"}}}


@pytest.mark.parametrize("recipe", [OF_NOW, DELAYED], ids=["now", "delayed"])
def test_products_below_16_bits_on_two_ranks(two: Ranks, recipe: dict[str, Any]) -> None:
    """Each micro-batch is quantised by itself, but delayed scales are of the samples of all ranks:
    also of a layer that one rank alone uses in a step."""
    options = {"recipe": recipe, "batch": 32}  # The second rank uses that layer first, alone.
    first, second = two(on_ranks, "mixed", options)
    alone = trained("mixed", SINGLE_PROCESS, {**options, "accumulate": 2, "batch": 16})
    for own in (*first["states"], *second["states"], *alone["states"]):
        del own["progress"]
    assert_same(first["states"], second["states"])
    assert_same(first["states"], alone["states"])
    if recipe is DELAYED:
        histories = first["states"][-1]["products"]["amax"]
        names = ("first.weight", "sometimes.weight", "last.weight")
        assert set(histories) == {f"{name} {role}" for name in names for role in ("x", "w", "dy")}


def test_two_ranks_come_as_near_to_one_process_as_rounding_lets_them(two: Ranks) -> None:
    """Against the whole batch at once: one step of SGD-like size, fp32.

    A gradient here is a sum of n = 16 products. Whatever the order, two such sums differ by at most
    2 n u sum |terms| with u = 2^-24, and a sum of terms is here at most their number times the
    largest, about 16 * 4 / 16 (mean over the batch). The norm of all the gradients moves by no more
    than sqrt(count) times that, relative to a norm of about 1.
    """
    first, _ = two(on_ranks, "fp32", {"steps": 1})
    alone = trained("fp32", SINGLE_PROCESS, {"steps": 1})
    (_, _, norm, loss), (_, _, one_norm, one_loss) = first["results"][0], alone["results"][0]
    assert norm == pytest.approx(one_norm, rel=2 * 16 * 2**-24 * 4 * 212**0.5)
    assert loss == pytest.approx(one_loss, rel=2 * 16 * 2**-24)


def bad_input(trainer: Trainer, batches: Any) -> None:
    batches[-1][0][0, 0] = torch.inf


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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reduce", ["in_backward", "after_backward"])
def test_what_overflows_on_one_rank_is_skipped_on_all(two: Ranks, mode: str, reduce: str) -> None:
    faults = {1: bad_input, 2: bad_gradient, 3: bad_sum}
    options = {"faults": faults, "norm": True, "steps": 4, "reduce": reduce}
    first, second = two(on_ranks, mode, options)
    assert_same(first["states"], second["states"])
    assert_same(first["weights"], second["weights"])
    skipped = [own[0] for own in first["results"]]
    assert skipped == [own[0] for own in second["results"]] == [step in faults for step in range(7)]
    for own in first["states"]:
        del own["progress"], own["scaler"]
    for step in faults:  # Buffers, masters, the optimizer's state and the average, too.
        assert_same(first["states"][step], first["states"][step + 1], f"step {step}")


def test_a_micro_batch_that_overflows_on_one_rank_is_dropped_on_all(two: Ranks) -> None:
    options = {"faults": {1: bad_input}, "norm": True, "accumulate": 2, "batch": 8, "steps": 3}
    first, second = two(on_ranks, "mixed", options)
    assert_same(first["states"], second["states"])
    assert [own[:2] for own in first["results"]] == [(False, 0), (False, 1), (False, 0)]
    assert all(math.isfinite(norm) and math.isfinite(loss) for _, _, norm, loss in first["results"])


IN_BACKWARD = {"whole": True, "norm": True, "reduce": "in_backward"}


@pytest.mark.parametrize("mode", [*MODES, "split"])
def test_averaged_in_the_backward_pass_it_is_the_same_step(two: Ranks, mode: str) -> None:
    """Weights, masters, optimizer and scaler, which is told what a rank's gradients alone reach.

    Windows are averaged after their last backward pass. One rank may use a layer, or none.
    """
    faults = {1: bad_input, 3: bad_gradient}
    partly = {"whole": False, "faults": faults, "sync": True}
    for changes in ({"faults": faults}, {"accumulate": 2}, partly, {**partly, "large": 100}):
        options = {**IN_BACKWARD, "steps": 4, **changes}
        first, second = two(on_ranks, mode, options)
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


class Reentrant(nn.Module):
    """Two calls of one layer, each recomputed in a backward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs.requires_grad_()
        for _ in range(2):
            hidden = checkpoint(self.layer, hidden, use_reentrant=True)
        return hidden


def reentrant_step(reduce: str) -> str:
    with init_comm(None, lambda: CPU, 120) as comm:
        model = Reentrant()
        optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1))
        plan, objective = Plan(reduce=reduce), supervised(nn.MSELoss())
        trainer = Trainer(model, optimizer, objective, plan=plan, comm=comm)
        try:
            trainer.train_step((torch.ones(4, 2), torch.zeros(4, 2)))
        except MpframeError as error:
            return str(error)
        return ""


def test_a_second_gradient_in_one_backward_pass_is_refused(two: Ranks) -> None:
    said = (
        "trainer.reduce=in_backward: a weight got a second gradient in one backward pass, "
        "as by checkpoint(use_reentrant=True); use use_reentrant=False, or "
        "trainer.reduce=after_backward"
    )
    assert two(reentrant_step, "in_backward") == [said, said]
    assert two(reentrant_step, "after_backward") == ["", ""]


def sparse_step() -> str:
    with init_comm(None, lambda: CPU, 120) as comm:
        model = nn.Embedding(4, 2, sparse=True)
        optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1))
        plan, objective = Plan(reduce="in_backward"), supervised(nn.MSELoss())
        with pytest.raises(ConfigError) as refused:
            Trainer(model, optimizer, objective, plan=plan, comm=comm).train_step(
                (torch.arange(4), torch.zeros(4, 2))
            )
        return str(refused.value)


def test_a_sparse_gradient_is_refused_by_name(two: Ranks) -> None:
    said = "trainer.parallel=ddp: a gradient is sparse, and ranks sum dense ones; make the layer"
    assert all(own.startswith(said) for own in two(sparse_step))


def test_synchronized_batchnorm_is_that_of_one_process(two: Ranks) -> None:
    """Outputs, input gradients, weight gradients and running statistics, to fp32 rounding.

    Each is a sum of n = 6 * 5 values of order 1, at most n u sum |terms| from any other order of
    it; the gradient multiplies a few of these.
    """
    for shape in ((6, 3, 5), (6, 3)):
        parts = two(normalized, shape)
        whole = normalized(shape)
        for name in ("outputs", "inputs"):
            merged = torch.cat([part[name] for part in parts])
            assert torch.allclose(merged, whole[name], rtol=0, atol=30 * 30 * 2**-24), name
        for name in ("weight", "bias"):
            added = parts[0][name] + parts[1][name]
            assert torch.allclose(added, whole[name], rtol=0, atol=30 * 30 * 2**-24), name
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            assert torch.equal(parts[0][name], parts[1][name]), name
            assert torch.allclose(parts[0][name], whole[name], rtol=30 * 2**-24, atol=2**-22), name


def normalized(shape: tuple[int, ...]) -> dict[str, Tensor]:
    with init_comm(None, lambda: CPU, 120) as comm:
        random = torch.Generator().manual_seed(3)
        inputs = comm.part(torch.randn(shape, generator=random) + 2).clone().requires_grad_()
        pull = comm.part(torch.randn(shape, generator=random))
        norm = nn.BatchNorm1d(3)
        comm.synchronize_batchnorm(norm)
        outputs = norm(inputs)
        (outputs * pull).sum().backward()
    grads = {"inputs": inputs.grad, "weight": norm.weight.grad, "bias": norm.bias.grad}
    return {"outputs": outputs.detach(), **grads, **dict(norm.named_buffers())}


@pytest.mark.parametrize("mode", MODES)
def test_ranks_with_synchronized_batchnorm_stay_the_same(two: Ranks, mode: str) -> None:
    options = {"sync": True, "norm": True, "whole": True, "faults": {1: bad_input}, "steps": 3}
    first, second = two(on_ranks, mode, options)
    assert_same(first["states"], second["states"])
    assert [own[0] for own in first["results"]] == [False, True, False, False]
    # Statistics that differ in the last fp32 bit may round single half values to a neighbour.
    one = trained(mode, SINGLE_PROCESS, {"norm": True, "whole": True, "steps": 1})
    assert first["results"][0][3] == pytest.approx(one["results"][0][3], rel=2**-9)


def sums(large: int) -> list[Tensor]:
    """Where tensors of so many bytes are sent alone; one of them does not lie in rows."""
    with init_comm(None, lambda: CPU, 60) as comm, pytest.MonkeyPatch.context() as patched:
        patched.setattr(process_group, "_LARGE", large)
        own = [
            torch.full((4,), 1.0 + comm.rank),
            torch.arange(6.0).view(2, 3).t() + comm.rank,
            torch.full((2,), 0.1, dtype=torch.float64),
            torch.arange(10.0) * (comm.rank + 1),
        ]
        comm.sum_(own)
        return own


class Third(process_group.ProcessGroup):
    """The third of four ranks whose weights are divided; the second has no batch."""

    def __init__(self) -> None:
        self.sharding = object()  # type: ignore[assignment]

    def any(self, flag: bool) -> bool:
        return True

    def gather_object(self, value: Any) -> list[Any]:
        return ["first", None, value, "fourth"]

    def broadcast_object(self, value: Any) -> Any:
        return value


def test_only_a_rank_without_a_batch_gets_that_of_another() -> None:
    assert (Third().broadcast_if_missing("third"), Third().broadcast_if_missing(None)) == (
        "third",
        "first",
    )


def largest_norm() -> Tensor:
    with init_comm(None, lambda: CPU, 60) as comm:
        return comm.norm(torch.tensor(2e38))


def test_a_norm_of_parts_whose_squares_overflow_is_finite(two: Ranks) -> None:
    for found in two(largest_norm):
        assert torch.equal(found, torch.tensor(2e38 * 2**0.5))


@pytest.mark.parametrize("large", [1, 24, 2**22])
def test_sums_are_the_same_however_tensors_are_sent(two: Ranks, large: int) -> None:
    columns = torch.arange(6.0).view(2, 3).t() * 2 + 1
    expected = [torch.full((4,), 3.0), columns, torch.full((2,), 0.2, dtype=torch.float64)]
    expected.append(torch.arange(10.0) * 3)
    for found in two(sums, large):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
