"""A CSV file as a task: its numbers by hand, its splits, its second table, and what is refused."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import refused
from vocabulary import differing

from mpframe.core.errors import ConfigError, DataError
from mpframe.workloads.tables import data
from mpframe.workloads.tables.data import csv_table, split_rows

ROWS = 40


def row(number: int, **changed: Any) -> dict[str, Any]:
    return {"kind": "abcd"[number % 4], "size": number / 2, "price": number + 1, **changed}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    lines = [rows[0], *(own.values() for own in rows)]
    path.write_text("".join(",".join(map(str, line)) + "\n" for line in lines))


@pytest.fixture
def table(tmp_path: Path) -> Callable[..., Any]:
    """Writes a table whose cells some changes replace, and reads it, split by its order.

    kinds: the letters of a second table, with their places in the alphabet.
    """

    def read(changes: Any = None, kinds: str = "", file: str = "table.csv", **options: Any) -> Any:
        rows = [row(number) for number in range(ROWS)]
        for (number, name), cell in (changes or {}).items():
            rows[number][name] = cell
        write(tmp_path / "table.csv", rows)
        own = {"categorical": {"kind": 4}, "continuous": ["size"], "target": "price"}
        if kinds:
            write(tmp_path / "kinds.csv", [{"kind": k, "weight": ord(k) - 96} for k in kinds])
            own |= {"join": {"file": "kinds.csv", "by": "kind"}, "categorical": {}}
        return csv_table(str(tmp_path), file, **{**own, "split": "time", **options})

    return read


def parts_of(task: Any) -> list[list[float]]:
    parts = (task.train, task.val, task.test)
    return [part.fetch_batch(range(len(part)))["target"].tolist() for part in parts]


def test_the_numbers_of_a_row(table: Any) -> None:
    task = table()
    batch = task.train.fetch_batch([5])
    sizes = [number / 2 for number in range(32)]
    mean, std = sum(sizes) / 32, math.sqrt(sum((s - 7.75) ** 2 for s in sizes) / 32)
    assert torch.equal(batch["categorical"], torch.tensor([[2]]))  # b; 0 is what is unknown
    assert torch.equal(batch["continuous"], torch.tensor([[(2.5 - mean) / std]]))
    assert torch.equal(batch["target"], torch.tensor([6.0]))
    assert not differing(task.train[5], {name: values[0] for name, values in batch.items()})
    logs = np.log(np.arange(1.0, 33.0))
    assert (task.objective.mean, task.objective.std) == (logs.mean(), logs.std())


def test_a_category_of_later_rows_is_unknown_and_an_empty_cell_the_median(table: Any) -> None:
    """Of the training rows."""
    changes = {(39, "kind"): "new", (3, "size"): "", (16, "size"): 8.0}
    task = table(changes, fill_missing=True)
    assert torch.equal(task.test.fetch_batch([3])["categorical"], torch.tensor([[0]]))
    continuous = task.train.fetch_batch([3, 16])["continuous"]
    assert torch.equal(continuous[0], continuous[1])
    told = task.preprocessing
    assert told["categorical"] == {"kind": ["a", "b", "c", "d"]}
    assert told["continuous"]["size"].keys() == {"median", "mean", "std"}
    assert told["continuous"]["size"]["median"] == 8.0
    assert told["target"].keys() == {"log_mean", "log_std"}


@pytest.mark.parametrize("backwards", [True, False])
def test_the_last_days_test(tmp_path: Path, backwards: bool) -> None:
    # Two a day, the newest first or last.
    days = (f"2015-{1 + n // 20:02d}-{1 + n // 2 % 10:02d}" for n in range(ROWS))
    rows = [row(n, when=day) for n, day in enumerate(days)]
    write(tmp_path / "t.csv", rows[::-1] if backwards else rows)
    names = [f"when.{part}" for part in ("year", "month", "day", "week", "weekday")]
    counts = dict(zip(names, (1, 2, 10, 4, 7), strict=True))
    task: Any = csv_table(str(tmp_path), "t.csv", counts, [], "price", "time", "when")
    parts = [sorted(part) for part in parts_of(task)[1:]]
    assert parts == [[33, 34, 35, 36], [37, 38, 39, 40]]
    told = task.preprocessing["categorical"]
    assert (told["when.year"], told["when.month"]) == (["2015"], ["1", "2"])
    assert told["when.week"] == ["1", "2", "5", "6"]  # Of the 1st to the 10th of both months.
    assert told["when.weekday"] == list("1234567")


def test_columns_may_be_constant_without_a_target_none_or_of_a_second_table(table: Any) -> None:
    constant = table({(number, "size"): 3 for number in range(ROWS)})
    assert torch.equal(constant.train[0]["continuous"], torch.zeros(1))
    zeros = table({(2, "price"): 0, (3, "price"): "0.0"}, drop_zeros=True)
    assert sum(map(len, parts_of(zeros))) == ROWS - 2
    assert table(continuous=[]).train[0]["continuous"].shape == (0,)
    assert table(categorical={}).train[0]["categorical"].shape == (0,)
    weights = table(kinds="dcba", continuous=["weight"])
    assert weights.preprocessing["continuous"]["weight"]["mean"] == 2.5
    values = weights.train.fetch_batch(range(4))["continuous"].flatten()
    assert torch.equal(values.argsort(), torch.arange(4))


def test_every_row_and_all_rows_of_one_time_are_in_one_part(table: Any) -> None:
    parts = parts_of(table(split="hold_out"))
    assert [len(part) for part in parts] == [32, 4, 4]
    assert sorted(parts[0] + parts[1] + parts[2]) == list(range(1, ROWS + 1))
    assert parts == parts_of(table(split="hold_out"))
    own = split_rows("time", np.array([0] * 15 + [1] * 3 + [2] * 2))
    assert [len(part) for part in own] == [15, 3, 2]
    for when in ([0] * 40, [0] * 36 + [1] * 4, [0, 1, 2]):
        text = refused(DataError, split_rows, "time", np.array(when))
        assert "make no training, validation and test part; give" in text


NO_NUMBER = "is not a finite number up to 1e30 (dataset.fill_missing=true allows empty cells); corr"
NO_LOG = "has no logarithm; the target must be above 0 (dataset.drop_zeros=true leaves out rows of"


@pytest.mark.parametrize(("changes", "options", "text"), [
    *(({(7, "size"): cell}, {}, f"FILE: row 9, column size: {cell!r} {NO_NUMBER}")
      for cell in ("tall", "", "nan", "-inf", "1e31")),
    *(({(7, "price"): cell}, {"drop_zeros": drop}, f"FILE: row 9, column price: {out} {NO_LOG}")
      for cell, drop, out in (("0", False, 0), ("-1", True, -1), ("1e-60", False, 0))),
    ({}, {"date": "kind"}, "FILE: row 2, column kind: 'a' is not a date as in 2015-07-31; cor"),
    ({}, {"continuous": ["sise"]}, "FILE: has 0 columns sise; name the columns of the file's "
     "first line; nearest: size"),
    ({}, {"categorical": {"kind": 5}}, "dataset.categorical.kind=5: the training part of FILE "
     "has 4; set dataset.categorical.kind=4"),
    ({}, {"split": "tim"}, "dataset.split=tim: must be one of hold_out, time"),
    ({}, {"kinds": "abc"}, "FILE: row 5, column kind: 'd' is in no row of FOLDER/kinds.csv; a"),
    ({}, {"kinds": "abca"}, "FOLDER/kinds.csv: row 5, column kind: 'a' is there twice; remove"),
    ({}, {"join": {"file": "table.csv", "by": "sort"}}, "FILE: has 0 columns sort; name the c"),
])  # fmt: skip
def test_what_makes_no_task(
    tmp_path: Any, table: Any, changes: Any, options: Any, text: str
) -> None:
    error = DataError if text.startswith("F") else ConfigError
    text = text.replace("FILE", f"{tmp_path}/table.csv").replace("FOLDER", str(tmp_path))
    assert refused(error, table, changes, **options).startswith(text)


def test_a_damaged_file(tmp_path: Path) -> None:
    file, link = tmp_path / "t.csv", tmp_path / "link.csv"
    for content, text in {
        b"a,b\n1,2\n1\n": f"{file}: row 3 has 1 cells and the header 2; correct the row",
        b"a,b,a\n1,2,3\n": f"{file}: has 2 columns a; name the columns of the file's first line",
        b"": f"{file}: has 0 columns a",
        b'a,b\n1,2\n"1,2\n': "cannot be read as CSV (unexpected end of data)",
        b"a,b\n\xff,2\n": "cannot be read as CSV ('utf-8' codec",
        b"a,b\n" + b"1" * 2**18: "cannot be read as CSV (field larger than field limit",
    }.items():
        file.write_bytes(content)
        assert text in refused(DataError, data.read_csv, file, ["a"])
    link.symlink_to("t.csv")
    assert "A link, which is not followed" in refused(OSError, data.read_csv, link)
    file.write_bytes(b'\xef\xbb\xbf"a","b"\r\n" x, y",2\r\n')  # A byte order mark and quotes.
    assert data.read_csv(file).columns == {"a": ["x, y"], "b": ["2"]}
