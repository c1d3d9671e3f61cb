"""The group `objective`: the shipped choices, a user's own, and the page that shows them."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import StartRun

from mpframe.cli.commands.evaluate import evaluate
from mpframe.config.command_line import check_config, compose_named, without_hydra
from mpframe.config.locations import CONF
from mpframe.core.errors import DataError, MpframeError
from mpframe.core.objective import Objective, Supervised
from mpframe.run.parts import build_task, to_device
from mpframe.run.trainer import build_trainer
from mpframe.tracking.summary import Summary
from mpframe.training.objectives import cross_entropy, model_loss

PAGE = (CONF.parent / "docs" / "objectives.md").read_text()
SHORT = ["model=mlp", "model.hidden=16", "trainer.max_steps=2"]


def objective_of(*overrides: str) -> Any:
    return build_task(check_config(without_hydra(compose_named(list(overrides))[1]))).objective


def test_the_default_is_the_datasets_own() -> None:
    own = objective_of("objective=task")
    assert isinstance(own, Supervised)
    assert own.source == "dataset: the loss CrossEntropyLoss"


def test_cross_entropy_takes_weights_and_label_smoothing() -> None:
    own = objective_of(
        "objective=cross_entropy", "objective.label_smoothing=0.25", "objective.weight=[1,2,0.5]"
    )
    logits, targets = torch.randn(8, 3), torch.arange(8) % 3
    expected = torch.nn.functional.cross_entropy(
        logits, targets, torch.tensor([1.0, 2.0, 0.5]), label_smoothing=0.25
    )
    assert torch.equal(own(torch.nn.Identity(), (logits, targets)).loss, expected)


def test_the_other_shipped_objectives() -> None:
    outputs, targets = torch.randn(8, 3), torch.randn(8, 3)
    loss = objective_of("objective=mse")(torch.nn.Identity(), (outputs, targets)).loss
    assert torch.equal(loss, torch.nn.functional.mse_loss(outputs, targets))
    assert objective_of("objective=model_loss") is model_loss
    nested = objective_of(
        "objective._target_=mpframe.core.objective.supervised",
        "objective.loss._target_=torch.nn.HuberLoss",
        "objective.loss.delta=0.5",
    )
    assert nested.loss.delta == 0.5


def test_a_run_with_label_smoothing_is_evaluated_with_it(
    start_run: StartRun, tmp_path: Path
) -> None:
    options = ["objective=cross_entropy", "objective.label_smoothing=0.1", "dtype=mixed"]
    smooth = start_run(tmp_path, *SHORT, *options)
    assert evaluate(tmp_path, []).evaluation.loss == smooth.test_loss
    other = evaluate(tmp_path, ["objective.label_smoothing=0.0"]).evaluation.loss
    plain = evaluate(tmp_path, ["objective=task"]).evaluation.loss
    assert other == plain != smooth.test_loss


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["objective=cross_entropy", "objective.label_smoothing=2"], r"objective\.label_smoothing=2: must be >= 0 and <= 1"),
        (["objective=cross_entropy", "objective.weight=[1,-1]"], r"objective\.weight=\[1, -1\]: must be finite numbers >= 0, or null"),
        (["objective=cross_entropy", "+objective.smoothing=0.1"], r"objective\.smoothing=0\.1: mpframe\.training\.objectives\.cross_entropy takes no such argument; nearest: label_smoothing"),
        (["objective._target_=torch.nn.L1Loss"], r"objective\._target_=torch\.nn\.L1Loss: is a loss; use objective\._target_=mpframe\.core\.objective\.supervised objective\.loss\._target_=torch\.nn\.L1Loss"),
        (["objective._target_=builtins.dict"], r"objective\._target_=builtins\.dict: must be a function objective\(model, batch\) that returns a StepOutput, not a dict of nothing"),
        (["objective._target_=mpframe.training.objectives.model_loss", "objective.strength=1"], r"objective\.strength=1: mpframe\.training\.objectives\.model_loss takes no such argument; it takes model, batch"),
        (["objective._target_=nowhere.mine"], r"objective\._target_=nowhere\.mine: "),
    ],
)  # fmt: skip
def test_what_is_no_objective_is_one_line(overrides: list[str], line: str) -> None:
    with pytest.raises(MpframeError, match=f"^{line}") as caught:
        objective_of(*overrides)
    assert "\n" not in str(caught.value)


def test_weights_of_classes_follow_the_model_to_its_device() -> None:
    own: Objective = cross_entropy([1.0, 2.0])
    to_device(own, torch.device("meta"))
    assert own.loss.weight.device.type == "meta"  # type: ignore[attr-defined]


EXAMPLES = {
    "supervised": ["dataset._target_=my_pkg.points", "model=mlp", "model.in_features=8", "model.classes=2"],
    "model_loss": ["objective=model_loss", "dataset._target_=my_pkg.sentences", "model._target_=my_pkg.Classifier"],
    "own": ["objective._target_=my_pkg.consistent", "objective.strength=0.5", "model=mlp"],
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_of_the_page_train(
    name: str, start_run: StartRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = re.search(rf"<!-- run: {name} -->\n```python\n(.*?)```", PAGE, re.S)
    assert found is not None
    (tmp_path / "my_pkg.py").write_text(found[1])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_pkg", raising=False)
    options = ["dataset.batch_size=32", "trainer.max_steps=2", "dtype=mixed"]
    summary = start_run(tmp_path / "run", *EXAMPLES[name], *options)
    assert (summary.status, summary.steps) == ("finished", 2)
    assert Summary.read(tmp_path / "run").val_loss == summary.val_loss


def test_a_task_may_leave_the_objective_to_the_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "from torch.utils.data import Dataset\nfrom mpframe.data import Task\n"
    (tmp_path / "no_loss.py").write_text(
        f"{text}def task():\n    return Task(Dataset(), Dataset())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ["dataset._target_=no_loss.task", "model._target_=torch.nn.Linear"]
    words += ["+model.in_features=1", "+model.out_features=1"]
    assert objective_of(*words, "objective=model_loss") is model_loss
    config = check_config(compose_named(words)[1])
    with pytest.raises(DataError, match=r"^dataset: its Task has no objective; give it one"):
        build_trainer(config, build_task(config), batches=4)
