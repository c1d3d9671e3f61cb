"""The bytes that `mpframe plan` computes are those that processes and ranks really hold."""

import gc
import re
from collections.abc import Iterator
from functools import wraps
from typing import Any

import pytest
import torch
from checkout import ROOT
from fixtures import Shown
from ranked import in_group, parts, setup, two_formats
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.optimizer import register_optimizer_step_post_hook
from vocabulary import Living

from mpframe import Precision
from mpframe.cli.commands import plan as command
from mpframe.core.comm import SINGLE_PROCESS, Comm, is_sharded
from mpframe.core.objective import supervised
from mpframe.core.optim import masters
from mpframe.core.tree import map_tensors
from mpframe.run.footprint import Way, Weight, held, longest_message, measure, payload, state_bytes
from mpframe.training.memory import cast_again, recompute
from mpframe.training.parallel.data_parallel import DataParallel
from mpframe.training.parallel.sharding import blocks_of

RATIO = 0.05
pytestmark = pytest.mark.usefixtures("only_new_tensors")


def in_formats(model: nn.Module, mode: str) -> Precision:
    """In native bfloat16, because emulated products keep fp32 copies."""
    precision = Precision(mode, "bfloat16", compute="native")
    precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return precision


def really_saved(model: nn.Module, precision: Precision, loss: Any, batch: Any) -> int:
    """Of the memory that a forward pass makes, what autograd keeps."""
    before = {t.untyped_storage().data_ptr() for t in living()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with precision.cast(), saved_tensors_hooks(pack, lambda tensor: tensor):
        output = supervised(loss)(model, map_tensors(Tensor.clone, batch)).loss
    assert output.requires_grad  # And with it what is kept lives on, at an address of its own.
    return sum(size for at, size in kept.items() if at not in before)


def living() -> Iterator[Tensor]:
    for found in gc.get_objects():
        if issubclass(type(found), Tensor) and type(found).__name__ != "FakeTensor":
            yield found._local_tensor if is_sharded(found) else found


@pytest.mark.parametrize("name", ["gpt", "resnet18"])
@pytest.mark.parametrize("mode", ["fp32", "amp", "mixed"])
def test_activations_are_those_that_autograd_saves(name: str, mode: str) -> None:
    model, data, loss = parts(name)
    batch = tuple(t[:8].clone() for t in data.tensors)
    real = really_saved(model.train(), in_formats(model, mode), loss, batch)
    formats = [p.dtype for p in model.parameters()]
    with FakeTensorMode(allow_non_fake_inputs=True) as shapes:
        model = parts(name)[0].train()
        for weight, dtype in zip(model.parameters(), formats, strict=True):
            weight.data = weight.data.to(dtype)
        fake, precision = map_tensors(shapes.from_tensor, batch), Precision(mode, "bfloat16")

        def forward() -> None:
            with precision.cast():
                supervised(loss)(model, fake)

        blocks = blocks_of(model)
        saved, largest, _ = measure(model, forward, blocks)
        recompute(model, [n for n, m in model.named_modules() if m in blocks])
        kept, _, _ = measure(model, forward)
    assert saved == pytest.approx(real, rel=RATIO)
    assert kept < saved
    assert largest < saved


def test_sharded_weights_leave_no_casts() -> None:
    """A rank casts a gathered weight again in the backward pass, here from fp32 to bfloat16."""
    model, data, loss = parts("gpt")
    batch, saved = tuple(t[:2].clone() for t in data.tensors), []

    def forward() -> None:
        with precision.cast():
            supervised(loss)(model.train(), batch)

    for sharded in (False, True):
        precision = Precision("amp", "bfloat16", compute="native")
        if sharded:
            precision.use_shards(model, {}, cast_again)
        saved.append(measure(model, forward)[0])
    linear = [m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear)]
    assert saved[0] - saved[1] == pytest.approx(2 * sum(linear), rel=RATIO)


def test_layers_that_ranks_divide_keep_and_sum_their_parts() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
    styles = {model[0]: "colwise", model[2]: "rowwise"}
    alone = measure(model, lambda: model(torch.ones(3, 4)))[0]
    saved, _, summed = measure(model, lambda: model(torch.ones(3, 4)), (), styles, 2)
    assert alone - saved == 4 * 3 * 8 // 2  # What is between both layers.
    assert summed == 4 * 3 * (4 + 6)
    handed = payload([Weight((4, 2))], Way("tp", tensor=2), activations=summed)
    assert handed["all_reduce", 2] == summed + 3 * 4 + 8 * (3 + 1 + 1 + 2)


@pytest.mark.parametrize(
    ("kind", "each", "other"),
    [(torch.optim.AdamW, 8, 4), (torch.optim.SGD, 0, 0), (torch.optim.Adafactor, 0, 4 + 4 * 40)],
)
def test_the_optimizer_s_state_is_counted_on_stand_ins(kind: Any, each: int, other: int) -> None:
    """Adafactor keeps a mean for each row and for each column."""
    weight = nn.Parameter(torch.empty(30, 10))
    assert state_bytes([kind([weight], lr=0.1)]) == {weight: (each, other, 4)}


@pytest.mark.parametrize(
    ("options", "each"), [({"foreach": True}, 4), ({"fused": True}, 0), ({"foreach": False}, 0)]
)
def test_a_step_takes_four_bytes_for_each_value_that_it_steps_at_once(
    options: Any, each: int
) -> None:
    weights = [nn.Parameter(torch.ones(1000)) for _ in range(4)]
    optimizer = torch.optim.AdamW(weights, lr=0.1, **options)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    with Living() as made:
        optimizer.step()
    planned = sum(1000 * took for *_, took in state_bytes([optimizer]).values())
    assert planned == each * 4000
    assert planned <= made.most <= planned + 12000  # Also the counts of steps, and of one weight.


def test_a_step_of_many_weights_counts_where_nothing_is_gathered(capsys: Shown) -> None:
    words = ["model=mlp", "model.hidden=512", "dataset.batch_size=4", "gpus=2"]
    totals = []
    for more in ([], ["+optimizer.foreach=false"]):
        command.main([*words, *more])
        _, names, line, *_ = capsys.readouterr().out.splitlines()
        row = dict(zip(names.split()[2:], map(float, line.split()[2:]), strict=True))
        least = sum(row[name] for name in ("weights", "masters", "state", "gradients"))
        totals.append(row["total"])
        assert row["total"] == pytest.approx(least + max(row["update"], row["activations"]), 0.01)
    assert totals[0] > totals[1]
    half = Weight((2**27,), stored=2, update=4)
    assert held([half], Way("ddp", 2))["update"] == 4 * 2**26  # One bucket after another.
    assert held([half], Way("fsdp", shards=2))["update"] == 4 * 2**26


def test_buckets_and_blocks_are_the_longest_messages() -> None:
    large, small = Weight((2**22, 4), stored=2, block=1), Weight((3, 5))
    alike = Weight((3, 5), stored=2)
    assert longest_message([small, alike, large], Way("ddp", 2)) == 4 * 2**24
    assert longest_message([small, small], Way("ddp", 2)) == 4 * 30
    assert longest_message([small, small], Way("fsdp", shards=2)) == 4 * (4 + 4) * 5


def held_by(comm: Comm, mode: str, sharded: bool) -> tuple[int, int]:
    """The bytes of a rank's tensors and DDP's buckets while the optimizer steps; those planned."""
    options = {"name": "gpt", "fsdp": sharded, "clip_norm": None}
    earlier = [t.untyped_storage() for t in living()]  # Kept, so that no address comes again.
    before = {storage._cdata for storage in earlier}
    stored = [*setup(mode, SINGLE_PROCESS, {"name": "gpt"})[0].model.parameters()]
    shapes = [(tuple(p.shape), p.itemsize) for p in stored]
    found: dict[int, int] = {}
    buckets, reduce = [], DataParallel._reduce

    def note(optimizer: Any, *_: Any) -> None:
        gc.collect()
        for tensor in [*living(), *buckets]:
            storage = tensor.untyped_storage()
            if storage._cdata not in before:
                found[storage.data_ptr()] = storage.nbytes()

    @wraps(reduce)
    def watched(self: Any, bucket: Any) -> Any:
        buckets.append(bucket.buffer())
        return reduce(self, bucket)

    del stored
    hook = register_optimizer_step_post_hook(note)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DataParallel, "_reduce", watched)
        # On a CPU masters remember the bits of small weights.
        patched.setattr(masters, "_compares_values", lambda weight: False)
        trainer, train, _ = setup(mode, comm, options)
        for batch in list(train.epoch(0))[:2]:
            buckets.clear()
            found.clear()
            trainer.train_step(batch)
    hook.remove()
    way = Way("fsdp", shards=comm.size) if sharded else Way("ddp", comm.size)
    weights = [Weight(shape, size, state=8) for shape, size in shapes]
    plan = held(weights, way, average=4)
    assert len(earlier) >= len(before)
    return sum(found.values()), sum(plan.values()) - plan["gathered"]


@pytest.mark.parametrize("number", ["two", pytest.param("four", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("mode", "sharded"),
    [("fp32", False), ("fp32", True), ("mixed", False),
     pytest.param("mixed", True, marks=two_formats)],
)  # fmt: skip
def test_ranks_hold_what_is_planned(request: Any, number: str, mode: str, sharded: bool) -> None:
    for real, planned in request.getfixturevalue(number)(in_group, held_by, mode, sharded):
        assert real == pytest.approx(planned, rel=RATIO)


def test_the_command_prints_what_fits(capsys: Shown) -> None:
    words = ["model=mlp", "model.hidden=64", "nodes=2", "gpus=2", "memory=0.00015GB"]
    plan = [
        "trainer.parallel=fsdp",
        "distributed.tensor=2",
        "distributed.plan={hidden1*: colwise, hidden2*: rowwise}",
    ]
    command.main([*words, *plan])
    head, names, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("MB that each rank holds")
    assert names.split()[-3:] == ["sent", "longest", "fits"]
    rows = {tuple(line.split()[:2]): line.split() for line in lines}
    assert [way for way, _ in rows][::3] == ["ddp", "fsdp", "hsdp", "tp"]
    values = 64 * 64 + 64 + 64 * 64 + 64 + 64 * 10 + 10
    assert float(rows["ddp", "fp32"][2]) == pytest.approx(4 * values / 1e6, rel=0.01)
    assert {row[-1] for row in rows.values()} == {"yes", "no"}
    saved = names.split().index("activations")
    assert float(rows["fsdp", "amp"][saved]) < float(rows["ddp", "amp"][saved])


TABLE = torch.ones(4, 4)  # made with the module


class LooksUp(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs @ TABLE)


def test_a_model_may_hold_tensors_that_were_made_before(capsys: Shown) -> None:
    words = ["dataset=own", "dataset._target_=ranked.points", "dataset.batch_size=4", "model=own"]
    words += ["model._target_=test_footprint.LooksUp", "+model.in_features=4"]
    command.main([*words, "+model.out_features=2", "gpus=2"])
    assert capsys.readouterr().out.count("ddp") == 3


@pytest.mark.slow
def test_the_page_shows_what_the_command_prints(capsys: Shown) -> None:
    page = (ROOT / "docs" / "distributed.md").read_text()
    shown = r"^mpframe plan (.+)\n```\n\n```text\n((?:.+\n)+)```"
    ((words, table),) = re.findall(shown, page, re.M)
    command.main(words.split())
    assert capsys.readouterr().out == table
