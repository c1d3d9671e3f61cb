"""Objectives: what they are given and give, in every mode, and beside a loop by hand."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vocabulary import HALVES, CalledOps

from mpframe import Backoff, Precision, Trainer
from mpframe.core.errors import ConfigError, UserCodeError
from mpframe.core.objective import StepOutput, compute, supervised
from mpframe.training.evaluation import Evaluator
from mpframe.training.objectives import model_loss
from mpframe.training.optimizers.multi_objective import MultiObjectiveTrainer
from mpframe.training.plan import Plan
from mpframe.workloads.segmentation.model import dice_cross_entropy
from mpframe.workloads.tables.model import LogRegression

MODES = [("fp32", "float16"), ("mixed", "float16"), ("amp", "bfloat16")]
WORDS, LENGTH = 17, 6


@dataclass
class Output:
    """What a Hugging Face model returns."""

    loss: Tensor | None = None
    logits: Tensor | None = None


class Classifier(nn.Module):
    """Returns its loss where it is given labels; keeps the formats of its products."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(WORDS, 8), nn.LayerNorm(8)
        self.hidden, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
        self.formats: list[torch.dtype] = []

    def forward(self, input_ids: Tensor, mask: Tensor, labels: Tensor | None = None) -> Output:
        """Logits [N, 3] of words [N, length]."""
        hidden = self.hidden(self.norm(self.embed(input_ids)))
        if not torch.compiler.is_compiling():
            self.formats.append(hidden.dtype)
        pooled = (F.gelu(hidden) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        logits = self.head(pooled)
        return Output(None if labels is None else F.cross_entropy(logits, labels), logits)


def dicts(count: int, size: int = 8) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "input_ids": torch.randint(0, WORDS, (size, LENGTH), generator=generator),
            "mask": torch.randint(0, 2, (size, LENGTH), generator=generator).clamp(min=1.0).float(),
            "labels": torch.randint(0, 3, (size,), generator=generator),
        }
        for _ in range(count)
    ]


def trainer_of(
    model: nn.Module, objective: Any, mode: str, half: str = "float16", plan: Plan | None = None
) -> Trainer:
    precision = Precision(mode, half)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = precision.prepare(model, plain)
    rest: Any = {"scaler": Backoff(2.0**8), "plan": plan or Plan(), "evaluator": Evaluator()}
    return Trainer(model, optimizer, objective, precision, **rest)


@pytest.mark.parametrize(("mode", "half"), MODES)
def test_a_model_that_returns_its_loss_trains_in_all_modes(mode: str, half: str) -> None:
    model = Classifier()
    trainer = trainer_of(model, model_loss, mode, half)
    losses = [trainer.train_step(batch).loss for batch in dicts(2) * 20]
    assert losses[-1] < losses[0] / 2  # type: ignore[operator]
    assert {loss.dtype for loss in losses} == {torch.float32}  # type: ignore[union-attr]
    assert set(model.formats) == {torch.float32 if mode == "fp32" else HALVES[half]}
    assert trainer.progress.skipped == 0


def test_in_fp32_a_model_that_returns_its_loss_is_the_loop_by_hand() -> None:
    trainer, model = trainer_of(Classifier(), model_loss, "fp32"), Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in dicts(20):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert torch.equal(trainer.train_step(batch).loss, loss.detach())  # type: ignore[arg-type]
    for mine, theirs in zip(trainer.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


class Ends(nn.Module):
    """Two outputs and a loss, as a model that finds the ends of an answer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = nn.Linear(4, 2)

    def forward(self, x: Tensor, place: Tensor) -> dict[str, Tensor]:
        start, end = self.ends(x).unbind(-1)
        return {"loss": F.cross_entropy(start, place), "start": start, "end": end}


def test_outputs_without_logits_and_targets_that_the_model_does_not_see() -> None:
    model, targets = Ends(), {"text": ["a", "b"]}
    arguments = {"x": torch.randn(2, 3, 4), "place": torch.tensor([0, 2])}
    with Precision("mixed").cast():
        output = model_loss(model, (arguments, targets))
        expected = model(**arguments)
    assert output.targets is targets
    assert output.outputs.keys() == {"start", "end"}
    for name, values in output.outputs.items():
        assert torch.equal(values, expected[name].float())
    assert torch.equal(output.loss, expected["loss"])
    assert model_loss(model, arguments).targets is None


def pairs(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 4, generator=generator), torch.randn(size, 2, generator=generator))
        for size in sizes
    ]


@pytest.mark.parametrize(("mode", "half"), MODES)
def test_a_supervised_loss_is_in_fp32_outside_the_casts(mode: str, half: str) -> None:
    """Its outputs are fp32, and a product in it, which the casts would run in half, is fp32."""
    formats: list[torch.dtype] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        product = outputs @ targets.T
        formats.extend((outputs.dtype, product.dtype))
        return product.square().mean()

    model = nn.Sequential(nn.Linear(4, 2))
    trainer = trainer_of(model, supervised(loss), mode, half)
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda _, args, output: seen.append(output.dtype))
    (batch,) = pairs(8)
    trainer.train_step(batch)
    assert formats == [torch.float32, torch.float32]
    assert seen == [torch.float32 if mode == "fp32" else HALVES[half]]


def test_a_half_loss_is_taken_to_fp32() -> None:
    def objective(model: nn.Module, batch: Any) -> StepOutput:
        return StepOutput(model(batch[0]).sum())

    output = compute(objective, nn.Linear(4, 2).half(), (torch.randn(3, 4).half(),))
    assert output.loss.dtype == torch.float32
    assert output.loss.requires_grad


def test_a_loss_is_checked_outside_the_casts() -> None:
    seen = CalledOps()
    compute(lambda model, batch: StepOutput(model(batch)), nn.Linear(4, 1), torch.ones(4), seen)
    assert seen.names == ["linear"]


class Data:
    """A loader of fixed batches."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """The batches from `start` on."""
        return iter(self.batches[start:])


@pytest.mark.parametrize(
    ("mode", "counts"), [("mixed", None), ("fp32", {5: 2, 3: 7}), ("amp", {5: 2, 3: 7})]
)
def test_an_evaluation_weighs_batches_by_their_count(
    mode: str, counts: dict[int, int] | None
) -> None:
    """By the objective's own, e.g. of tokens; else by the samples of the batch."""
    plain, batches = supervised(nn.MSELoss()), pairs(5, 3)

    def counting(model: nn.Module, batch: Any) -> StepOutput:
        count = None if counts is None else counts[len(batch[0])]
        return StepOutput(plain(model, batch).loss, count=count)

    torch.manual_seed(0)
    trainer = trainer_of(nn.Linear(4, 2), counting, mode)
    with torch.no_grad(), trainer.precision.cast():
        losses = [compute(plain, trainer.model, batch).loss.double() for batch in batches]
    first, second = (5, 3) if counts is None else counts.values()
    expected = (losses[0] * first + losses[1] * second) / (first + second)
    assert trainer.evaluate(Data(batches)).loss == float(expected)


@pytest.mark.parametrize(
    ("objective", "line"),
    [
        (nn.MSELoss(), r"objective=MSELoss: a loss, and an objective is called with the model and a batch; use supervised\(MSELoss\(\)\)"),
        (3, r"objective: must be a function objective\(model, batch\) that returns a StepOutput, not an int"),
        ({"one": model_loss}, r"objective: must be a function objective\(model, batch\) that returns a StepOutput, not a dict of one"),
    ],
)  # fmt: skip
def test_what_is_no_objective_is_refused(objective: Any, line: str) -> None:
    with pytest.raises(UserCodeError, match=line):
        trainer_of(nn.Linear(4, 2), objective, "fp32")


@pytest.mark.parametrize(
    ("objective", "batch", "line"),
    [
        (supervised(nn.MSELoss()), {"x": torch.ones(2)}, r"objective: supervised takes batches of \(inputs, targets\), and the dataset gave a dict of x; give it such pairs, use objective=model_loss or write an objective of your own"),
        (model_loss, {"input": torch.ones(2, 4)}, r"model: Linear gave float32 \[2, 2\] without a loss; give it its labels, or use an objective that computes the loss"),
        (model_loss, {"x": torch.ones(2, 4)}, r"model: Linear raised TypeError \(.*'x'\), given batch a dict of x; HYDRA_FULL_ERROR=1 shows the traceback"),
    ],
)  # fmt: skip
def test_a_batch_that_does_not_fit_is_one_line(objective: Any, batch: Any, line: str) -> None:
    with pytest.raises(UserCodeError, match=line):
        compute(objective, nn.Linear(4, 2), batch)


def test_several_objectives_are_for_the_trainer_of_several() -> None:
    one = trainer_of(nn.Linear(4, 2), model_loss, "fp32")
    with pytest.raises(UserCodeError, match=r"objective.one=MSELoss: a loss, and an objective is"):
        MultiObjectiveTrainer(one.model, one.optimizer, {"one": nn.MSELoss()}, one.precision)


@pytest.mark.parametrize(("mode", "half"), MODES[1:])
def test_a_compiled_model_is_one_graph_under_the_casts(
    mode: str, half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The objective around it runs as it is written; the steps are those of eager, bit for bit."""
    graphs: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = partial(torch.compile, backend=keep, fullgraph=True)
    monkeypatch.setattr(torch, "compile", compiled)
    losses = []
    for plan in (Plan(), Plan(compile=True)):
        trainer = trainer_of(Classifier(), model_loss, mode, half, plan)
        steps = [trainer.train_step(batch).loss for batch in dicts(4)]
        losses.append([*steps, torch.tensor(trainer.evaluate(Data(dicts(2))).loss)])
    assert all(map(torch.equal, *losses))
    assert len(graphs) == 2  # in training and in evaluation
    torch._dynamo.reset()


def test_an_error_names_the_compiled_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    trainer = trainer_of(nn.Linear(4, 2), supervised(nn.MSELoss()), "fp32", plan=Plan(compile=True))
    with pytest.raises(UserCodeError, match=r"^model: Linear raised"):
        trainer.train_step((torch.ones(2, 3), torch.ones(2, 2)))


# log_regression


class Head(nn.Module):
    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(2, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_the_logarithm_is_learned_and_the_number_is_measured() -> None:
    torch.manual_seed(0)
    precision, model = Precision("mixed"), Head()
    model, _ = precision.prepare(model, torch.optim.SGD(model.parameters()))
    targets = torch.tensor([1.0, 50_000.0, 7e7])
    with precision.cast():
        output = LogRegression(mean=2.0, std=0.5)(model, {"x": torch.ones(3, 2), "target": targets})
        logs = model(torch.ones(3, 2)).float().flatten()
    assert torch.equal(output.loss, F.mse_loss(logs, (targets.log() - 2.0) / 0.5))
    assert torch.equal(output.outputs, (2.0 + 0.5 * logs).exp())
    assert torch.equal(output.targets, targets)
    assert {output.loss.dtype, output.outputs.dtype} == {torch.float32}


def test_log_regression_refuses_what_it_cannot_use() -> None:
    objective = LogRegression(0.0, 1.0)
    batch = {"x": torch.ones(3, 2), "target": torch.ones(3)}
    with pytest.raises(
        UserCodeError, match=r"^objective: log_regression takes dicts with a target"
    ):
        objective(Head(), (batch["x"], batch["target"]))
    with pytest.raises(UserCodeError, match="takes one output for each target"):
        objective(Head(outputs=2), batch)
    with pytest.raises(ConfigError, match=r"objective\.std=0\.0: must be finite, and std > 0"):
        LogRegression(0.0, 0.0)


# dice_cross_entropy


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


@pytest.mark.parametrize("mode", ["mixed", "amp"])
def test_dice_and_cross_entropy_are_fp32_in_every_mode(mode: str) -> None:
    torch.manual_seed(0)
    precision, model = Precision(mode), nn.Conv2d(1, 2, 1)
    model, _ = precision.prepare(model, torch.optim.SGD(model.parameters()))
    # 2 · 70,000 pixels: their sum is above float16's largest number, 65,504.
    images, targets = torch.ones(2, 1, 700, 100), torch.ones(2, 700, 100, dtype=torch.int64)
    with precision.cast():
        output = dice_cross_entropy()(model, (images, targets))
        logits = model(images).float()
    assert torch.equal(output.loss, dice_cross_entropy().loss(logits, targets))
    assert output.loss.isfinite()
    assert output.loss.dtype == torch.float32


@pytest.mark.parametrize(("option", "value"), [("dice_weight", float("nan")), ("smooth", 0.0)])
def test_dice_and_cross_entropy_refuse(option: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"objective.{option}={value}: must be a finite number"):
        dice_cross_entropy(**{option: value})
