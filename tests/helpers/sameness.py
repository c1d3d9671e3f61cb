"""Whether two runs came to the same: weights, states, curves, records and summary, bit for bit."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import vocabulary
from in_process import scalars, train

from mpframe import checkpoint
from mpframe.tracking.amax_record import FILE_NAME

MEASURED = ("speed/samples_per_second", "speed/input_fraction", "memory/peak_bytes")
# `curves/last_step` holds measurements among others, which `curves` of a run tells apart.
LEFT_OUT = re.compile(
    rf"/({'|'.join(MEASURED)}|curves/last_step|throughput/(seconds|train_seconds|step_times))(/|$)"
)
MEASURED_SUMMARY = ("seconds", "train_seconds", "samples_per_second", "median_step_seconds",
                    "peak_memory_bytes")  # fmt: skip


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
        "amax": (folder / FILE_NAME).read_text(),
        "summary": {k: v for k, v in summary.items() if k not in MEASURED_SUMMARY},
    }


def assert_same_run(first: Path, second: Path) -> None:
    """Two runs came to the same, and the second's curves are complete and strictly increase."""
    curves = scalars(second)
    for tag, points in curves.items():
        steps = [step for step, _ in points]
        assert steps == sorted(set(steps)), f"{tag}: {steps}"
    for tag in MEASURED:
        assert [s for s, _ in curves[tag]] == [s for s, _ in scalars(first)[tag]], tag
    assert differing(results(first), results(second)) == []


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
