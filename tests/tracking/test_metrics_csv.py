"""The table of a run's numbers: rows in order, none twice after a resume, whatever lies there."""

from pathlib import Path

import pytest

from mpframe.tracking.metrics_csv import FILE_NAME, MetricsCsv


def text(folder: Path) -> str:
    return (folder / FILE_NAME).read_text()


def test_a_row_is_a_step_and_what_is_not_known_is_empty(tmp_path: Path) -> None:
    table = MetricsCsv(tmp_path, ["step", "train_loss", "val_loss"])
    table.add({"step": 10, "train_loss": 1 / 3})
    table.add({"step": 20, "val_loss": float("nan")})
    assert text(tmp_path) == "step,train_loss,val_loss\n10,0.333333333,\n20,,nan\n"
    MetricsCsv(tmp_path, ["step", "b"])  # A new run begins a new table.
    assert text(tmp_path) == "step,b\n"


def test_a_resumed_run_cuts_what_it_repeats_and_adds_its_columns(tmp_path: Path) -> None:
    table = MetricsCsv(tmp_path, ["step", "a", "b"])
    for step in (1, 2, 3):
        table.add({"step": step, "a": step, "b": 2})
    MetricsCsv(tmp_path, ["step", "b", "c"], before=3).add({"step": 3, "b": 3, "c": 4})
    assert text(tmp_path) == "step,a,b,c\n1,1,2,\n2,2,2,\n3,,3,4\n"


@pytest.mark.parametrize(
    ("there", "left"),
    [
        ("a,b\n1,2\n", "step,a\n"),  # no table
        ('step\n"1\n', "step,a\n"),
        ("step,a\n1,0.5\n2,0.2", "step,a\n1,0.5\n"),  # A kill cut it short.
    ],
)
def test_what_is_no_whole_row_is_dropped(tmp_path: Path, there: str, left: str) -> None:
    (tmp_path / FILE_NAME).write_text(there)
    MetricsCsv(tmp_path, ["step", "a"], before=9)
    assert text(tmp_path) == left
