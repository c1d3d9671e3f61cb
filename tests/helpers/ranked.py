"""What a rank does in the tests of several: runs, and one short training; ranks in trouble.

The training is for a single process and for ranks, whose results are compared bit for bit.
"""

import copy
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fixtures import has_torch, needs_torch, refused
from in_process import differing, results, train
from torch import Tensor, nn
from torch.utils.data import IterableDataset, Subset, TensorDataset

from mpframe import LogMax, Precision
from mpframe.core.callback import Callback
from mpframe.core.comm import Comm, is_sharded
from mpframe.core.errors import MpframeError, UserCodeError
from mpframe.core.objective import supervised
from mpframe.core.tree import map_tensors
from mpframe.data import Loader, classification
from mpframe.data.metrics import RMSE, Accuracy
from mpframe.data.streaming import StreamLoader
from mpframe.data.task import Task
from mpframe.precision.lowbit.recipe import Recipe
from mpframe.run.sharding import shard
from mpframe.training.callbacks.ema import Ema
from mpframe.training.evaluation import Evaluator
from mpframe.training.optimizers.multi_optimizer import MultiOptimizer
from mpframe.training.parallel import data_parallel, process_group
from mpframe.training.parallel.launch import init_comm
from mpframe.training.parallel.layout import Layout
from mpframe.training.parallel.sync_batchnorm import synchronize
from mpframe.training.plan import Plan
from mpframe.training.trainer import Trainer
from mpframe.workloads.images import resnet18
from mpframe.workloads.text.language_model import GPT

CPU = torch.device("cpu")
OF_PLAN = ("accumulate", "clip_norm", "clip_value", "reduce")


class FirstOutputs:
    """A metric that cannot be merged, and that depends on the order of the samples."""

    name, higher_is_better = "first", True
    sync_on_compute = True  # as torchmetrics'
    value = 0.0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        for row in outputs.float():
            self.value = self.value / 2 + float(row[0] > row[1])

    def compute(self) -> float:
        assert not self.sync_on_compute
        return self.value


class Chosen(Accuracy):
    """How often class 0 is chosen: a count that the `merge` of its base class does not know."""

    higher_is_better = None
    count = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        super().update(outputs, targets)
        self.count += int((outputs.argmax(dim=1) == 0).sum())

    def compute(self) -> Tensor:
        return torch.tensor(self.count)


class Net(nn.Module):
    """Two layers, perhaps a BatchNorm, and a layer that negative sums of the first sample use."""

    def __init__(self, norm: Any, whole: Any) -> None:
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


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def parts(name: str, norm: Any = None, whole: Any = None) -> tuple[nn.Module, Any, Any]:
    """A model, its samples and its loss."""
    random = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    if name == "gpt":
        text = torch.randint(0, 32, (16, 17), generator=random)
        data = TensorDataset(text[:, :-1], text[:, 1:])
        return GPT(32, context=16, depth=2, heads=2, width=32), data, token_loss
    loss = nn.CrossEntropyLoss()
    if name == "resnet18":
        data = TensorDataset(torch.randn(16, 3, 8, 8, generator=random), torch.arange(16) % 10)
        return resnet18(10, width=4), data, loss
    inputs = torch.randn(67, 8, generator=random)
    if name == "mlp":  # A layer of one row, of which the second rank holds none, and one of 5 rows.
        layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)]
        model: nn.Module = nn.Sequential(*layers, nn.Linear(1, 5))
    elif name == "tied":  # Two blocks that share a weight, and one that does not.
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.ReLU(), nn.Linear(8, 5))
        model[2].weight = model[0].weight
    else:
        model = Net(norm, whole)
    classes = 4 if name == "net" else 5
    return model, TensorDataset(inputs, inputs[:, :classes].argmax(1)), loss


def setup(mode: str, comm: Comm, options: dict[str, Any]) -> tuple[Trainer, Loader, Loader]:
    """A trainer, and what it trains and validates on.

    `options`: the model's name, its `norm` and `whole`; `before`, called before each step; `sync`,
    `fsdp`, its `layout`, `recipe`, `batch`, `steps`, and those of a plan; `optimizer`, or
    `optimizers` of `matrices` and `rest`.
    """
    optimizer = torch.optim.AdamW
    options = {"name": "net", "optimizer": optimizer, "steps": 4, "half": "float16", **options}
    net = options["name"] == "net"
    model, data, loss = parts(options["name"], options.get("norm"), options.get("whole"))
    if options.get("sync") and comm.size > 1:
        synchronize(model)
    recipe = Recipe.from_mapping("own", options["recipe"]) if "recipe" in options else "none"
    precision = Precision(mode, options["half"], products=recipe)
    kinds = options.get("optimizers", {"": options["optimizer"]})
    optimizers = {name: kind(_of_part(name, model), lr=1e-2) for name, kind in kinds.items()}
    if options.get("fsdp"):
        layout, compiled = Layout(**options.get("layout", {})), bool(options.get("compile"))
        shard(model, optimizers, precision, comm, CPU, layout, compiled=compiled)
    made = {name: precision.prepare(model, one)[1] for name, one in optimizers.items()}
    masters: Any = made[""] if len(made) == 1 else MultiOptimizer(made)
    means = {p: masters.master_of(p) for p in model.parameters()}
    metrics = {"accuracy": Accuracy, "first": FirstOutputs, "chosen": Chosen}
    plan = {"clip_norm": 1.0} | {key: options[key] for key in OF_PLAN if key in options}
    trainer = Trainer(
        *(model, masters, supervised(loss), precision),
        scaler=None if mode == "fp32" else LogMax(init_scale=2.0**10),
        algorithms={"ema": Ema(model, means, 0.9)},
        plan=Plan(epochs=9, max_steps=options["steps"], **plan),
        evaluator=Evaluator(metrics if net else {}),
        comm=comm,
    )
    batch = options.get("batch", 16 if net else 8)
    train = Loader(data, batch, shuffle=True, drop_last=True, comm=comm)
    part = (len(data) - 1) // 8 * 4  # Of the last batch, a single sample, only rank 0 has any.
    return trainer, train, Loader(Subset(data, range(2 * part + 1)), part, shuffle=False, comm=comm)


def _of_part(name: str, model: nn.Module) -> list[nn.Parameter]:
    """All weights, or the `matrices`, or the `rest`."""
    of_part = {"": (1, 2, 3, 4), "matrices": (2,), "rest": (1, 3, 4)}[name]
    return [own for own in model.parameters() if own.dim() in of_part]


def whole_of(tensor: Any) -> Any:
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def trained(mode: str, comm: Comm, options: dict[str, Any]) -> dict[str, Any]:
    """All that a short run leaves: whole states before each step and at the end, a validation."""
    trainer, train, val = setup(mode, comm, options)
    results, states, step = [], [], trainer.train_step

    def state() -> Any:
        return copy.deepcopy(map_tensors(whole_of, trainer.state_dict()))

    def watched(*batches: Any) -> Any:
        states.append(state())
        fault = options.get("faults", {}).get(len(results))
        if fault is not None and comm.rank == 1:
            fault(trainer, batches)
        if before := options.get("before"):
            before(trainer, len(results))
        result: Any = step(*batches)
        told = ("grad_norm", "loss", "scale", "skipped")
        results.append({key: float(getattr(result, key)) for key in told})
        results[-1]["dropped"] = int(result.dropped or 0)
        return result

    trainer.train_step = watched  # type: ignore[method-assign]
    trainer.fit(train)
    weights = [whole_of(own.detach()).clone() for own in trainer.model.parameters()]
    evaluation = trainer.evaluate(val)
    states.append(state())
    found = {"states": states, "weights": weights, "results": results}
    return {**found, "metrics": evaluation.metrics, "loss": evaluation.loss}


def in_group(do: Any, *arguments: Any) -> Any:
    """What `do` returns for the ranks and these arguments, as one of the ranks."""
    with init_comm(None, lambda: CPU, 60) as comm:
        return do(comm, *arguments)


def on_ranks(mode: str, options: dict[str, Any]) -> dict[str, Any]:
    """`trained` as one of the ranks; tensors of `large` bytes are sent alone."""
    with pytest.MonkeyPatch.context() as patched:
        large = options.get("large", 2**22)
        patched.setattr(process_group, "_LARGE", large)
        patched.setattr(data_parallel, "_BUCKET_MB", large / 2**20)
        return in_group(lambda comm: trained(mode, comm, options))


def bad_input(trainer: Trainer, batches: Any) -> None:
    batches[-1][0][0, 0] = torch.inf


def assert_same(first: Any, second: Any) -> None:
    assert (found := differing(first, second)) == [], found


def assert_same_but(first: list[Any], second: list[Any], *names: str) -> None:
    assert_same(*([{k: s[k] for k in s if k not in names} for s in own] for own in (first, second)))


two_formats = needs_torch("2.15", "gathers weights of a block in two formats")
adds_zeros = needs_torch("2.15", "adds zeros for a layer that a rank does not use")
# The mode of divided weights where it does not matter: before torch 2.15 they are not `mixed`.
SHARDED = "mixed" if has_torch("2.15") else "amp"
OWN = ["dataset=own", "dataset._target_=ranked.points", "dataset.batch_size=8", "model=own",
       "model._target_=torch.nn.Linear", "+model.in_features=4", "+model.out_features=2",
       "trainer.max_steps=4"]  # fmt: skip
NET = ["model=mlp", "model.hidden=16", "trainer.max_steps=8", "trainer.checkpoint_every=4"]
NOISY = [*NET, "model.hidden=32", "model.dropout=0.2", "dataset.augment=crop",
         "trainer.ema_decay=0.9", "dtype/products=nvfp4"]  # fmt: skip


class Stream(IterableDataset[Any]):
    """0 to 32, each over 33 and beside a random number."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(33):
            yield torch.tensor([number / 33]), torch.rand(1)


def stream() -> Task:
    return Task(Stream(), Stream(), supervised(nn.MSELoss()), RMSE, batches_per_epoch=3)


def read_stream() -> list[int]:
    """The numbers of the stream that this rank reads in a pass, and its batches."""
    with init_comm("ddp", lambda: CPU, 60.0) as comm:
        own = StreamLoader(Stream(), 8, endless=False, comm=comm)
        batches = list(own.epoch(0))
        own.close()
    read = [batch[0] * 33 for batch in batches if batch is not None]
    return [len(batches), *torch.cat(read).flatten().round().int().tolist()]


def trouble(rank: int, step: int, name: str) -> list[str]:
    """The options by which a rank gets a signal."""
    values = f"_target_=ranked.Trouble rank={rank} step={step} name={name}"
    return [f"+callbacks.trouble.{word}" for word in values.split()]


def summary_in(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "summary.json").read_text()))


def assert_same_results(undisturbed: Path, other: Path) -> None:
    found = differing(results(undisturbed), results(other))
    assert [path for path in found if not path.startswith("/state/usage")] == []


def run(folder: Path, *options: str) -> Any:
    """This rank's summary, or the kind and text of the error that ended its run."""
    try:
        return train(folder, *options)
    except MpframeError as error:
        return type(error).__name__, str(error)


def runs(folder: Path, options: list[list[str]]) -> list[Any]:
    return [run(folder / str(number), *own) for number, own in enumerate(options)]


class Trouble(Callback):
    """At a step a rank gets a signal; not again where torchrun has started it once more."""

    def __init__(self, rank: int, step: int, name: str) -> None:
        self._at, self._signal = (rank, step), signal.Signals[name]

    def on_step_begin(self, trainer: Trainer, batches: Any) -> None:
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if first and (trainer.comm.rank, trainer.progress.global_step) == self._at:
            os.kill(os.getpid(), self._signal)


class Drift(Callback):
    """Writes the weights of rank 1 behind the trainer's back."""

    def on_step_begin(self, trainer: Trainer, batches: Any) -> None:
        if trainer.comm.rank == 1:
            next(trainer.model.parameters()).detach().add_(0.01)


class Overflow(Callback):
    def on_step_begin(self, trainer: Trainer, batches: Any) -> None:
        if trainer.comm.rank == 1:
            batches[0][0].fill_(6e4)


def rows(count: int, bad: int | None = None) -> Any:
    """Of four numbers; one may hold nan."""
    values = [torch.nan if row == bad else row / count for row in range(count)]
    return [(torch.full((4,), value), row % 2) for row, value in enumerate(values)]


def points(bad: int | None = None) -> Task:
    return classification(rows(32, bad), rows(7))


def seeded_otherwise() -> torch.nn.Module:
    torch.manual_seed(os.getpid())
    return torch.nn.Linear(4, 2)


def runs_otherwise(folder: Path, options: list[str], others: list[list[str]]) -> list[Any]:
    """The same where all ranks but rank 0 have other options besides."""
    other = os.environ["RANK"] != "0"
    return runs(folder, [[*options, *(own if other else [])] for own in others])


def refusal_of(comm: Comm, work: Any) -> str:
    """What work is refused with, also if an error in the model is explained by its ranks."""
    try:
        work()
    except UserCodeError as error:
        return refused(MpframeError, comm.refuse_lost, error.__cause__)
    except MpframeError as error:
        return str(error)
    return ""
