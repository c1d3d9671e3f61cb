"""A CSV file as a task: its numbers by hand, its splits, its second table, and what is refused."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpframe.core.errors import ConfigError, DataError
from mpframe.workloads.tables import data
from mpframe.workloads.tables.data import csv_table, split_rows

ROWS = 40
Table = Callable[..., Any]


def row(number: int) -> dict[str, Any]:
    return {"kind": "abcd"[number % 4], "size": number / 2, "price": number + 1}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    lines = [",".join(rows[0]), *(",".join(map(str, own.values())) for own in rows)]
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture
def table(tmp_path: Path) -> Table:
    """Writes a table whose cells some changes replace, and reads it, split by its order."""

    def read(changes: dict[tuple[int, str], object] | None = None, **options: Any) -> Any:
        rows = [row(number) for number in range(ROWS)]
        for (number, name), cell in (changes or {}).items():
            rows[number][name] = cell
        write(tmp_path / "table.csv", rows)
        own = {"categorical": {"kind": 4}, "continuous": ["size"], "target": "price"}
        return csv_table(str(tmp_path), "table.csv", **{**own, "split": "time", **options})

    return read


def refused(call: Callable[[], Any], error: type[Exception] = DataError) -> str:
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    return text


def targets(part: Any) -> list[float]:
    return part.fetch_batch(range(len(part)))["target"].tolist()


def parts_of(task: Any) -> list[list[float]]:
    return [targets(part) for part in (task.train, task.val, task.test)]


def test_every_row_is_in_one_part(table: Table) -> None:
    parts = parts_of(table(split="hold_out"))
    assert [len(part) for part in parts] == [32, 4, 4]
    assert sorted(parts[0] + parts[1] + parts[2]) == list(range(1, ROWS + 1))
    assert parts == parts_of(table(split="hold_out"))


def test_the_numbers_of_a_row(table: Table) -> None:
    task = table()
    batch = task.train.fetch_batch([5])
    sizes = [number / 2 for number in range(32)]
    mean, std = sum(sizes) / 32, math.sqrt(sum((s - 7.75) ** 2 for s in sizes) / 32)
    assert torch.equal(batch["categorical"], torch.tensor([[2]]))  # b; 0 is what is unknown
    assert torch.equal(batch["continuous"], torch.tensor([[(2.5 - mean) / std]]))
    assert torch.equal(batch["target"], torch.tensor([6.0]))
    sample = task.train[5]
    assert all(torch.equal(sample[name], batch[name][0]) for name in batch)
    logs = np.log(np.arange(1.0, 33.0))
    assert (task.objective.mean, task.objective.std) == (logs.mean(), logs.std())


def test_a_category_of_later_rows_is_unknown(table: Table) -> None:
    last = table({(39, "kind"): "new"}).test.fetch_batch([3])["categorical"]
    assert torch.equal(last, torch.tensor([[0]]))


def test_an_empty_cell_gets_the_median_of_the_training_rows(table: Table) -> None:
    task = table({(3, "size"): "", (16, "size"): 8.0}, fill_missing=True)
    continuous = task.train.fetch_batch([3, 16])["continuous"]
    assert torch.equal(continuous[0], continuous[1])
    told = task.preprocessing
    assert told["categorical"] == {"kind": ["a", "b", "c", "d"]}
    assert set(told["continuous"]["size"]) == {"median", "mean", "std"}
    assert told["continuous"]["size"]["median"] == 8.0
    assert set(told["target"]) == {"log_mean", "log_std"}


def test_odd_columns(table: Table) -> None:
    constant = table({(number, "size"): 3 for number in range(ROWS)})
    assert torch.equal(constant.train[0]["continuous"], torch.zeros(1))
    zeros = table({(2, "price"): 0, (3, "price"): "0.0"}, drop_zeros=True)
    assert sum(map(len, parts_of(zeros))) == ROWS - 2
    assert table(continuous=[]).train[0]["continuous"].shape == (0,)
    assert table(categorical={}).train[0]["categorical"].shape == (0,)


# time


@pytest.mark.parametrize("backwards", [True, False])
def test_the_last_days_test(tmp_path: Path, backwards: bool) -> None:
    rows = [  # Two a day, the newest first or last.
        {**row(n), "when": f"2015-{1 + n // 20:02d}-{1 + n // 2 % 10:02d}"} for n in range(ROWS)
    ]
    write(tmp_path / "t.csv", rows[::-1] if backwards else rows)
    parts = {"when.month": 2, "when.day": 10, "when.weekday": 7}
    task: Any = csv_table(str(tmp_path), "t.csv", parts, [], "price", "time", "when")
    assert sorted(targets(task.val)) == [33, 34, 35, 36]
    assert sorted(targets(task.test)) == [37, 38, 39, 40]
    assert task.preprocessing["categorical"]["when.month"] == ["1", "2"]


def test_rows_of_one_time_are_in_one_part() -> None:
    when = np.array([0] * 15 + [1] * 3 + [2] * 2)
    train, val, test = split_rows("time", when)
    assert (len(train), len(val), len(test)) == (15, 3, 2)


@pytest.mark.parametrize("when", [[0] * 40, [0] * 36 + [1] * 4, list(range(19))])
def test_too_few_times_make_no_parts(when: list[int]) -> None:
    assert "make no training, validation and test part; give" in refused(
        lambda: split_rows("time", np.array(when))
    )


def test_the_parts_of_a_date(tmp_path: Path) -> None:
    write(tmp_path / "t.csv", [{**row(number), "when": "2015-07-31"} for number in range(ROWS)])
    names = [f"when.{part}" for part in ("year", "month", "day", "week", "weekday")]
    task: Any = csv_table(str(tmp_path), "t.csv", dict.fromkeys(names, 1), [], "price", date="when")
    words = [words for (words,) in task.preprocessing["categorical"].values()]
    assert words == ["2015", "7", "31", "31", "5"]


# a second table


def second(folder: Path, *words: str) -> dict[str, Any]:
    write(folder / "kinds.csv", [{"kind": word, "weight": ord(word) - 96} for word in words])
    return {"join": {"file": "kinds.csv", "by": "kind"}, "categorical": {}}


def test_each_row_gets_the_columns_of_its_word(tmp_path: Path, table: Table) -> None:
    task = table(continuous=["weight"], **second(tmp_path, *"dcba"))
    assert task.preprocessing["continuous"]["weight"]["mean"] == 2.5
    values = task.train.fetch_batch(range(4))["continuous"].flatten()
    assert torch.equal(values.argsort(), torch.arange(4))


def test_a_second_table_that_does_not_fit(tmp_path: Path, table: Table) -> None:
    file, other = tmp_path / "table.csv", tmp_path / "kinds.csv"
    assert refused(lambda: table(**second(tmp_path, *"abc"))) == (
        f"{file}: row 5, column kind: 'd' is in no row of {other}; add it there"
    )
    assert refused(lambda: table(**second(tmp_path, *"abca"))) == (
        f"{other}: row 5, column kind: 'a' is there twice; remove one of the rows"
    )
    write(other, [{"sort": "a"}])
    assert refused(lambda: table(join={"file": "kinds.csv", "by": "kind"})) == (
        f"{other}: has no column kind (it has sort); correct dataset.join.by"
    )
    assert refused(lambda: table(join={"file": "kinds.csv"}), ConfigError) == (
        "dataset.join={'file': 'kinds.csv'}: needs file and by, and nothing else"
    )


# what is refused


@pytest.mark.parametrize("cell", ["tall", "", "nan", "-inf", "1e31", "1_000"])
def test_a_cell_that_is_no_number(tmp_path: Path, table: Table, cell: str) -> None:
    assert refused(lambda: table({(7, "size"): cell})) == (
        f"{tmp_path}/table.csv: row 9, column size: {cell!r} is not a finite number up to 1e30; "
        "correct the cell, or give dataset.fill_missing=true if it is empty"
    )


@pytest.mark.parametrize(("cell", "drop"), [("0", False), ("-1", True), ("1e-60", False)])
def test_a_target_without_logarithm(tmp_path: Path, table: Table, cell: str, drop: bool) -> None:
    shown = "0" if cell == "1e-60" else cell  # It is 0 in float32.
    assert refused(lambda: table({(7, "price"): cell}, drop_zeros=drop)) == (
        f"{tmp_path}/table.csv: row 9, column price: {shown} has no logarithm; the target must be "
        "above 0 (dataset.drop_zeros=true leaves out rows of 0)"
    )


def test_options_and_columns_that_do_not_fit(tmp_path: Path, table: Table) -> None:
    file = tmp_path / "table.csv"
    empty = {(number, "size"): "" for number in range(ROWS)}
    assert refused(lambda: table(empty, fill_missing=True)) == (
        f"{file}: column size is empty in all training rows; leave it out"
    )
    assert refused(lambda: table(date="kind")) == (
        f"{file}: row 2, column kind: 'a' is not a date as in 2015-07-31; correct the cell"
    )
    assert refused(lambda: table(categorical={"kind": 5}), ConfigError) == (
        f"dataset.categorical.kind=5: the training part of {file} has 4; set "
        "dataset.categorical.kind=4"
    )
    assert refused(lambda: table(continuous=["sise"])) == (
        f"{file}: has no column sise (nearest: size); name the columns of the file's first line"
    )
    assert refused(lambda: table(split="tim"), ConfigError) == (
        "dataset.split=tim: allowed are hold_out, time; nearest: time"
    )
    assert refused(lambda: csv_table(str(tmp_path), "other.csv", {}, ["size"], "price")) == (
        f"dataset.root={tmp_path}: no other.csv there; set dataset.root to its folder or to the "
        "file"
    )
    file_itself = csv_table(str(file), "no", {}, ["price"], "price")
    assert len(targets(file_itself.train)) == 32


def test_a_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "t.csv"

    def text_of(content: bytes) -> str:
        file.write_bytes(content)
        return refused(lambda: data.read_csv(file, ["a"]))

    assert text_of(b"a,b\n1,2\n1\n") == (
        f"{file}: row 3 has 1 cells and the header 2; correct the row"
    )
    assert text_of(b"a,b,a\n1,2,3\n") == (
        f"{file}: has 2 columns a; name the columns of the file's first line"
    )
    assert text_of(b"a,b\n") == f"{file}: has no rows below its header; get the file again"
    assert text_of(b"").startswith(f"{file}: has no column a")
    assert "cannot be read as CSV after row 2 (" in text_of(b'a,b\n1,2\n"1,2\n')
    assert "cannot be read as CSV after row 1 (" in text_of(b"a,b\n\xff,2\n")
    assert "above 1048576 characters" in text_of(b"a,b\n" + b"1" * 2**21)
    monkeypatch.setattr(data, "_MOST_ROWS", 2)
    assert "has more than 2 rows" in text_of(b"a\n1\n2\n3\n")
    (tmp_path / "link.csv").symlink_to("t.csv")
    link = tmp_path / "link.csv"
    assert "(A link, which is not followed)" in refused(lambda: data.read_csv(link))
    file.write_bytes(b'\xef\xbb\xbf"a","b"\r\n" x, y",2\r\n')  # A byte order mark and quotes.
    assert data.read_csv(file).columns == {"a": ["x, y"], "b": ["2"]}
