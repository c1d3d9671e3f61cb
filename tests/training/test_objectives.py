"""Objectives: what they are given and give in every mode; the group `objective` and its page."""

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import Patch, refused
from in_process import composed, train
from prepared import Batches, prepared
from torch import Tensor, nn
from torch.nn import functional as F
from vocabulary import HALVES, CalledOps

from mpframe import Backoff, Evaluator, Plan
from mpframe.config import CONF
from mpframe.config.command_line import check_config
from mpframe.core.errors import MpframeError, UserCodeError
from mpframe.core.objective import NamedObjective, Objective, StepOutput, supervised
from mpframe.run.parts import build_task, to_device
from mpframe.tracking.summary import Summary
from mpframe.training.objectives import cross_entropy, model_loss
from mpframe.training.trainers.multi_objective import MultiObjectiveTrainer
from mpframe.workloads.segmentation.model import dice_cross_entropy
from mpframe.workloads.tables.model import LogRegression

PAGE = (CONF.parent / "docs" / "objectives.md").read_text()
trainer_of = partial(prepared, scaler=Backoff(2.0**8))


def test_outputs_without_logits_and_targets_that_the_model_does_not_see() -> None:
    def model(x: Tensor) -> dict[str, Tensor]:
        return {"loss": x.sum(), "start": x.half()}

    targets, x = {"text": ["a", "b"]}, torch.ones(2)
    output = model_loss(model, ({"x": x}, targets))
    assert (output.outputs.keys(), output.targets) == ({"start"}, targets)
    assert torch.equal(output.outputs["start"], x)


def pairs(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(1))
    return [(draw(size, 4), draw(size, 2)) for size in sizes]


@pytest.mark.parametrize(("mode", "half"), [
    ("fp32", "float16"), ("mixed", "float16"), ("amp", "bfloat16"),
])  # fmt: skip
def test_a_supervised_loss_is_in_fp32_outside_the_casts(mode: str, half: str) -> None:
    """Its outputs are fp32, and a product in it, which the casts would run in half, is fp32."""
    formats: list[torch.dtype] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        product = outputs @ targets.T
        formats.extend((outputs.dtype, product.dtype))
        return product.square().mean()

    model = nn.Sequential(nn.Linear(4, 2))
    model[0].register_forward_hook(lambda _, args, output: formats.append(output.dtype))
    trainer_of(model, supervised(loss), mode, half).train_step(*pairs(8))
    own = torch.float32 if mode == "fp32" else HALVES[half]
    assert formats == [own, torch.float32, torch.float32]


def test_a_half_loss_is_taken_to_fp32_and_checked_outside_the_casts() -> None:
    seen, half = CalledOps(), torch.float16
    model, batch = nn.Linear(4, 1, dtype=half), torch.ones(4, dtype=half)
    output = NamedObjective("", lambda model, batch: StepOutput(model(batch)))(model, batch, seen)
    assert (output.loss.dtype, output.loss.requires_grad) == (torch.float32, True)
    assert seen.names == ["linear"]


@pytest.mark.parametrize(("mode", "counts"), [("mixed", None), ("fp32", [2, 7]), ("amp", [2, 7])])
def test_an_evaluation_weighs_batches_by_their_count(mode: str, counts: list[int] | None) -> None:
    """By the objective's own, e.g. of tokens; else by the samples of the batch."""
    plain, batches = supervised(nn.MSELoss()), Batches(pairs(5, 3))

    def counting(model: nn.Module, batch: Any) -> StepOutput:
        count = None if counts is None else counts[len(batch[0]) == 3]
        return StepOutput(plain(model, batch).loss, count=count)

    torch.manual_seed(0)
    trainer = trainer_of(nn.Linear(4, 2), counting, mode, evaluator=Evaluator())
    with torch.no_grad(), trainer.precision.cast():
        one, two = (
            NamedObjective("", plain)(trainer.model, batch).loss.double() for batch in batches
        )
    first, second = counts or (5, 3)
    expected = float((one * first + two * second) / (first + second))
    assert trainer.evaluate(batches).loss == expected


def test_a_compiled_model_is_one_graph_under_the_casts(monkeypatch: Patch) -> None:
    graphs: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=keep, fullgraph=True))
    losses, data = [], Batches(pairs(8, 8, 8, 8))
    for plan in (Plan(), Plan(compile=True)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))
        rest: Any = {"plan": plan, "evaluator": Evaluator()}
        trainer = trainer_of(model, nn.MSELoss(), "mixed", **rest)
        steps: list[Any] = [trainer.train_step(batch).loss for batch in data]
        losses.append([*steps, torch.tensor(trainer.evaluate(data).loss)])
    assert all(map(torch.equal, *losses))
    assert len(graphs) == 2  # in training and in evaluation
    torch._dynamo.reset()


def test_the_logarithm_is_learned_and_the_number_is_measured() -> None:
    torch.manual_seed(0)
    targets = torch.tensor([1.0, 50_000.0, 7e7])
    trainer = prepared(nn.Linear(2, 1), LogRegression(mean=2.0, std=0.5), "mixed")
    with trainer.precision.cast():
        output = trainer.objective(trainer.model, {"input": torch.ones(3, 2), "target": targets})
        logs = trainer.model(torch.ones(3, 2)).float().flatten()
    assert torch.equal(output.loss, F.mse_loss(logs, (targets.log() - 2.0) / 0.5))
    assert torch.equal(output.outputs, (2.0 + 0.5 * logs).exp())
    assert torch.equal(output.targets, targets)
    assert {output.loss.dtype, output.outputs.dtype} == {torch.float32}


FEW_LABELS = [0, 1, -100, -100, -100, -100, -100, 2]


@pytest.mark.parametrize("mode", ["fp32", "mixed"])
@pytest.mark.parametrize(("loss", "labels"), [
    (cross_entropy([10.0, 1.0, 1.0, 0.0]).loss, [0, 0, 0, 0, 1, 2, 3, 1]),
    (nn.CrossEntropyLoss(), FEW_LABELS),
    (nn.CrossEntropyLoss(), [0, 1, 2, 3, *[-100] * 4]),
    (nn.CrossEntropyLoss(), [[0, 1], [2, -100], *[[-100, -100]] * 5, [3, 3]]),
    (nn.NLLLoss(torch.tensor([10.0, 1, 1, 1]), ignore_index=3), [0, 3, 1, 3, 3, 2, 0, 1]),
    (F.cross_entropy, FEW_LABELS),
    (F.nll_loss, FEW_LABELS),
    (partial(F.cross_entropy, ignore_index=3, label_smoothing=0.1), [0, 3, 1, 3, 3, 2, 0, 1]),
], ids=["weights", "few", "none in one", "dense", "NLL", "function", "NLL function", "partial"])  # fmt: skip
def test_a_batch_may_be_cut_though_its_loss_is_a_mean_over_labels(mode, loss, labels) -> None:
    """Two micro-batches are one batch of 8 in training, and in validation batches of any size."""
    targets, seen = torch.tensor(labels), []
    inputs = torch.rand(8, 6, *targets.shape[1:], generator=torch.Generator().manual_seed(0))
    for size in (8, 4):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv1d(6, 4, 1) if targets.dim() > 1 else nn.Linear(6, 4))
        trainer = prepared(model, supervised(loss), mode, evaluator=Evaluator())
        batches = Batches(zip(inputs.split(size), targets.split(size), strict=True))
        before = trainer.evaluate(batches).loss
        result = trainer.train_step(*batches)
        seen.append([torch.tensor(before), result.loss, *trainer.weights().values()])
    # Sums in another order, and in float16 each micro-batch's gradients are rounded once.
    error = {"fp32": 1e-6, "mixed": 2.0**-10}[mode]
    torch.testing.assert_close(*seen, rtol=error, atol=error)


def test_what_is_no_mean_over_labels_counts_samples() -> None:
    shares, labels = torch.full((3, 4), 0.25), torch.tensor([0, 1, 2])
    for loss, targets in (
        (nn.CrossEntropyLoss(), shares), (nn.CrossEntropyLoss(reduction="sum"), labels),
        (nn.MSELoss(), shares), (F.cross_entropy, shares),
        (partial(F.cross_entropy, reduction="sum"), labels),
    ):  # fmt: skip
        output = supervised(loss)(nn.Identity(), (torch.zeros(3, 4), targets))
        assert output.count is None


def test_dice_and_cross_entropy_by_hand() -> None:
    logits = torch.tensor([[[2.0, 0.0, -1.0], [0.0, 1.0, 1.0], [0.5, 0.0, 0.0]]]).double()
    targets = torch.tensor([[0, 1, 1]])
    p = logits[0].softmax(0)
    dice = [
        (2 * p[0, 0] + 0.5) / (p[0].sum() + 1 + 0.5),
        (2 * (p[1, 1] + p[1, 2]) + 0.5) / (p[1].sum() + 2 + 0.5),
        0.5 / (p[2].sum() + 0.5),  # a class that occurs nowhere
    ]
    expected = F.cross_entropy(logits, targets) + 0.25 * (1 - sum(dice) / 3)
    loss = dice_cross_entropy(dice_weight=0.25, smooth=0.5).loss(logits, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-14, atol=0.0)  # a few roundings of float64


def given(objective: Any, batch: Any) -> Callable[[], object]:
    return lambda: NamedObjective("", objective)(nn.Linear(4, 2), batch)


def objective_of(*overrides: str) -> Any:
    return build_task(check_config(composed(*overrides))).objective


def chosen(words: str) -> Callable[[], object]:
    return lambda: objective_of(*words.split())


ONES, LOG = torch.ones(2, 4), LogRegression(0.0, 1.0)


@pytest.mark.parametrize(("call", "line"), [
    (lambda: trainer_of(nn.Linear(4, 2), {"one": nn.MSELoss()}, cls=MultiObjectiveTrainer), r"objective\.one=MSELoss: a loss, and an objective is called with the model and a batch; use supervised\(MSELoss\(\)\)"),
    (lambda: trainer_of(nn.Linear(4, 2), 3), r"objective: must be a function objective\(model, batch\) that returns a StepOutput, not an int"),
    (given(supervised(nn.MSELoss()), {"x": ONES}), r"objective: supervised takes batches of \(inputs, targets\), and the dataset gave a dict of x; give it such pairs, use objective=model_loss or write an objective of your own"),
    (given(model_loss, {"input": ONES}), r"model: Linear gave float32 \[2, 2\] without a loss; give it its labels, or use an objective that computes the loss"),
    (given(model_loss, {"x": ONES}), r"model: Linear raised TypeError \(.*'x'\), given batch a dict of x; HYDRA_FULL_ERROR=1 shows the traceback"),
    (given(LOG, {"input": ONES}), r"objective: LogRegression raised KeyError \('target'\)"),
    (given(LOG, {"input": ONES, "target": torch.ones(2)}), r"objective: log_regression: predictions of shape \[4\] against targets of shape \[2\]"),
    (lambda: LogRegression(0.0, 0.0), r"objective\.std=0\.0: must be a number > 0"),
    (lambda: dice_cross_entropy(dice_weight=float("nan")), r"objective\.dice_weight=nan: must be a finite number"),
    (lambda: dice_cross_entropy(smooth=0.0), r"objective\.smooth=0\.0: must be a finite number"),
    (chosen("objective=cross_entropy objective.weight=[1,-1]"), r"objective\.weight=\[1, -1\]: must be finite numbers >= 0, or null"),
    (chosen("objective=cross_entropy +objective.smoothing=0.1"), r"objective\.smoothing=0\.1: mpframe\.training\.objectives\.cross_entropy takes no such argument; nearest: label_smoothing"),
    (chosen("objective._target_=torch.nn.L1Loss"), r"objective\._target_=torch\.nn\.L1Loss: is a loss; use objective\._target_=mpframe\.core\.objective\.supervised objective\.loss\._target_=torch\.nn\.L1Loss"),
    (chosen("objective._target_=builtins.dict"), r"objective\._target_=builtins\.dict: must be a function objective\(model, batch\) that returns a StepOutput, not a dict of nothing"),
    (chosen("objective._target_=mpframe.training.objectives.model_loss objective.strength=1"), r"objective\.strength=1: mpframe\.training\.objectives\.model_loss takes no such argument; it takes model, batch; leave it out with ~objective\.strength"),
    (chosen("objective._target_=nowhere.mine"), r"objective\._target_=nowhere\.mine: "),
])  # fmt: skip
def test_what_does_not_fit_or_is_no_objective_is_one_line(call: Any, line: str) -> None:
    assert re.match(line, refused(MpframeError, call))


def test_the_shipped_objectives_take_their_options() -> None:
    logits, targets = torch.randn(8, 3), torch.arange(8) % 3
    words = "objective=cross_entropy objective.label_smoothing=0.25 objective.weight=[1,2,0.5]"
    own, weight = objective_of(*words.split()), torch.tensor([1.0, 2.0, 0.5])
    expected = F.cross_entropy(logits, targets, weight, label_smoothing=0.25)
    assert torch.equal(own(nn.Identity(), (logits, targets)).loss, expected)
    assert objective_of("objective=task").source == "dataset: the loss CrossEntropyLoss"
    assert objective_of("objective=model_loss") is model_loss
    assert isinstance(objective_of("objective=mse").loss, nn.MSELoss)
    own = "objective._target_=mpframe.core.objective.supervised"
    huber = ("objective.loss._target_=torch.nn.HuberLoss", "objective.loss.delta=0.5")
    assert objective_of(own, *huber).loss.delta == 0.5
    weighted: Objective = cross_entropy([1.0, 2.0])
    to_device(weighted, torch.device("meta"))
    assert weighted.loss.weight.device.type == "meta"


@pytest.mark.parametrize(("name", "words"), [
    ("supervised", "dataset._target_=my_pkg.points model=mlp model.in_features=8 model.classes=2"),
    ("model_loss", "objective=model_loss dataset._target_=my_pkg.sentences model._target_=my_pkg.Classifier"),
    ("own", "objective._target_=my_pkg.consistent objective.strength=0.5 model=mlp"),
])  # fmt: skip
def test_examples_of_the_page(name: str, words: str, tmp_path: Path, monkeypatch: Patch) -> None:
    found = re.search(rf"<!-- run: {name} -->\n```python\n(.*?)```", PAGE, re.S)
    assert found is not None
    (tmp_path / "my_pkg.py").write_text(found[1])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_pkg", raising=False)
    options = ["dataset.batch_size=32", "trainer.max_steps=2", "dtype=mixed"]
    summary = train(tmp_path / "run", *words.split(), *options)
    assert (summary.status, summary.steps) == ("finished", 2)
    assert Summary.read(tmp_path / "run").val_loss == summary.val_loss


def test_a_loss_that_refuses_1_d_outputs_is_one_line() -> None:
    loss = supervised(nn.MSELoss(reduction="wrong"))
    with pytest.raises(UserCodeError, match="the loss MSELoss raised ValueError"):
        loss(nn.Flatten(0), (torch.ones(4, 1), torch.ones(4)))
