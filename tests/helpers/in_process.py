"""Runs in this process, as a command line would start them, and what they wrote."""

import os
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path

from omegaconf import DictConfig
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mpframe.config.command_line import check_config, compose_named, without_hydra
from mpframe.run.run import Run
from mpframe.tracking.summary import Summary

StartRun = Callable[..., Summary]
HYDRA = {
    "job": {"name": "train"}, "overrides": {"task": []}, "mode": "RUN", "sweep": {"dir": "."},
    "runtime": {"cwd": ".", "config_sources": [], "choices": {}},
}  # fmt: skip


@cache
def _composed(place: str, *words: str) -> DictConfig:
    return without_hydra(compose_named(list(words))[1])


def composed(*overrides: str) -> DictConfig:
    """The options of a command line; those of a resumed run are composed with the first one's."""
    resumes = [word for word in overrides if word.startswith("resume=")]
    own = deepcopy(_composed(os.getcwd(), *(word for word in overrides if word not in resumes)))
    own.merge_with_dotlist(resumes)
    return own


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


def texts(folder: Path, tag: str) -> list[tuple[int, str]]:
    return [(e.step, e.tensor_proto.string_val[0].decode()) for e in events(folder).Tensors(tag)]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every scalar tag of a run folder with its (step, value) pairs."""
    found = events(folder)
    read = {tag: found.Scalars(tag) for tag in found.Tags()["scalars"]}
    return {tag: [(e.step, e.value) for e in points] for tag, points in read.items()}
