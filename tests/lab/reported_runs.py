"""Folders of runs for reports, and what a report makes of them."""

import base64
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from mpframe.lab.report.page import as_markdown, as_page
from mpframe.lab.report.records import Record, find_runs
from mpframe.lab.report.tables import RunGroup, group_runs, results
from mpframe.tracking.summary import Status, Summary
from mpframe.tracking.tracker import Tracker

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
SUMMARY = Summary(
    status=Status.FINISHED, steps=100, skipped_steps=0, epochs=1, train_loss=0.1, val_loss=0.2,
    metric="accuracy", val_metric=0.9, best=0.96, best_step=80, seconds=10.0, seed=1,
    samples_per_second=1000.0, median_step_seconds=0.004, peak_memory_bytes=100 * 2**20,
    dtype="fp32", loss_scaling="none", device="cpu", torch="2.11.0",
)  # fmt: skip
MIXED = replace(SUMMARY, dtype="mixed", half="float16", loss_scaling="Backoff", final_scale=65536.0)

MakeRun = Callable[..., Path]


def options_of(summary: Summary, **other: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "model": {"_target_": "mpframe.workloads.images.mlp", "hidden": 8},
        "dtype": {"mode": summary.dtype, "half": summary.half or "float16"},
        "loss_scaling": {"_target_": f"mpframe.core.loss_scaling.{summary.loss_scaling}"},
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1},
        "seed": summary.seed,
    }
    for path, value in other.items():
        section, _, name = path.partition("__")
        options[section] = {**options[section], name: value} if name else value
    return options


def write_run(top: Path, name: str, summary: Summary | None = SUMMARY, **options: Any) -> Path:
    """Write a run's folder. Its options are given as option__name=value."""
    folder = top / "sweep" / name
    folder.mkdir(parents=True)
    text = yaml.safe_dump(options_of(summary or SUMMARY, **options))
    (folder / "config_resolved.yaml").write_text(text)
    if summary is not None:
        summary.write(folder)
    return folder


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    return partial(write_run, tmp_path)


def read(folder: Path) -> tuple[list[Record], list[RunGroup]]:
    records = find_runs([folder])[1]
    return records, group_runs(records)


def table(folder: Path, of: Callable[..., list[list[str]]] = results) -> list[dict[str, str]]:
    head, *rows = of(read(folder)[1])
    return [dict(zip(head, row, strict=True)) for row in rows]


def texts(folder: Path, title: str = "t") -> tuple[str, str]:
    """The page and the Markdown."""
    records, groups = read(folder)
    return as_page(title, groups, records), as_markdown(title, groups, records)


def trace(folder: Path, *steps: dict[str, float]) -> None:
    with Tracker(folder) as tracker:
        for step, values in enumerate(steps, start=1):
            tracker.scalars(step, values)
