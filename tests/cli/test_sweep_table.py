"""A run's summary.json, and the table that a sweep keeps of its jobs."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from fixtures import Patch, Shown, refused
from in_process import csv_rows
from omegaconf import OmegaConf

from mpframe.cli.sweep import SweepTable
from mpframe.core.errors import MpframeError
from mpframe.lab.report.sweep import COLUMNS, as_text, find_jobs, write_table
from mpframe.tracking.summary import Status, Summary

SUMMARY = Summary(
    status=Status.FINISHED, steps=100, skipped_steps=2, epochs=3, train_loss=0.1,
    val_loss=0.123456, metric="accuracy", val_metric=0.973333, best=0.981111, best_step=80,
    seconds=12.3456, samples_per_second=1000.5, peak_memory_bytes=12345678901, dtype="mixed",
    half="float16", loss_scaling="Backoff", final_scale=65536.0, seed=1, device="cpu",
    torch="2.11.0",
)  # fmt: skip
PUBLISHED = """status steps skipped_steps epochs train_loss val_loss val_accuracy seconds
    samples train_seconds samples_per_second median_step_seconds
    peak_memory_bytes dtype half loss_scaling final_scale seed device torch
    reason monitor best best_step test_loss tested"""


def test_summary_has_the_published_keys_and_comes_back_as_it_was(tmp_path: Path) -> None:
    (numbers := replace(SUMMARY, train_loss=math.nan, val_metric=-math.inf)).write(tmp_path)
    written = json.loads((tmp_path / "summary.json").read_text())
    assert set(written) == set(PUBLISHED.split())
    # In words: JSON has no such numbers.
    assert [written[key] for key in ("train_loss", "val_accuracy")] == ["nan", "-inf"]
    assert str(Summary.read(tmp_path)) == str(numbers)
    scales = {"final_scale": {"a": math.inf, "b": 2.0}}
    more = {"monitor": "accuracy", "other_metrics": {"a_loss": 0.5, "zeros": 3.0}}
    none = {"val_loss": None, "metric": None, "val_metric": None}
    for status in Status:
        for changes in (scales, {"reason": "why", "half": None, "final_scale": None}, more, none):
            summary = replace(SUMMARY, status=status, **changes)
            summary.write(tmp_path)
            assert Summary.read(tmp_path) == summary
    written = json.loads((tmp_path / "summary.json").read_text())  # of a run without validation
    assert [key for key in written if key.startswith("val_")] == ["val_loss"]
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_search_goes_by_the_weights_that_were_tested() -> None:
    for tested, value in {"best": 0.99, "last": 0.9, None: 0.9}.items():
        summary = replace(SUMMARY, monitor="accuracy", val_metric=0.9, best=0.99, tested=tested)
        assert summary.searched == value
        assert replace(summary, monitor="loss", val_loss=0.9).searched == value


def test_a_damaged_summary_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    for content, says in {
        '{"status": "fin': "Unterminated string",
        "[]": "'list' object has no attribute 'update'",
        '{"status": "happy"}': "'happy' is not a valid Status",
        '{"status": "finished"}': "missing",
        '{"status": "finished", "colour": 1}': "unexpected keyword argument 'colour'",
        '{"status": "finished", "steps": -1}': "steps is -1",
        '{"status": "finished", "steps": 9223372036854775808}': "steps is 9223372036854775808",
    }.items():
        file.write_text(content)
        text = refused(MpframeError, Summary.read, tmp_path)
        assert says in text
        assert text.startswith(f"{file}: not a run's summary (")
        assert text.endswith("): delete the file or run the job again")


def make_job(
    sweep: Path, number: int, overrides: str = "", summary: Summary | None = SUMMARY, at: str = ""
) -> Path:
    """A job of a sweep as Hydra leaves it: its record."""
    own = {"mode": "MULTIRUN", "job": {"num": number}, "overrides": {"task": overrides.split()}}
    own["runtime"] = {"cwd": "/there", "output_dir": f"/there/out/{at or number}"}
    own["sweep"] = {"dir": "out"}
    record = sweep / (at or str(number)) / ".hydra" / "hydra.yaml"
    record.parent.mkdir(parents=True)
    record.write_text(yaml.safe_dump({"hydra": own}))
    if summary is not None:
        summary.write(record.parents[1])
    return record


def report(sweep: Path) -> str:
    return as_text(sweep, write_table(sweep))


def table(sweep: Path) -> list[dict[str, str]]:
    return csv_rows(sweep / "sweep.csv")


def test_table_reads_as_written_here(here: Path) -> None:
    fp32 = replace(SUMMARY, dtype="fp32", half=None, loss_scaling="none", final_scale=None)
    unknown: Any = {"val_metric": None, "best": None, "best_step": None}
    diverged = replace(SUMMARY, status=Status.DIVERGED, val_loss=math.nan, **unknown)
    for number, (dtype, own) in enumerate({"fp32": fp32, "mixed": diverged, "amp": None}.items()):
        make_job(here, number, f"dtype={dtype} seed=1", own)
    assert report(here).splitlines() == [
        *("", "every job: seed=1", ""),
        "job  overrides    mode           scaling  val metric       val loss  best               "
        "skipped steps  final scale  seconds  status",
        "0    dtype=fp32   fp32           none     accuracy 0.9733  0.1235    0.9811 at step 80  "
        "2                           12.35    finished",
        "1    dtype=mixed  mixed float16  Backoff  accuracy         nan                          "
        "2              65536        12.35    diverged",
        "2    dtype=amp                                                                          "
        "                                     no summary",
        "1 of 3 jobs finished; this table: sweep.md and sweep.csv beside it",
    ]
    assert (here / "sweep.md").read_text().splitlines()[3:5] == [
        "|" + "---|" * 11,
        "| 0 | dtype=fp32 | fp32 | none | accuracy 0.9733 | 0.1235 | 0.9811 at step 80 "
        "| 2 |  | 12.35 | finished |",
    ]


def test_csv_keeps_every_digit_and_has_a_column_for_each_swept_option(tmp_path: Path) -> None:
    """The table has a column for the test if a job was tested, and digits of a usual number."""
    tested = replace(SUMMARY, test_loss=0.25, tested="best", final_scale=2.0**39)
    make_job(tmp_path, 0, "a=1 ++optimizer.lr=0.1", replace(tested, test_metrics={"accuracy": 0.9}))
    make_job(tmp_path, 1, "a=1 ++optimizer.lr=0.2", None)
    bare: Any = {"metric": None, "val_metric": None, "final_scale": 1e30}
    make_job(tmp_path, 2, "a=1", replace(tested, **bare))
    first, second, third = report(tmp_path).splitlines()[4:7]
    assert [text in first for text in ("0.9 (best)", " 549755813888 ")] == [True, True]
    assert [text in third for text in ("loss 0.25 (best)", " 1e+30 ")] == [True, True]
    assert second.split()[-2:] == ["no", "summary"]
    found, unknown, _ = table(tmp_path)
    assert tuple(found) == (*COLUMNS, "optimizer.lr")
    assert (found["overrides"], found["metric"]) == ("a=1 ++optimizer.lr=0.1", "accuracy")
    numbers = [float(found[k]) for k in ("val_metric", "val_loss", "seconds", "test_metric")]
    assert numbers == [0.973333, 0.123456, 12.3456, 0.9]
    known = {"job": "1", "folder": "1", "overrides": "a=1 ++optimizer.lr=0.2"}
    known |= {"status": "no summary", "optimizer.lr": "0.2"}
    assert {k: v for k, v in unknown.items() if v} == known


def test_only_the_sweeps_own_jobs_are_in_its_table_by_number(tmp_path: Path, capsys: Shown) -> None:
    assert find_jobs(tmp_path) == find_jobs(tmp_path / "missing") == []
    for number in (10, 9, 0):
        make_job(tmp_path, number, at=f"deep/seed={number}")
    make_job(tmp_path / "inner", 1)
    single = make_job(tmp_path, 2)
    single.write_text(single.read_text().replace("MULTIRUN", "RUN"))
    (make_job(tmp_path, 3).parents[1] / "summary.json").write_text("{")
    make_job(tmp_path, 4).write_text("hydra: {mode: MULTIRUN}\n")
    _, damaged, *_ = jobs = find_jobs(tmp_path)
    found = [(job.number, job.summary) for job in jobs]
    assert found == [(0, SUMMARY), (3, None), (9, SUMMARY), (10, SUMMARY)]
    assert damaged.status == "unreadable"
    assert damaged.reason.startswith("summary.json: not a run's summary (")
    assert f"{tmp_path / '4'}: not a job's folder ('runtime')\n" in capsys.readouterr().out


def test_words_of_a_job_break_no_cell_and_steer_no_terminal(tmp_path: Path) -> None:
    failed = replace(SUMMARY, status=Status.FAILED, reason="no \x1bdisk", metric="\x1b[2Jmetric")
    make_job(tmp_path, 0, "ops.modules={a|b:fp32\x1b[31m}", failed)
    shown, page = report(tmp_path), (tmp_path / "sweep.md").read_text()
    assert "\x1b" not in shown + page
    assert "\\x1b[2Jmetric" in shown
    assert shown.splitlines()[2].split()[:2] == ["0", r"ops.modules={a|b:fp32\x1b[31m}"]
    assert r"| ops.modules={a\|b:fp32\x1b[31m} |" in page
    assert shown.splitlines()[-2] == "job 0 failed: no \\x1bdisk"
    assert page.endswith("\n\n- job 0 failed: no \\x1bdisk\n")


def test_a_reason_of_several_jobs_is_given_once(tmp_path: Path) -> None:
    for number, reason in enumerate(("no disk", "no room", *["no disk"] * 9)):
        make_job(tmp_path, number, summary=replace(SUMMARY, status=Status.FAILED, reason=reason))
    disk, room = report(tmp_path).splitlines()[-3:-1]
    assert disk == "jobs 0, 2, 3, 4, 5, 6, 7, 8 and 2 more failed: no disk"
    assert room == "job 1 failed: no room"


def test_a_sweep_that_ended_prints_its_table_once(tmp_path: Path, monkeypatch: Patch) -> None:
    table = SweepTable()
    table._folder, at_exit = tmp_path, [table._report]
    monkeypatch.setattr("mpframe.cli.sweep.atexit.unregister", at_exit.remove)
    table.on_multirun_end(OmegaConf.create({}))
    assert at_exit == []
