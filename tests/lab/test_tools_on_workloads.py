"""Ranges, autopsy and search on every workload at its small size; test_doctor.py has the doctor."""

from pathlib import Path

import pytest
import yaml
from in_process import StartRun
from tiny_experiments import EXPERIMENTS, tiny

from mpframe.cli.commands import search as search_command
from mpframe.core.errors import DivergedError
from mpframe.lab.autopsy import evidence
from mpframe.lab.ranges import KINDS, read_ranges

# The full sizes are of the same parts.
ONE_SIZE = ("bikes", "digits_mlp", "fashion_mnist_cnn", "fine_tuning_digits", "ladder_digits")
SMALL = [name for name in EXPERIMENTS if name.endswith("_small") or name in ONE_SIZE]
SHORT = ["device=cpu", "dtype=mixed", "trainer.max_steps=2", "trainer.eval_every=2"]

pytestmark = pytest.mark.parametrize("experiment", SMALL)


def test_ranges_are_counted(
    experiment: str, tiny_data: Path, start_run: StartRun, tmp_path: Path
) -> None:
    watched = ["numerics=on", "numerics.every=1"]
    start_run(tmp_path, *tiny(experiment, tiny_data), *SHORT, *watched)
    *_, last = reports = read_ranges(tmp_path)  # A step that is skipped is reported, too.
    assert [report.step for report in reports] == list(range(1, len(reports) + 1))
    for kind in KINDS:
        assert sum(int(bins.sum()) for bins in last.bins(kind)) > 0, kind


def test_an_overflow_is_examined(
    experiment: str, tiny_data: Path, start_run: StartRun, tmp_path: Path
) -> None:
    """At a scale of 2^40 the gradient of the loss itself is beyond float16."""
    far = ["loss_scaling=static", f"loss_scaling.scale={2**40}", "trainer.max_consecutive_skips=2"]
    if experiment == "fine_tuning_digits":  # At first only its head learns, which is in fp32.
        far.append("callbacks.freeze=null")
    with pytest.raises(DivergedError):
        start_run(tmp_path, *tiny(experiment, tiny_data), *SHORT, *far)
    (found,) = evidence.all_in(tmp_path)
    text = (found / "report.md").read_text()
    assert text.startswith("# autopsy of step 1: "), text
    assert "- **where**: " in text, text
    assert "backward pass" in text, text


def test_the_search_ends_with_lists_to_use(
    experiment: str, tiny_data: Path, start_run: StartRun, tmp_path: Path
) -> None:
    small = ["batches=1", "prove=2", "seeds=1", "target=0.5", f"out={tmp_path / 'search'}"]
    words = [*tiny(experiment, tiny_data), "device=cpu", "dtype=mixed"]
    search_command.main([*words, *small])
    found = yaml.safe_load((tmp_path / "search" / "ops.yaml").read_text())
    pins = ",".join(f"{name}:{pin}" for name, pin in found["modules"].items())
    done = start_run(tmp_path / "run", *words, *SHORT[2:], f"ops.modules={{{pins}}}")
    assert done.status == "finished"
