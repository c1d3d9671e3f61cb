"""What a checkpoint tells a stranger about data, model and precision."""

import torch
from hydra.types import RunMode
from omegaconf import OmegaConf
from prepared import prepared
from torch import nn

from mpframe import OpLists, Precision
from mpframe.core.objective import StepOutput
from mpframe.data import Task
from mpframe.run.description import usage_of
from mpframe.training.objectives import model_loss

PAIRS = [(torch.ones(3, 4), torch.tensor(1))] * 2
SEARCHED = "hydra.searchpath=[file:///more]"
TEXTS = [{"input_ids": torch.ones(5).long(), "labels": torch.tensor(0)}] * 2
CLASSES = Task(PAIRS, PAIRS[:1], loss=nn.CrossEntropyLoss())


class Words(nn.Linear):
    def forward(self, input_ids, mask=None, labels=None):
        raise AssertionError("the model itself is not run")


def trainer(precision=None):
    layers = nn.Sequential(nn.Linear(4, 2), nn.LayerNorm(2))
    return prepared(layers, noisy, precision or Precision())


def unread(model, batch):
    raise KeyError("labels")


def noisy(model, batch):
    return StepOutput(model(torch.rand(1, 4) + torch.rand(())).sum())


def numbers(*shape, name="input", dtype="float32"):
    return {"name": name, "shape": [None, *shape], "dtype": dtype}


def test_the_inputs_are_what_the_objective_calls_the_model_with_null_if_unknown() -> None:
    """And no random number is taken from the run."""
    words = [numbers(5, name="input_ids", dtype="int64"), numbers(name="labels", dtype="int64")]
    two, odd = {"a": noisy, "b": noisy}, [("no", "tensor")]
    for task, expected in (
        (CLASSES, [numbers(3, 4)]),
        (Task(TEXTS, TEXTS, model_loss), words),
        (Task(PAIRS, PAIRS, noisy), [numbers(4)]),
        (Task(PAIRS, PAIRS, unread), None),
        (Task(odd, odd, unread), None),
        (Task(PAIRS, PAIRS, two), None),
    ):
        run = prepared(Words(4, 2), model_loss) if expected == words else trainer()
        before = torch.get_rng_state()
        assert usage_of(task, run)["inputs"] == expected
        assert torch.equal(torch.get_rng_state(), before)


def test_the_command_line_and_the_samples_of_each_part_are_noted(monkeypatch) -> None:
    """All that composed the run, also Hydra's flags, and of a sweep's job only its own options."""
    monkeypatch.setenv("SOME_TOKEN", "data/hidden")
    words = ["model=mlp", "dataset.root=data/hidden"]
    hydra = OmegaConf.create({
        "overrides": {"task": words, "hydra": [SEARCHED, "hydra.run.dir=out", "hydra.mode=RUN"]},
        "job": {"config_name": "mine"},
        "mode": RunMode.RUN,
        "runtime": {"cwd": "/work", "config_sources": [
            {"path": "my_pkg.conf", "schema": "pkg", "provider": "main"},
            {"path": "/work/own", "schema": "file", "provider": "command-line"},
        ]},
    })  # fmt: skip
    noted = usage_of(CLASSES, trainer(), hydra)
    flags = "--config-path=pkg://my_pkg.conf --config-dir=own --config-name=mine"
    first, options = f"mpframe train {flags} '{SEARCHED}'", "model=mlp 'dataset.root=***'"
    assert noted["command"] == f"{first} hydra.run.dir=out {options}"
    assert noted["samples"] == {"train": 2, "val": 1}
    hydra.mode = RunMode.MULTIRUN
    assert usage_of(CLASSES, trainer(), hydra)["command"] == f"{first} {options}"


def test_the_precision_names_the_half_weights_and_the_lists() -> None:
    mixed = {"mode": "mixed", "half": "bfloat16", "ops": "default", "loss_scaling": "none"}
    mixed |= {"evaluated_in": "mixed(bfloat16)", "half_weights": ["0.weight", "0.bias"]}
    moved = OpLists.named().moved({"linear": "deny"})
    for precision, expected in (
        (Precision("mixed", "bfloat16"), mixed),
        (Precision(), {"mode": "fp32", "half": None, "ops": None, "half_weights": []}),
        (Precision("amp", ops=moved), {"ops": "default, moved linear to deny"}),
    ):
        assert usage_of(CLASSES, trainer(precision))["precision"].items() >= expected.items()
