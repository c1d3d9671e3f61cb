"""Faults in users' code end in one line: whose code, what it gave, what is allowed, which batch."""

import multiprocessing
import re
from pathlib import Path
from typing import Any

import pytest
from fixtures import Patch, Shown
from in_process import command, composed
from omegaconf import DictConfig, open_dict

from mpframe.cli.commands import doctor as doctor_command
from mpframe.config.command_line import check_config
from mpframe.core.errors import MpframeError, UserCodeError
from mpframe.run.run import Run
from mpframe.tracking.summary import Summary

WORDS = "dataset._target_=erring.task model._target_=erring.Net dataset.batch_size=16 "
WORDS += "trainer.epochs=1 loss_scaling=static callbacks.progress_bar=null "
ALIASES = {
    "FULL": "HYDRA_FULL_ERROR=1 shows the traceback",
    "FORMATS": "inputs must have the format of the weights, float32 (x.float()) for most layers and int64 for an embedding",
    "IN": "given inputs float32 [16, 8]",
    "OUT": "given outputs float32 [16, 3] and targets int64 [16] of 0 to",
    "WEIGHTS": "compute it from the weights by PyTorch's operations, without detach(), item(), numpy() or no_grad()",
    "AT0": "(training, epoch 0, batch 0)",
}  # fmt: skip

FAULTS = {
    "dataset.fault=classes": "after step 3: dataset: the loss CrossEntropyLoss raised IndexError (Target 3 is out of bounds), OUT 3; the targets name 4 classes, the outputs have 3: let the model return 4, as by model.classes=4, or correct the labels (training, epoch 0, batch 3, sample 37)",
    "dataset.fault=negative": "after step 3: dataset: the loss CrossEntropyLoss raised IndexError (Target -3 is out of bounds), given outputs float32 [16, 3] and targets int64 [16] of -3 to 2; -3 is no class: correct the label, or use -100, which is left out (training, epoch 0, batch 3, sample 37)",
    "dataset.fault=float": "after step 0: dataset: the loss CrossEntropyLoss raised RuntimeError (expected TORCH), given outputs float32 [16, 3] and targets float64 [16]; FULL AT0",
    "dataset.fault=uint8": "after step 0: model: Net raised RuntimeError (mat1 and mat2 must have the same dtype, but got Byte and Float) at erring.py:N, given inputs uint8 [16, 8] of 8 to 127; FORMATS AT0",
    "dataset.fault=length": "dataset: the __len__ of Samples raised OSError (no such list) at erring.py:N; FULL",
    "dataset.fault=exit dataset.workers=1": "after step 3: dataset: sample 37 cannot be read: SystemExit (0) at erring.py:N; fix the dataset or its data",
    "dataset.loss=each": "after step 0: dataset: the loss each_loss gave float32 [16]; it must give one floating-point number as a tensor, the mean over the batch AT0",
    "dataset.loss=detached": "after step 0: dataset: the loss detached_loss gave a number without a gradient; WEIGHTS AT0",
    "dataset.loss=tensor": "after step 0: objective: tensor_objective gave float32 []; it must give a StepOutput, as in StepOutput(loss, outputs, targets) AT0",
    "dataset.loss=no_outputs": "after step 4: objective: gave no outputs, and the metric accuracy measures them; let it return StepOutput(loss, outputs, targets) (validation, epoch 0, batch 0)",
    "dataset.metric=words": "after step 4: metrics.accuracy: Words raised ValueError (could not convert string to float: 'good'); HYDRA_FULL_ERROR=1 shows the traceback",
    "model.fault=frozen": "model: Net has no weight to train (2 are frozen); leave requires_grad to some",
    "model.fault=exit_later": "after step 4: model: Net raised SystemExit (0) at erring.py:N, IN; FULL (validation, epoch 0, batch 0)",
    "model.fault=exit_mode": "the run was ended by SystemExit (0) at erring.py:N; let it return",
    "model.fault=backward": "after step 0: model: the backward pass of Net raised RuntimeError (one of the variables needed for gradient computation TORCH); FULL AT0",
    "model.fault=tuple": "after step 0: dataset: the loss CrossEntropyLoss raised TypeError (cross_entropy_loss(): argument 'input' (position 1) must be Tensor, not tuple), given outputs a tuple of float32 [16, 3], float32 [16, 3] and targets int64 [16] of 0 to 2; let the model return one tensor, or give the dataset a loss for what it returns AT0",
    "model.fault=detached": "after step 0: model: Net gave outputs without a gradient; WEIGHTS AT0",
    "optimizer._target_=erring.StuckSGD": "after step 0: optimizer: StuckSGD raised ArithmeticError (no way down) at erring.py:N; FULL AT0",
    "scheduler._target_=erring.Exits": "after step 3: scheduler: Exits raised SystemExit (0) at erring.py:N; FULL (training, epoch 0, batch 2)",
    "loss_scaling=Backoff loss_scaling.init_scale=probe dataset.loss=each": "after step 0: dataset: the loss each_loss gave float32 [16]; it must give one floating-point number as a tensor, the mean over the batch",
}  # fmt: skip
SOUND = ["dtype=fp32 model.fault=float64 dataset.fault=float64 dataset.split=both"]
SOUND += ["dtype=amp model._target_=erring.embedded dataset.fault=int64 dataset.split=both"]
SOUND += ["dtype=mixed model.fault=lazy", "dataset.loss=half"]
SOUND += ["dataset.whole=true dataset.fault=grad dataset.workers=1 trainer.timeout=20"]
DOCTOR = {
    "dataset.loss=each": "dataset: the loss each_loss gave",
    "model.fault=exit_mode": r"the command was ended by SystemExit \(0\) at erring\.py:\d+; let",
}


def words_of(options: str) -> list[str]:
    given = dict(word.split("=", 1) for word in (WORDS + options).split())
    return [f"{name}={value}" for name, value in given.items()]


def start(folder: Path, options: str, hydra: DictConfig | None = None) -> Summary:
    """Train; plain values are set where the others have been composed, once for all tests."""
    words = options.split()
    plain = [word for word in words if re.match(r"(dataset|model)\.[^_]\w+=", word)]
    own = composed(*words_of(" ".join(word for word in words if word not in plain)))
    with open_dict(own):
        own.merge_with_dotlist(plain)
    folder.mkdir(exist_ok=True)
    return Run(check_config(own), own, folder, hydra).train()


@pytest.mark.parametrize("options", FAULTS)
def test_a_fault_is_one_line(options: str, tmp_path: Path) -> None:
    line = re.sub(r"\b[A-Z]+0?\b", lambda found: ALIASES.get(found[0], found[0]), FAULTS[options])
    pattern = re.escape(line).replace("erring\\.py:N", r"erring\.py:\d+")
    pattern = pattern.replace("TORCH", ".+")  # Each version has its own words.
    with pytest.raises(MpframeError) as caught:
        start(tmp_path, options)
    assert re.fullmatch(pattern, str(caught.value)), str(caught.value)
    assert caught.value.exit_code == 1
    summary = Summary.read(tmp_path)
    assert (summary.status, summary.reason) == ("failed", str(caught.value))


@pytest.mark.parametrize("options", SOUND)
def test_what_is_no_fault_trains(options: str, tmp_path: Path) -> None:
    summary = start(tmp_path, options)
    assert (summary.status, summary.steps, summary.skipped_steps) == ("finished", 4, 0)


def test_a_failed_run_leaves_no_worker_behind(tmp_path: Path, monkeypatch: Patch) -> None:
    """Whoever still holds a loader."""
    held: list[Any] = []
    fit = Run._fit_with
    monkeypatch.setattr(Run, "_fit_with", lambda *words: held.extend(words[2]) or fit(*words))
    others = multiprocessing.active_children()  # Of the tests themselves: their ranks.
    with pytest.raises(MpframeError, match="KeyError"):
        start(tmp_path, "dataset.workers=1 model.fault=raises")
    assert any(held)
    assert set(multiprocessing.active_children()) <= {*others}


def test_a_module_that_ends_the_program_is_named(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "exiting.py").write_text("import sys\n\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    said = r"^model\._target_=exiting\.Net: SystemExit \(0\) at exi"
    with pytest.raises(MpframeError, match=said):
        start(tmp_path / "run", "model._target_=exiting.Net")


@pytest.mark.parametrize(("fault", "said"), DOCTOR.items())
def test_the_doctor_says_the_same(fault: str, said: str, capsys: Shown) -> None:
    with pytest.raises(SystemExit) as caught:
        doctor_command.main(words_of(fault))
    assert caught.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"mpframe: {said}", line)


def test_a_traceback_is_in_the_log_and_shown_on_demand(here: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(UserCodeError, match=r"^after step 0: model: Net raised KeyError"):
        command("hydra.run.dir=run", *words_of("model.fault=raises"))
    log = (here / "run" / "train.log").read_text()
    assert re.search(r'Traceback.*erring\.py", line \d+, in forward\n\s+raise Key', log, re.S)
