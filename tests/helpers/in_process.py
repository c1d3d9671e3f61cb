"""Runs in this process, as a command line would start them, and what they wrote."""

from collections.abc import Callable
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mpframe.config.command_line import check_config, compose_named, without_hydra
from mpframe.run.run import Run
from mpframe.tracking.summary import Summary

StartRun = Callable[..., Summary]


def train(folder: Path, *overrides: str) -> Summary:
    """Train as a command line would, in this process and into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    _, composed = compose_named(["callbacks.progress_bar=null", *overrides])
    own = without_hydra(composed)
    return Run(check_config(own), own, folder).train()


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every scalar tag of a run folder with its (step, value) pairs."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags}
