"""The record of a run's largest gradients, and its replay through a scaler."""

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import Patch, Shown, full

from mpframe import Backoff, Static
from mpframe.cli.commands.simulate import main as simulate
from mpframe.core.errors import DataError
from mpframe.lab.simulation import as_table, replay
from mpframe.tracking.records import AMAX_FILE, read_amax
from mpframe.training.callbacks.records import RecordAmax


def record_of(folder: Path, kept: int = 0) -> Any:
    record, run = RecordAmax(), SimpleNamespace(progress=SimpleNamespace(global_step=kept))
    record.setup(run, SimpleNamespace(folder=folder))
    return record


def add(record: Any, *values: float) -> None:
    for value in values:
        record.on_optimizer_step(None, SimpleNamespace(amax=torch.tensor(value)))


def written(folder: Path, *values: float, kept: int = 0) -> bytes:
    record = record_of(folder, kept)
    add(record, *values)
    record.teardown(None, None)
    return (folder / AMAX_FILE).read_bytes()


def test_a_record_is_read_back_and_a_resumed_one_keeps_what_came_before(tmp_path: Path) -> None:
    assert written(tmp_path, 1.0, 0.25, math.inf, 0.0, 3e-5).startswith(b"0\n-2\ninf\n-inf\n")
    amax = read_amax(tmp_path)
    assert amax[:4].tolist() == [1.0, 0.25, math.inf, 0.0]
    # Nine significant digits of log2: an error of 1e-8 octaves at most here.
    assert amax[4] == pytest.approx(3e-5, rel=1e-6)
    written(tmp_path, 64.0, kept=2)
    assert read_amax(tmp_path).tolist() == [1.0, 0.25, 64.0]
    (tmp_path / AMAX_FILE).write_bytes(b"\xff\xfe\n1\n2\n")  # One that is no text is carried on.
    assert written(tmp_path, 8.0, kept=2) == b"\xff\xfe\n1\n3\n"
    (tmp_path / AMAX_FILE).write_bytes(b"0\n-2")  # A kill cut it short.
    assert written(tmp_path, 8.0, kept=2) == b"0\n3\n"


def test_a_long_record_is_written_before_its_flush_and_a_bad_one_is_refused(tmp_path: Path) -> None:
    record, file = record_of(tmp_path), tmp_path / "record.txt"
    add(record, *[2.0] * 1000)
    assert (tmp_path / AMAX_FILE).read_text().splitlines() == ["1"] * 768
    with pytest.raises(DataError, match="No such file"):
        read_amax(file)
    for content, line in ((b"", "no steps rec"), (b"0\nx\n", "one num"), (b"\xff\n", "one num")):
        file.write_bytes(content)
        with pytest.raises(DataError, match=line):
            read_amax(file)


def test_what_finds_no_room_is_written_later(tmp_path: Path, monkeypatch: Patch) -> None:
    record = record_of(tmp_path)
    add(record, 2.0)
    with monkeypatch.context() as patched:
        patched.setattr("mpframe.training.callbacks.records.append_whole", full)
        with pytest.raises(OSError, match="No space left"):
            record.on_save(None)
    add(record, 4.0)
    record.on_save(None)
    assert read_amax(tmp_path).tolist() == [2.0, 4.0]


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_a_scale_skips_products_beyond_the_range_and_backoff_is_told(half: torch.dtype) -> None:
    limit = torch.finfo(half).max
    amax = np.array([limit / 8.0, limit / 4.0, limit / 2.0, math.inf, math.nan, 0.0])
    done = replay(amax, Static(4.0), half)
    assert done.skipped.tolist() == [False, False, True, True, True, False]
    assert done.headroom[:2].tolist() == [1.0, 0.0]
    assert np.isnan(done.headroom[2:]).all()
    assert (done.mean_headroom, len(set(done.scales))) == (0.5, 1)
    backoff = Backoff(init_scale=2.0**16, growth_interval=2)
    done = replay(np.full(5, 4.0), backoff, torch.float16)
    assert done.scales.tolist() == [2.0**16, 2.0**15, 2.0**14, 2.0**13, 2.0**13]
    assert done.skipped.tolist() == [True, True, True, False, False]
    assert "5      3        1.00" in as_table({"Backoff": done}).replace("Backoff  ", "")


def test_the_command_prints_scalers_side_by_side_or_a_users(tmp_path: Path, capsys: Shown) -> None:
    (tmp_path / "record.txt").write_text("-3\n-4\n5\ninf\n" * 20)
    run = f"run={tmp_path / 'record.txt'}"
    simulate([run, "loss_scaling=LogMax,Backoff"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "20 steps overflowed in the run itself and are left out"
    assert [line.split()[0] for line in lines[1:]] == ["scaler", "LogMax", "Backoff", "picture:"]
    assert (tmp_path / "record.scaling.png").exists()
    # Any class, by its target; the picture of a run that may be foreign is written through no link.
    (tmp_path / "log2_amax.txt").write_text("-3\n" * 20)
    (tmp_path / "precious").write_text("years of work")
    (tmp_path / "scaling.png").symlink_to(tmp_path / "precious")
    own = "loss_scaling._target_=mpframe.core.loss_scaling.Static"
    simulate([f"run={tmp_path}", own, "loss_scaling.scale=4096"])
    row = capsys.readouterr().out.splitlines()[1].split()
    assert (row[0], row[2], row[-1]) == ("static", "0", "4096")
    assert (tmp_path / "precious").read_text() == "years of work"
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("record", "word", "said"), [
    ("-3\n", "out=RUN/a.png", "out=.*record.txt is a file; .*"),
    ("-3\n", "loss_scaling=LogMin", "loss_scaling=LogMin: choose .*; nearest: LogMax"),
    ("-3\n", "loss_scaling=none", "loss_scaling=none: has no scale to replay; choose static, .*"),
    ("inf\n", "loss_scaling=LogMax",
     ".*record.txt: every recorded step overflowed, and nothing is left to replay"),
])  # fmt: skip
def test_a_mistake_is_one_line(
    record: str, word: str, said: str, here: Path, capsys: Shown
) -> None:
    run = here / "record.txt"
    run.write_text(record)
    with pytest.raises(SystemExit):
        simulate([f"run={run}", word.replace("RUN", str(run))])
    assert re.fullmatch(f"mpframe: {said}\n", capsys.readouterr().err)
