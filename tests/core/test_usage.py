"""What a checkpoint tells a stranger about data, model and precision."""

from typing import Any

import torch
from torch import Tensor, nn

from mpframe import OpLists, Precision, Trainer
from mpframe.core.objective import StepOutput
from mpframe.core.optim.master_weights import MasterWeights
from mpframe.data import Task
from mpframe.run.description import usage_of
from mpframe.training.objectives import model_loss

PAIRS = [(torch.ones(3, 4), torch.tensor(1))] * 2
TEXTS = [{"input_ids": torch.ones(5).long(), "labels": torch.tensor(0)}] * 2


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, input_ids: Tensor, mask: Tensor | None = None, labels: Any = None) -> Any:
        raise AssertionError("the model itself is not run")


def trainer(model: nn.Module, task: Task, precision: Precision | None = None) -> Trainer:
    precision = precision or Precision()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    _, optimizer = precision.prepare(model, optimizer)
    assert isinstance(optimizer, MasterWeights)
    return Trainer(model, optimizer, task.objective, precision=precision)  # type: ignore[arg-type]


def inputs(model: nn.Module, task: Task) -> Any:
    return usage_of(task, trainer(model, task))["inputs"]


def test_the_inputs_are_what_the_objective_calls_the_model_with() -> None:
    task = Task(PAIRS, PAIRS, loss=nn.CrossEntropyLoss())  # type: ignore[arg-type]
    expected = [{"name": "input", "shape": [None, 3, 4], "dtype": "float32"}]
    assert inputs(nn.Sequential(nn.Linear(4, 2)), task) == expected
    task = Task(TEXTS, TEXTS, model_loss)  # type: ignore[arg-type]
    assert inputs(Words(), task) == [
        {"name": "input_ids", "shape": [None, 5], "dtype": "int64"},
        {"name": "labels", "shape": [None], "dtype": "int64"},
    ]


def unread(model: nn.Module, batch: Any) -> StepOutput:
    raise KeyError("labels")


def noisy(model: nn.Module, batch: Any) -> StepOutput:
    return StepOutput(model(torch.rand(1, 4) + torch.rand(())).sum())


def test_inputs_that_cannot_be_known_are_null() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    for task in (
        Task(PAIRS, PAIRS, unread),  # type: ignore[arg-type]
        Task([(1, 2)], [("no", "tensor")], unread),  # type: ignore[arg-type]
        Task(PAIRS, PAIRS, {"a": noisy, "b": noisy}),  # type: ignore[arg-type]
    ):
        known = trainer(model, Task(PAIRS, PAIRS, noisy))  # type: ignore[arg-type]
        assert usage_of(task, known)["inputs"] is None


def test_no_random_number_is_taken_from_the_run() -> None:
    task = Task(PAIRS, PAIRS, noisy)  # type: ignore[arg-type]
    run = trainer(nn.Sequential(nn.Linear(4, 2)), task)
    before = torch.get_rng_state()
    assert usage_of(task, run)["inputs"] == [
        {"name": "input", "shape": [None, 4], "dtype": "float32"}
    ]
    assert torch.equal(torch.get_rng_state(), before)


def test_the_precision_names_the_half_weights_and_the_lists() -> None:
    task = Task(PAIRS, PAIRS, loss=nn.CrossEntropyLoss())  # type: ignore[arg-type]

    def precision(model: nn.Module, own: Precision) -> Any:
        return usage_of(task, trainer(model, task, own))["precision"]

    model = nn.Sequential(nn.Linear(4, 2), nn.LayerNorm(2))
    assert precision(model, Precision("mixed", "bfloat16")) == {
        "mode": "mixed",
        "half": "bfloat16",
        "ops": "default",
        "half_weights": ["0.weight", "0.bias"],
        "evaluated_in": "mixed(bfloat16)",
    }
    plain = precision(nn.Sequential(nn.Linear(4, 2)), Precision())
    assert (plain["mode"], plain["half"], plain["ops"]) == ("fp32", None, None)
    assert plain["half_weights"] == []
    moved = OpLists.named().moved({"linear": "deny"})
    own = precision(nn.Sequential(nn.Linear(4, 2)), Precision("amp", ops=moved))["ops"]
    assert own == "default, moved linear to deny"
