"""Ranks that divide layers take the steps of one process, with and without FSDP over them.

In fp32 only the order of sums differs. A gradient is off by a few units of 2^-24 of the gradients'
norm, which clipping holds at 0.5, so in STEPS steps of SGD with lr 0.01 a weight is off by less
than STEPS * 0.01 * 0.5 * 2^-20. In half the products of two ranks are rounded before they are added
and once after it, each by 2^-12 (float16) or 2^-9 (bfloat16) of the value, in about ten layers.
"""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ranked
import torch
from checkout import ROOT
from fixtures import refused
from in_process import differing, train
from ranked import CPU, SHARDED, on_ranks, parts, setup, trained, two_formats
from ranks import Ranks
from torch import nn
from torch.utils.data import DataLoader

from mpframe import Precision, checkpoint
from mpframe.checkpoint.state import OTHER_RANKS
from mpframe.core.comm import SINGLE_PROCESS, Comm, copies_of, part_of
from mpframe.core.errors import ConfigError, MpframeError
from mpframe.core.objective import supervised
from mpframe.data.loading import share_of
from mpframe.data.streaming import StreamLoader
from mpframe.run.sharding import shard
from mpframe.tracking.summary import Status
from mpframe.training.parallel.layout import Layout
from mpframe.training.parallel.same_weights import refuse_drift
from mpframe.training.trainer import Trainer

STEPS, LR, CLIP = 3, 0.01, 0.5
PLANS: dict[str, dict[str, Any]] = {
    "gpt": {
        "token_embed": "rowwise", "head": "colwise_gathered",
        "*.qkv": "colwise", "*.out": "rowwise", "*.up": "colwise", "*.down": "rowwise",
    },
    "net": {"first": "colwise", "last": "rowwise"},
}  # fmt: skip
OFF = {"fp32": 2**-20, "mixed": 2**-8, "amp": 2**-5}  # of gradients; amp runs in bfloat16


def options_of(name: str, mode: str, **others: Any) -> dict[str, Any]:
    half = "bfloat16" if mode == "amp" else "float16"
    own = {"name": name, "whole": True, "steps": STEPS, "clip_norm": CLIP, "half": half}
    return {**own, "optimizer": torch.optim.SGD, **others}


def divided(name: str, mode: str, **others: Any) -> dict[str, Any]:
    layout = {"tensor": 2, "plan": PLANS[name]}
    return options_of(name, mode, fsdp=True, layout=layout, **others)


@pytest.mark.parametrize(
    ("number", "name", "mode"),
    [("two", "net", "fp32"), ("two", "gpt", SHARDED),
     pytest.param("four", "gpt", "amp", marks=pytest.mark.slow),
     pytest.param("four", "net", "mixed", marks=[pytest.mark.slow, two_formats])],
)  # fmt: skip
def test_ranks_divide_layers(request: Any, number: str, name: str, mode: str) -> None:
    """Four of them with FSDP over the layers."""
    one = trained(mode, SINGLE_PROCESS, options_of(name, mode))
    several = request.getfixturevalue(number)(on_ranks, mode, divided(name, mode))
    off = OFF[mode]
    for rank in several:
        assert rank["results"] == several[0]["results"]
        for own, other in zip(rank["results"], one["results"], strict=True):
            assert own["skipped"] == other["skipped"] == 0
            assert 0.5 <= own["scale"] / other["scale"] <= 2  # powers of two, from the amaxes
            assert own["loss"] == pytest.approx(other["loss"], rel=off)
            assert own["grad_norm"] == pytest.approx(other["grad_norm"], rel=off)
        assert rank["loss"] == pytest.approx(one["loss"], rel=off)
        assert rank["metrics"] == pytest.approx(one["metrics"], rel=off)
        then = one["states"][-1]
        for part in ("weights", "ema"):
            for key, weight in rank["states"][-1][part].items():
                close = STEPS * LR * CLIP * off
                assert torch.allclose(weight, then[part][key], rtol=0, atol=close), key
    key = "blocks.0.mlp.up.weight" if name == "gpt" else "first.weight"
    first, *_, last = (state["weights"][key] for state in one["states"])
    assert (last - first).norm() > 2 * STEPS * LR * CLIP * OFF["mixed"]


def held(comm: Comm) -> list[Any]:
    """What this rank says of its weights, its share of the data, and what ranks add up."""
    trainer, *_ = setup(SHARDED, comm, divided("gpt", SHARDED, batch=8))
    model: Any = trainer.model
    places: dict[str, Any] = dict(model.named_parameters())
    copies = [
        copies_of(places[f"blocks.0.{name}"])
        for name in ("mlp.up.weight", "mlp.down.bias", "norm1.weight")
    ]
    sums, rank = torch.ones(3), comm.rank
    comm.sum_([sums])
    heads = places["blocks.0.attention.qkv.weight"].to_local()
    shares = [comm.data_rank, comm.data_size, *share_of(torch.arange(4), comm).tolist()]
    batches = DataLoader([1, 2], batch_size=8)
    shared = refused(ConfigError, StreamLoader, batches, 8, comm=comm)
    assert model.head.weight is model.token_embed.weight
    if rank == 1:  # As by a callback, or a kernel that adds in any order.
        part_of(places["norm.weight"]).add_(1)
    drifted = refused(MpframeError, refuse_drift, comm, 0, trainer.weights)
    return [copies, sums.tolist(), list(heads.shape), shares, shared, drifted]


def test_two_ranks_hold_parts_and_are_one_share_of_the_data(two: Ranks) -> None:
    """Of 96 x 32 values, q, k and v of 2 heads, each rank has a head. What is whole counts once."""
    said = (
        "distributed.tensor=2: DataLoader makes the batches of each rank, and ranks that divide "
        "layers read the same ones; give the samples instead"
    )
    drift = (
        "trainer.parallel=fsdp: after step 0 norm.weight is not the same on rank 1 as on rank 0; "
        "what writes the weights, a callback as well, must do the same on all ranks"
    )
    own = [[1, 2, 2], [1, 1, 1], [48, 32], [0, 1, 0, 1, 2, 3]]
    assert two(ranked.in_group, held) == [[*own, said, drift]] * 2


def bent(comm: Comm, plan: dict[str, Any]) -> list[Any]:
    """Features go by in place, as parts of them or all."""
    torch.manual_seed(0)
    layers = nn.Linear(8, 4), nn.ReLU(inplace=True), nn.Linear(4, 2), nn.LeakyReLU(inplace=True)
    model, precision = nn.Sequential(*layers), Precision()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    if plan:
        shard(model, {"": optimizer}, precision, comm, CPU, Layout(tensor=2, plan=plan))
    _, masters = precision.prepare(model, optimizer)
    trainer = Trainer(model, masters, supervised(nn.MSELoss()), precision, comm=comm)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*returned a view")
        result = trainer.train_step((torch.ones(4, 8), torch.ones(4, 2)))
    return [float(result.loss), float(result.grad_norm)]


def test_in_place_ops_after_a_divided_layer_keep_its_gradients(two: Ranks) -> None:
    plan = {"0": "colwise", "2": "rowwise"}
    one = bent(SINGLE_PROCESS, {})
    for rank in two(ranked.in_group, bent, plan):
        assert rank == pytest.approx(one, rel=2**-20)


def gpt() -> nn.Module:
    return parts("gpt")[0]


# A model, a plan that does not fit it, and the words of the refusal after `distributed.plan`.
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (lambda: nn.Sequential(nn.Linear(8, 4)), {"h*ad": "colwise"},
     ".h*ad: matches no module; the names are 0, ..."),
    (gpt, {"norm": "column"}, ".norm=column: norm is a LayerNorm: allowed are colwise, "
     "colwise_gathered, rowwise, sequence, and a _target_ of a ParallelStyle"),
    (gpt, {"norm": "colwise"}, ".norm=colwise: norm is a LayerNorm: ColwiseParallel currently only "
     "support nn.Linear and nn.Embedding!"),
    (lambda: nn.Sequential(nn.Linear(8, 5)), {"0": "colwise"}, ".0=colwise: 0.weight [5, 8] has 5 "
     "features to divide, no multiple of distributed.tensor=2"),
    (gpt, {"head": "colwise_gathered"}, ": token_embed.weight and head.weight are one weight, and "
     "the plan leaves it S(0) and whole; divide both alike, as an embedding rowwise and a head "
     "colwise_gathered, or neither"),
]  # fmt: skip


def step(comm: Comm, make: Any, plan: Any) -> None:
    model, precision = make(), Precision(SHARDED)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    shard(model, {"": optimizer}, precision, comm, CPU, Layout(tensor=2, plan=plan))
    _, masters = precision.prepare(model, optimizer)
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    objective = supervised(ranked.token_loss)
    Trainer(model, masters, objective, precision, comm=comm).train_step((tokens, tokens))


def refusals(comm: Comm) -> list[str]:
    return [ranked.refusal_of(comm, partial(step, comm, make, plan)) for make, plan, _ in REFUSED]


def test_a_plan_that_does_not_fit_is_refused(two: Ranks) -> None:
    said = [f"distributed.plan{text}" for *_, text in REFUSED]
    assert two(ranked.in_group, refusals) == [said, said]


RUN = [*ranked.NET, "model.dropout=0.2", f"dtype={SHARDED}", "trainer.ema_decay=0.9",
       "trainer.max_steps=4"]  # fmt: skip
FSDP = "trainer.parallel=fsdp"
LAYERS = [FSDP, "distributed.tensor=2",
          "distributed.plan={hidden1.linear: colwise, hidden2.linear: rowwise}"]  # fmt: skip


@pytest.mark.slow
def test_a_checkpoint_of_2_x_2_ranks_is_that_of_any_others(
    two: Ranks, four: Ranks, tmp_path: Path
) -> None:
    """One process, other grids, and the same one again read and write what was there, bit for bit.

    Ranks of a pair draw the same numbers for dropout, or what both hold would have drifted.
    """

    def state(number: int) -> Any:
        return checkpoint.load(tmp_path / str(number))

    chain: list[Any] = [(four, LAYERS), (two, LAYERS), (two, [FSDP]), (four, LAYERS)]
    for number, (ranks, options) in enumerate(chain, 1):
        own = [*RUN, *options, *([f"resume={tmp_path}/{number - 1}"] if number > 1 else [])]
        ends = ranks(ranked.run, tmp_path / str(number), *own)
        assert {getattr(end, "status", end) for end in ends} == {Status.FINISHED}
        assert differing(state(1)["trainer"], state(number)["trainer"]) == [], number
    assert len([*checkpoint.newest(tmp_path / "1").glob("parts*")]) == 4
    assert len(state(1)[OTHER_RANKS]) == 1
    train(tmp_path / "5", *RUN, f"resume={tmp_path}/4")
    assert differing(state(1)["trainer"], state(5)["trainer"]) == []


@pytest.mark.slow
def test_the_presets_of_the_gpt_train_as_one_process(tmp_path: Path) -> None:
    """Its layers divided, and its positions as well: in fp32 five digits of the loss stay.

    In new processes, because torch remembers the grids of earlier runs.
    """
    small = "experiment=gpt +size=small model.depth=2 model.width=32 dataset.context=16 dtype=fp32"
    few = ["dataset.eval_windows=8", "trainer.max_steps=2", f"dataset.root={ROOT}/README.md"]
    options = [*small.split(), *few]
    one = train(tmp_path / "one", *options)
    for preset in ("gpt_tensor", "gpt_sequence"):
        own = [*options, FSDP, f"distributed={preset}", "model.heads=4"]
        with Ranks(2) as two:
            ends = two(ranked.run, tmp_path / preset, *own)
        assert [end.val_loss for end in ends] == pytest.approx([one.val_loss] * 2, rel=1e-5)
