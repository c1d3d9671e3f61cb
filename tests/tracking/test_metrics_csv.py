"""The table of a run's numbers: rows in order, none twice after a resume, whatever lies there."""

import csv
from pathlib import Path

import pytest

from mpframe.tracking.metrics_csv import FILE_NAME, MetricsCsv


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / FILE_NAME).open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_is_a_step_and_what_is_not_known_is_empty(tmp_path: Path) -> None:
    table = MetricsCsv(tmp_path, ["step", "train_loss", "val_loss"])
    table.add({"step": 10, "train_loss": 1 / 3})
    table.add({"step": 20, "val_loss": float("nan")})
    text = (tmp_path / FILE_NAME).read_text()
    assert text == "step,train_loss,val_loss\n10,0.333333333,\n20,,nan\n"


def test_rows_of_steps_that_are_taken_again_are_cut(tmp_path: Path) -> None:
    table = MetricsCsv(tmp_path, ["step", "a"])
    for step in (1, 2, 3):
        table.add({"step": step, "a": step})
    MetricsCsv(tmp_path, ["step", "a"], before=3).add({"step": 3, "a": 30})
    assert [(row["step"], row["a"]) for row in rows(tmp_path)] == [
        ("1", "1"),
        ("2", "2"),
        ("3", "30"),
    ]


def test_columns_keep_their_places_and_new_ones_come_behind(tmp_path: Path) -> None:
    MetricsCsv(tmp_path, ["step", "a", "b"]).add({"step": 1, "a": 1, "b": 2})
    MetricsCsv(tmp_path, ["step", "b", "c"], before=2).add({"step": 2, "b": 3, "c": 4})
    assert (tmp_path / FILE_NAME).read_text() == "step,a,b,c\n1,1,2,\n2,,3,4\n"


def test_a_new_run_begins_a_new_table(tmp_path: Path) -> None:
    MetricsCsv(tmp_path, ["step", "a"]).add({"step": 1, "a": 1})
    MetricsCsv(tmp_path, ["step", "b"])
    assert (tmp_path / FILE_NAME).read_text() == "step,b\n"


@pytest.mark.parametrize("text", ["a,b\n1,2\n", 'step\n"1\n'])
def test_what_is_no_table_is_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    MetricsCsv(tmp_path, ["step", "a"], before=9)
    assert (tmp_path / FILE_NAME).read_text() == "step,a\n"


def test_a_line_that_a_kill_cut_short_is_dropped(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("step,a\n1,0.5\n2,0.2")
    MetricsCsv(tmp_path, ["step", "a"], before=9)
    assert (tmp_path / FILE_NAME).read_text() == "step,a\n1,0.5\n"
