"""Every mode loads every other's checkpoint; the error is the rounding of the format, no more."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import Log
from torch import nn
from vocabulary import differing

from mpframe import Backoff, Precision, Trainer, checkpoint
from mpframe.checkpoint import Snapshot
from mpframe.core.objective import supervised
from mpframe.run.resume import load_state
from mpframe.training.callbacks.ema import AverageWeights, Ema, ema_of

PAIRS = [
    "fp32 fp32",
    "fp32 mixed(float16)",
    "amp(float16) mixed(bfloat16)",
    "mixed(float16) amp(float16)",
    "mixed(float16) fp32",
    "mixed(bfloat16) mixed(float16)",
]


def make(name: str) -> Trainer:
    mode, _, half = name.rstrip(")").partition("(")
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)
    )
    precision = Precision(mode, half or "float16")  # type: ignore[arg-type]
    model, masters = precision.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    ema = Ema({p: masters.master_of(p) for p in model.parameters()}, 0.9)
    scaler = Backoff(init_scale=1024.0) if half == "float16" else None
    objective = supervised(nn.CrossEntropyLoss())
    algorithms = {"ema": AverageWeights(ema, model)}
    return Trainer(model, masters, objective, precision, scaler=scaler, algorithms=algorithms)


def trained(name: str) -> Trainer:
    trainer = make(name)
    generator = torch.Generator().manual_seed(2)
    for _ in range(5):
        inputs = torch.randn(8, 1, 8, 8, generator=generator)
        trainer.train_step((inputs, torch.randint(0, 10, (8,), generator=generator)))
    return trainer


def through_a_file(trainer: Trainer, folder: Path) -> Any:
    checkpoint.save(folder, Snapshot(5, {"trainer": trainer.state_dict()}))
    return checkpoint.load(folder)["trainer"]


@pytest.mark.parametrize(("source", "target"), [pair.split() for pair in PAIRS])
def test_each_loads_the_others_checkpoint(
    source: str, target: str, tmp_path: Path, caplog: Log
) -> None:
    saved = through_a_file(trained(source), tmp_path)
    loaded = make(target)
    with caplog.at_level(logging.INFO):
        load_state(loaded, copy.deepcopy(saved))
    now = loaded.state_dict()
    for part in ("weights", "optimizer", "ema", "progress"):
        assert not differing(saved[part], now[part])
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter, saved["weights"][name].to(parameter.dtype)), name
    for name, buffer in loaded.model.named_buffers():
        assert torch.equal(buffer, saved["weights"][name]), name
    half = target[6:-1] if target.startswith("mixed") else ""
    rounded = f"4 parameters are rounded to {half}" if half else "no parameter is rounded"
    start = f"checkpoint of {source} taken into {target}: masters and optimizer state as they were,"
    line = "".join(caplog.messages)
    assert line.startswith(f"{start} {rounded}") if source != target else line == ""
    scaled = ["(float16)" in name for name in (source, target)]
    assert ("its loss scale is not used" in line) == (scaled == [True, False])
    assert ("the loss scale starts at its initial value" in line) == (scaled == [False, True])
    assert torch.isfinite(loaded.train_step((torch.randn(4, 1, 8, 8), torch.arange(4))).loss)


def test_what_lies_beyond_the_range_is_held_counted_and_kept_in_the_master(
    tmp_path: Path, caplog: Log
) -> None:
    source = trained("fp32")
    weight = source.model[4].weight.data
    weight[0, 0], weight[0, 1], weight[0, 2] = 1e6, -1e6, 65519.0  # the last rounds to 65504
    loaded = make("mixed(float16)")
    with caplog.at_level(logging.INFO):
        load_state(loaded, through_a_file(source, tmp_path))
    half = loaded.model[4].weight
    assert half[0, :3].tolist() == [65504.0, -65504.0, 65504.0]
    assert loaded.weights()["4.weight"][0, :3].tolist() == [1e6, -1e6, 65519.0]
    assert "3 values beyond its range clamped to it" in caplog.text


def test_the_average_starts_from_weights_that_are_loaded() -> None:
    source, target = trained("fp32"), make("mixed(float16)")
    target.load_weights(source.weights())
    for name, average in ema_of(target).by_name(target.model).items():  # type: ignore[union-attr]
        assert torch.equal(average, source.weights()[name])
