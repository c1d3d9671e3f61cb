"""Runs in this process, as a command line would start them, and whether two came to the same."""

import csv
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import vocabulary
from omegaconf import DictConfig, OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mpframe import checkpoint
from mpframe.config.command_line import check_config, compose_named, without_hydra
from mpframe.run.run import Run
from mpframe.tracking.records import AMAX_FILE
from mpframe.tracking.summary import Summary

StartRun = Callable[..., Summary]
HYDRA = {
    "job": {"name": "train", "config_name": "config"}, "overrides": {"task": [], "hydra": []},
    "mode": "RUN", "sweep": {"dir": "."},
    "runtime": {"cwd": ".", "config_sources": [], "choices": {}},
}  # fmt: skip
MEASURED = ("speed/samples_per_second", "speed/input_fraction", "memory/peak_bytes")
# `curves/last_step` holds measurements among others, which `curves` of a run tells apart.
LEFT_OUT = re.compile(
    rf"/({'|'.join(MEASURED)}|curves/last_step|throughput/(seconds|train_seconds|step_times))(/|$)"
)
MEASURED_SUMMARY = ("seconds", "train_seconds", "samples_per_second", "median_step_seconds",
                    "peak_memory_bytes")  # fmt: skip


@cache
def _composed(place: str, *words: str) -> DictConfig:
    return without_hydra(compose_named(list(words))[1])


VALUE = re.compile(r"resume=.*|(seed|[a-z_]+(\.\w+)+)=(-?\d+(\.\d+)?(e-?\d+)?|true|false)")


def composed(*overrides: str) -> DictConfig:
    """The options of a command line. Hydra composes in a fifth of a second, so a number is put
    into what it composed for other words before."""

    def is_there(option: str) -> bool:
        node, _, name = option.rpartition(".")
        takes_any = any(word.startswith(f"{node}._target_=") for word in overrides)
        return takes_any or name in (OmegaConf.select(config, node) or {} if node else config)

    place, values = os.getcwd(), [word for word in overrides if VALUE.fullmatch(word)]
    config = _composed(place, *(word for word in overrides if word not in values))
    values = [word for word in values if is_there(word.partition("=")[0])]
    config = deepcopy(_composed(place, *(word for word in overrides if word not in values)))
    config.merge_with_dotlist(values)
    return config


def train(folder: Path, *overrides: str, hydra: DictConfig | None = None) -> Summary:
    """Train as a command line would, in this process and into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    own = composed("callbacks.progress_bar=null", *overrides)
    return Run(check_config(own), own, folder, hydra).train()


def command(*words: str) -> int:
    """The exit code of the training command, in this process and the current folder."""
    from mpframe.cli.commands import train as training  # Few tests need what it imports.

    before, sys.argv = sys.argv, ["train.py", *words]
    try:
        training.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        sys.argv = before
    return 0


def events(folder: Path) -> EventAccumulator:
    everything = {"scalars": 0, "tensors": 0, "images": 0, "histograms": 0}
    return EventAccumulator(str(folder), size_guidance=everything).Reload()


def csv_rows(path: Path) -> list[dict[str, str]]:
    """Each row of the file by the names in its first line."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def texts(folder: Path, tag: str) -> list[tuple[int, str]]:
    return [(e.step, e.tensor_proto.string_val[0].decode()) for e in events(folder).Tensors(tag)]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = events(folder)
    read = {tag: found.Scalars(tag) for tag in found.Tags()["scalars"]}
    return {tag: [(e.step, e.value) for e in points] for tag, points in read.items()}


def differing(first: Any, second: Any) -> list[str]:
    """The paths at which two nested states differ; what is a measurement is left out."""
    return [path for path in vocabulary.differing(first, second) if not LEFT_OUT.search(path)]


def results(folder: Path) -> dict[str, Any]:
    """All that a run leaves, save for measurements of time and memory."""
    summary = json.loads((folder / "summary.json").read_text())
    newest = checkpoint.read(folder)
    return {
        "state": newest.state,
        "step": newest.global_step,
        "validation": newest.facts["validation"],
        "curves": scalars(folder),
        "amax": (folder / AMAX_FILE).read_text(),
        "summary": {k: v for k, v in summary.items() if k not in MEASURED_SUMMARY},
    }


def assert_same_run(first: Path, second: Path) -> None:
    """Two runs came to the same, and the second's curves are complete and strictly increase."""
    one, other = results(first), results(second)
    for tag, points in other["curves"].items():
        steps = [step for step, _ in points]
        assert steps == sorted(set(steps)), f"{tag}: {steps}"
    for tag in MEASURED:
        assert [s for s, _ in other["curves"][tag]] == [s for s, _ in one["curves"][tag]], tag
    assert differing(one, other) == []


def cut(whole: Path, target: Path, at: int = 4) -> Path:
    """A copy of a run's folder as a kill after step `at` and a few more steps would leave it."""
    shutil.copytree(whole, target)
    for path in checkpoint.all_in(target):
        if int(path.name[5:]) > at:
            shutil.rmtree(path)
    (target / "summary.json").unlink()
    return target


def trained(*options: str) -> Any:
    """A fixture: the folder of a run with these options, made once for a file of tests."""

    @pytest.fixture(scope="module")
    def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
        train(folder := tmp_path_factory.mktemp("run"), *options)
        return folder

    return run
