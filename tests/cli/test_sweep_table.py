"""A run's summary.json, and the table that a sweep keeps of its jobs."""

import csv
import errno
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from checkout import HELPERS, ROOT

from mpframe.core.errors import MpframeError
from mpframe.files.durable import write_atomically
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


# --- summary.json


def strict(text: str) -> dict[str, object]:
    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_summary_has_the_published_keys(tmp_path: Path) -> None:
    SUMMARY.write(tmp_path)
    written = strict((tmp_path / "summary.json").read_text())
    assert set(written) == set(PUBLISHED.split())
    assert (written["status"], written["val_accuracy"]) == ("finished", 0.973333)


def test_summary_comes_back_as_it_was(tmp_path: Path) -> None:
    more = {"monitor": "accuracy", "other_metrics": {"a_loss": 0.5, "zeros": 3.0}}
    none = {"val_loss": None, "metric": None, "val_metric": None}
    for status in Status:
        SUMMARY.write(tmp_path)
        for changes in ({"reason": "why", "half": None, "final_scale": None}, more, none):
            summary = replace(SUMMARY, status=status, **changes)
            summary.write(tmp_path)
            assert Summary.read(tmp_path) == summary
    written = strict((tmp_path / "summary.json").read_text())  # of a run without validation
    assert [key for key in written if key.startswith("val_")] == ["val_loss"]
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_search_goes_by_the_weights_that_were_tested() -> None:
    for tested, value in {"best": 0.99, "last": 0.9, None: 0.9}.items():
        summary = replace(SUMMARY, monitor="accuracy", val_metric=0.9, best=0.99, tested=tested)
        assert summary.searched == value
        assert replace(summary, monitor="loss", val_loss=0.9).searched == value


def test_losses_that_are_not_finite_stay_apart_in_strict_json(tmp_path: Path) -> None:
    summary = replace(SUMMARY, train_loss=math.nan, val_loss=math.inf, val_metric=-math.inf)
    summary.write(tmp_path)
    written = strict((tmp_path / "summary.json").read_text())
    numbers = [written[key] for key in ("train_loss", "val_loss", "val_accuracy")]
    assert numbers == ["nan", "inf", "-inf"]
    back = Summary.read(tmp_path)
    assert str(back.train_loss) == "nan"
    assert (back.val_loss, back.val_metric) == (math.inf, -math.inf)


def test_a_damaged_summary_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    for content, says in {
        '{"status": "fin': "Unterminated string",
        "[]": "'list' object has no attribute 'items'",
        "{}": "'status'",
        '{"status": "happy"}': "'happy' is not a valid Status",
        '{"status": "finished"}': "missing",
        '{"status": "finished", "colour": 1}': "unexpected keyword argument 'colour'",
        '{"status": "finished", "steps": -1}': "steps is -1",
        '{"status": "finished", "steps": 9223372036854775808}': "steps is 9223372036854775808",
    }.items():
        file.write_text(content)
        with pytest.raises(MpframeError) as error:
            Summary.read(tmp_path)
        text = str(error.value)
        assert text.startswith(f"{file}: not a run's summary (")
        assert says in text
        assert text.endswith("): delete the file or run the job again")
        assert "\n" not in text


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_atomically(tmp_path / "a", "old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "a", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]


def test_content_is_on_the_disk_before_its_name_and_the_folder_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    sync, rename = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        calls.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        sync(descriptor)

    def noted_rename(self: Path, target: Path) -> Path:
        calls.append("replace")
        assert self.parent == target.parent
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", noted_rename)
    write_atomically(tmp_path / "a", "x")
    assert calls == ["file", "replace", "folder"]


# --- the table


def make_job(
    sweep: Path, number: int, overrides: list[str], summary: Summary | None, subdir: str = ""
) -> Path:
    folder = sweep / (subdir or str(number))
    (folder / ".hydra").mkdir(parents=True)
    own = {
        "mode": "MULTIRUN", "job": {"num": number}, "overrides": {"task": overrides},
        "runtime": {"cwd": "/there", "output_dir": f"/there/out/{subdir or number}"},
        "sweep": {"dir": "out"},
    }  # fmt: skip
    (folder / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump({"hydra": own}))
    if summary is not None:
        summary.write(folder)
    return folder


def report(sweep: Path) -> str:
    return as_text(sweep, write_table(sweep))


def table(sweep: Path) -> list[dict[str, str]]:
    with (sweep / "sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_table_reads_as_written_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fp32 = replace(SUMMARY, dtype="fp32", half=None, loss_scaling="none", final_scale=None)
    diverged = replace(SUMMARY, status=Status.DIVERGED, val_loss=math.nan, val_metric=None)
    diverged.best = diverged.best_step = None
    make_job(tmp_path, 0, ["dtype=fp32", "seed=1"], fp32)
    make_job(tmp_path, 1, ["dtype=mixed", "seed=1"], diverged)
    make_job(tmp_path, 2, ["dtype=amp", "seed=1"], None)
    text = report(tmp_path)
    assert text.splitlines() == [
        "",
        "every job: seed=1",
        "",
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
    assert (tmp_path / "sweep.md").read_text().splitlines()[2:5] == [
        "| job | overrides | mode | scaling | val metric | val loss | best "
        "| skipped steps | final scale | seconds | status |",
        "|" + "---|" * 11,
        "| 0 | dtype=fp32 | fp32 | none | accuracy 0.9733 | 0.1235 | 0.9811 at step 80 "
        "| 2 |  | 12.35 | finished |",
    ]


def test_the_test_has_a_column_if_a_job_was_tested(tmp_path: Path) -> None:
    found = {"test_loss": 0.25, "tested": "best"}
    make_job(tmp_path, 0, [], replace(SUMMARY, **found, test_metrics={"accuracy": 0.96}))
    make_job(tmp_path, 1, [], replace(SUMMARY, **found, metric=None, val_metric=None))
    make_job(tmp_path, 2, [], SUMMARY)
    report(tmp_path)
    head, _, *rows = (
        [cell.strip() for cell in line.split("|")]
        for line in (tmp_path / "sweep.md").read_text().splitlines()
    )
    place = head.index("test metric")
    assert [row[place] for row in rows] == ["0.96 (best)", "loss 0.25 (best)", ""]
    first, _, last = table(tmp_path)
    assert [first[k] for k in ("test_metric", "test_loss", "tested")] == ["0.96", "0.25", "best"]
    assert last["test_metric"] == ""


def test_csv_keeps_every_digit_and_has_a_column_for_each_swept_option(tmp_path: Path) -> None:
    make_job(tmp_path, 0, ["a=1", "++optimizer.lr=0.1"], SUMMARY)
    make_job(tmp_path, 1, ["a=1", "++optimizer.lr=0.2"], None)
    report(tmp_path)
    first, second = table(tmp_path)
    assert tuple(first) == (*COLUMNS, "optimizer.lr")
    assert (first["overrides"], first["metric"]) == ("a=1 ++optimizer.lr=0.1", "accuracy")
    numbers = [float(first[k]) for k in ("val_metric", "val_loss", "seconds", "final_scale")]
    assert numbers == [0.973333, 0.123456, 12.3456, 65536.0]
    assert {k: v for k, v in second.items() if v} == {
        "job": "1", "folder": "1", "overrides": "a=1 ++optimizer.lr=0.2",
        "status": "no summary", "optimizer.lr": "0.2",
    }  # fmt: skip


def test_only_the_sweeps_own_jobs_are_in_its_table_by_number(tmp_path: Path) -> None:
    assert find_jobs(tmp_path) == find_jobs(tmp_path / "missing") == []
    for number in (10, 9, 0):
        make_job(tmp_path, number, [f"seed={number}"], SUMMARY, subdir=f"deep/seed={number}")
    make_job(tmp_path / "inner", 1, ["seed=1"], SUMMARY)
    single = make_job(tmp_path, 2, ["seed=2"], SUMMARY) / ".hydra" / "hydra.yaml"
    single.write_text(single.read_text().replace("MULTIRUN", "RUN"))
    assert [job.number for job in find_jobs(tmp_path)] == [0, 9, 10]


def test_only_numbers_of_a_usual_size_are_written_digit_by_digit(tmp_path: Path) -> None:
    for number, scale in enumerate((2.0**39, 1e30, 0.5)):
        make_job(tmp_path, number, [], replace(SUMMARY, final_scale=scale))
    lines = report(tmp_path).splitlines()[2:5]
    assert [line.split()[-3] for line in lines] == ["549755813888", "1e+30", "0.5"]


def test_a_single_jobs_overrides_stay_in_its_line_and_a_bar_in_its_cell(tmp_path: Path) -> None:
    make_job(tmp_path, 0, ["ops.modules={a|b:fp32}"], SUMMARY)
    assert report(tmp_path).splitlines()[2].split()[:2] == ["0", "ops.modules={a|b:fp32}"]
    assert r"| ops.modules={a\|b:fp32} |" in (tmp_path / "sweep.md").read_text()


def test_no_name_of_a_job_steers_the_terminal(tmp_path: Path) -> None:
    make_job(tmp_path, 0, ["run_name=\x1b[31m"], replace(SUMMARY, metric="\x1b[2Jmetric"))
    shown = report(tmp_path) + (tmp_path / "sweep.md").read_text()
    assert "\x1b" not in shown
    assert "\\x1b[2Jmetric" in shown
    assert "run_name=\\x1b[31m" in shown


def test_damaged_records_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_job(tmp_path, 0, ["seed=1"], SUMMARY)
    (folder / "summary.json").write_text("{")
    record = make_job(tmp_path, 1, ["seed=1"], SUMMARY) / ".hydra" / "hydra.yaml"
    record.write_text("hydra: {mode: MULTIRUN}\n")
    (job,) = find_jobs(tmp_path)
    assert (job.number, job.summary) == (0, None)
    said = capsys.readouterr().out
    assert str(folder / "summary.json") in said
    assert f"{tmp_path / '1'}: not a job's folder ('runtime')\n" in said


def test_why_a_job_did_not_finish_stands_below_the_table(tmp_path: Path) -> None:
    make_job(tmp_path, 0, ["seed=1"], replace(SUMMARY, status=Status.FAILED, reason="no \x1bdisk"))
    make_job(tmp_path, 1, ["seed=2"], replace(SUMMARY, reason="ended early"))
    assert report(tmp_path).splitlines()[-2] == "job 0 failed: no \\x1bdisk"
    assert (tmp_path / "sweep.md").read_text().endswith("\n\n- job 0 failed: no \\x1bdisk\n")


# --- under Hydra

CONFIG = """
defaults: [_self_, {experiment: null}]
run_name: plain
seed: 0
hydra:
  sweep: {dir: "runs/${run_name}", subdir: "${hydra.job.num}"}
  callbacks: {sweep_table: {_target_: mpframe.cli.sweep.SweepTable}}
"""
PROGRAM = """
import dataclasses, pathlib, hydra
from hydra.core.hydra_config import HydraConfig
from test_sweep_table import SUMMARY

@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config):
    if config.seed == 3:
        raise ValueError("seed 3 fails")
    if config.seed == 99:
        raise SystemExit("stopped")
    folder = pathlib.Path(HydraConfig.get().runtime.output_dir)
    dataclasses.replace(SUMMARY, seed=config.seed).write(folder)

main()
"""


def sweep(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    (folder / "conf" / "experiment").mkdir(parents=True)
    (folder / "conf" / "config.yaml").write_text(CONFIG)
    for name in ("one", "two"):
        experiment = f"# @package _global_\nrun_name: {name}\n"
        (folder / "conf" / "experiment" / f"{name}.yaml").write_text(experiment)
    (folder / "main.py").write_text(PROGRAM)
    paths = os.pathsep.join([str(Path(__file__).parent), str(HELPERS), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-W", "error", "main.py", "-m", *overrides],
        cwd=folder, env=os.environ | {"PYTHONPATH": paths},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_a_sweep_with_a_failing_job_ends_with_its_table(tmp_path: Path) -> None:
    done = sweep(tmp_path, 'run_name="it\'s = one"', "seed=10,3,2")
    assert done.returncode == 1
    assert "seed 3 fails" in done.stderr
    place = Path("runs/it's = one/sweep.md")
    last = f"2 of 3 jobs finished; this table: {place} and sweep.csv beside it"
    assert done.stdout.splitlines()[-1] == last
    assert done.stdout.count("val metric") == 1
    rows = table(tmp_path / place.parent)
    ended = [(row["seed"], row["status"]) for row in rows]
    assert ended == [("10", "finished"), ("3", "no summary"), ("2", "finished")]


def test_a_sweep_that_is_cut_short_counts_the_jobs_that_never_began(tmp_path: Path) -> None:
    """A swept option in the folder's name does not scatter the jobs."""
    done = sweep(tmp_path, "experiment=one,two", "seed=1,99")
    last = done.stdout.splitlines()[-1]
    assert last.startswith("1 of 4 jobs finished, 2 never began; this table: ")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["plain"]
