"""Reports: what is compared with what, what is told of failed runs, which folders are runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from fixtures import Log, Shown
from reported_runs import MIXED, SUMMARY, MakeRun, make_run, read, table, texts, trace

from mpframe.cli.commands import report as report_command
from mpframe.config.locations import CONF
from mpframe.lab.report.page import draw
from mpframe.lab.report.records import find_runs
from mpframe.lab.report.tables import (
    EMULATED,
    costs,
    every_run,
    recipes,
    sections,
    tabulate_unfinished,
)
from mpframe.tracking.summary import Status
from mpframe.tracking.tags import Tag
from mpframe.tracking.tracker import Tracker

__all__ = ["make_run"]  # a fixture
MODE = "precision, scaling"


def test_tested_runs_are_compared_by_their_test(make_run: MakeRun, tmp_path: Path) -> None:
    tested = {"test_loss": 0.3, "tested": "best"}
    make_run("a", replace(SUMMARY, **tested, test_metrics={"accuracy": 0.8}))
    make_run("b", replace(MIXED, **tested, test_metrics={"accuracy": 0.7}))
    _, mixed = table(tmp_path)
    assert (mixed["test accuracy"], mixed["gap to fp32"][:7]) == ("0.7000", "-0.1000")
    assert "accuracy" not in mixed
    line = "| accuracy 0.9000 (best 0.9600, step 80; test 0.8000, best weights) |"
    assert line in texts(tmp_path)[1]
    make_run("c", replace(MIXED, seed=3))  # One run without: then by the validation.
    assert "accuracy" in table(tmp_path)[1]


def test_runs_that_differ_in_the_seed_alone_are_one_row(make_run: MakeRun, tmp_path: Path) -> None:
    cheaper: dict[str, Any] = {"samples_per_second": 2000.0, "median_step_seconds": 0.002}
    for seed, accuracy in ((1, 0.90), (2, 0.94), (3, 0.95)):
        make_run(f"a{seed}", replace(SUMMARY, seed=seed, val_metric=accuracy))
        own = {"seed": seed, "val_metric": accuracy - 0.01, "skipped_steps": seed}
        make_run(f"b{seed}", replace(MIXED, peak_memory_bytes=75 * 2**20, **cheaper, **own))
    common = {"n": "3", "best": "0.9600", "val loss": "0.2"}
    full, mixed = table(tmp_path)
    one = {"accuracy": "0.9300\n0.9000 – 0.9500", "gap to fp32": ""}
    assert full == {**common, MODE: "fp32, none", **one}
    one = {
        "accuracy": "0.9200\n0.8900 – 0.9400",
        "gap to fp32": "-0.0100\nfp32: n 3, spread 0.0500",
    }
    assert mixed == {**common, MODE: "mixed float16, Backoff", **one}
    full, mixed = table(tmp_path, costs)
    assert full["step, ms"] == "4"
    assert list(mixed.items()) == [
        *((MODE, "mixed float16, Backoff"), ("step, ms", "2\n0.50 x fp32")),
        *(("samples / s", "2000\n2.00 x fp32"), ("memory, MiB", "75\n0.75 x fp32")),
        *(("skipped", "2\n1 – 3"), ("final scale", "65536")),
    ]


def test_one_seed_is_no_finding(make_run: MakeRun, tmp_path: Path) -> None:
    for seed in (1, 2):
        make_run(f"full{seed}", replace(SUMMARY, seed=seed))
    make_run("mixed", replace(MIXED, val_metric=0.95, median_step_seconds=0.002))
    _, mixed = table(tmp_path)
    assert (mixed["n"], mixed["gap to fp32"][:7]) == ("1", "+0.0500")
    assert "x fp32" not in str(table(tmp_path, costs))
    assert recipes(read(tmp_path)[1]) == []  # There is none to compare.


@pytest.mark.parametrize(
    ("seeds", "differ", "told"),
    [
        (3, 0.01, "spread 0.0200"),
        (2, 0.01, "too few seeds to tell"),
        (3, 0.0, "too few seeds to tell"),  # without any spread
    ],
)
def test_fp32_runs_that_differ_only_in_loss_scaling_count_once(
    seeds: int, differ: float, told: str, make_run: MakeRun, tmp_path: Path
) -> None:
    for seed in range(1, seeds + 1):
        own: dict[str, Any] = {"seed": seed, "val_metric": 0.9 + seed * differ}
        for name in ("none", "Backoff"):
            full = replace(SUMMARY, loss_scaling=name, **own)
            make_run(f"{name}{seed}", full, loss_scaling__growth_interval=len(name))
        make_run(f"mixed{seed}", replace(MIXED, **own))
    assert table(tmp_path)[-1]["gap to fp32"] == f"+0.0000\nfp32: n {seeds}, {told}"


def test_fp32_has_the_groups_own_options(make_run: MakeRun, tmp_path: Path) -> None:
    for lr, accuracy in ((0.1, 0.9), (0.2, 0.5)):
        make_run(f"full{lr}", replace(SUMMARY, val_metric=accuracy), optimizer__lr=lr)
        # Options of precision do not part a run from its fp32 runs.
        own = {"optimizer__lr": lr, "loss_scaling__init_scale": 2.0, "ops": {"deny": []}}
        make_run(f"mixed{lr}", replace(MIXED, val_metric=accuracy + 0.03), **own)
    rows = {row[MODE]: row["gap to fp32"][:7] for row in table(tmp_path)}
    assert list(rows.values()) == ["", "", "+0.0300", "+0.0300"]
    assert list(rows)[:2] == ["fp32, none\noptimizer.lr=0.1", "fp32, none\noptimizer.lr=0.2"]


@pytest.mark.parametrize(
    ("device", "compute", "emulated"),
    [("cpu", "auto", True), ("cpu", "native", False), ("cuda", "auto", False)],
)
def test_times_of_emulated_float16_are_not_a_gpu_s(
    device: str, compute: str, emulated: bool, make_run: MakeRun, tmp_path: Path
) -> None:
    make_run("1", replace(MIXED, device=device), dtype__compute=compute)
    shown = {section.title: section.warnings for section in sections(read(tmp_path)[1])}
    assert list(shown["Speed and memory"]) == [EMULATED] * emulated
    assert EMULATED not in texts(tmp_path)[0] or emulated


def test_recipes_are_held_against_products_in_half(make_run: MakeRun, tmp_path: Path) -> None:
    saturated = "numerics/products/saturated"
    bfloat = replace(SUMMARY, dtype="mixed", half="bfloat16")
    for seed, loss in ((1, 0.20), (2, 0.24), (3, 0.22)):
        make_run(f"a{seed}", replace(SUMMARY, seed=seed))
        for name, gap in (("none", 0.0), ("mxfp8", 0.01), ("nvfp4", 0.05)):
            file = yaml.safe_load((Path(CONF) / "dtype" / "products" / f"{name}.yaml").read_text())
            own = {"dtype__products": name, "dtype__recipes": file.get("recipes", {})}
            folder = make_run(
                f"{name}{seed}", replace(bfloat, seed=seed, val_loss=loss + gap), **own
            )
            if name == "nvfp4":  # Of the last report, the worst operand.
                first = {f"{saturated}/0/dw.x": 0.5, f"{saturated}/1/dx.dy": 0.9}
                trace(folder, first, {f"{saturated}/0/dw.x": 0.01 * seed})
    full, mx, plain, nv = table(tmp_path, recipes)
    half = "mixed bfloat16, none\ndtype.products="
    names = ["fp32, none", f"{half}none", f"{half}mxfp8", f"{half}nvfp4"]
    assert [row[MODE] for row in (full, plain, mx, nv)] == names
    assert full["loss gap to none"] == plain["loss gap to none"] == ""
    assert (mx["n"], mx["saturated"], nv["saturated"]) == ("3", "", "2.00%\n1.00% – 3.00%")
    assert mx["loss gap to none"] == "+0.0100\nnone: n 3, spread 0.0400"
    assert nv["loss gap to none"] == "+0.0500\nnone: n 3, spread 0.0400"
    assert all("+0.0500" in text for text in texts(tmp_path))


def test_unfinished_runs_are_shown_and_not_averaged(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("0", SUMMARY)
    stopped = {Status.DIVERGED: "too high", Status.INTERRUPTED: "SIGTERM", Status.FAILED: "no disk"}
    for status, reason in stopped.items():
        make_run(f"1{status}", replace(SUMMARY, status=status, reason=reason, val_metric=0.1))
    make_run("4", None)
    make_run("5", replace(MIXED, reason="1 step applied, 43 skipped: most of the run"))
    first, _ = table(tmp_path)
    assert (first["n"], first["accuracy"]) == ("1 of 5", "0.9000")
    said = {line[-2]: line[-1] for line in tabulate_unfinished(read(tmp_path)[1])[1:]}
    none = {"no summary": "killed, or still running"}
    assert said == {str(status): reason for status, reason in stopped.items()} | none
    assert all(reason in text for reason in said.values() for text in texts(tmp_path))
    told = [row["status"] for row in table(tmp_path, every_run)]
    assert told[-1] == "finished\n1 step applied, 43 skipped: most of the run"


def test_a_run_that_cannot_be_read_is_shown(make_run: MakeRun, tmp_path: Path) -> None:
    (make_run("0", None) / "config_resolved.yaml").write_text("a: &a [1]\nb: *a\n")
    (make_run("1", SUMMARY) / "summary.json").write_text("{")
    away = f"see {tmp_path / 'sweep' / '2'}/autopsy/a.md"
    make_run("2", replace(SUMMARY, status=Status.DIVERGED, reason=away))
    (tmp_path / "3" / ".hydra").mkdir(parents=True)  # It failed before its first line.
    (tmp_path / "3" / ".hydra" / "overrides.yaml").write_text("[]")
    runs = {run.name: run for run in read(tmp_path)[0]}
    unread = {"sweep/0": "no summary", "sweep/1": "unreadable", "sweep/2": "diverged"}
    assert {name: run.status for name, run in runs.items()} == {"3": "no summary", **unread}
    assert runs["sweep/1"].reason.startswith("summary.json: not a run's summary (")
    assert (runs["sweep/2"].reason, runs["3"].mode) == ("see autopsy/a.md", "unknown")
    assert str(tmp_path) not in "".join(texts(tmp_path))


def test_a_diverged_loss_of_nan_is_drawn(make_run: MakeRun, tmp_path: Path) -> None:
    folder = make_run("0", replace(SUMMARY, status=Status.DIVERGED, val_loss=float("nan")))
    trace(folder, *({Tag.LOSS_TRAIN: loss} for loss in (1.0, float("nan"))))
    assert draw(read(tmp_path)[1]) == draw(read(tmp_path)[1])  # always the same picture
    assert table(tmp_path, every_run)[0]["val loss"] == "nan"


def test_repeated_steps_are_not_warned_of(make_run: MakeRun, caplog: Log) -> None:
    folder = make_run("resumed")
    for first in (1, 2):
        with Tracker(folder, purge_step=first) as tracker:
            tracker.scalars(first, {Tag.LOSS_TRAIN: 1.0})
            tracker.scalars(first + 1, {Tag.LOSS_TRAIN: 1.0})
    (record,), _ = read(folder)
    assert [step for step, _ in record.curves[Tag.LOSS_TRAIN]] == [1, 2, 3]
    assert caplog.messages == []


def test_runs_are_in_the_order_of_their_numbers(make_run: MakeRun, tmp_path: Path) -> None:
    for name in ("10", "2", "1", "3"):
        make_run(name)
    sweep = tmp_path / "sweep"
    home, runs = find_runs([sweep / "2", sweep])
    assert (home, [run.name for run in runs]) == (sweep, ["2", "1", "3", "10"])


def run(*words: str) -> int:
    try:
        report_command.main(list(words))
    except SystemExit as exit_:
        return int(exit_.code or 0)
    return 0


def test_both_files_lie_in_the_sweep_or_in_out(make_run: MakeRun, tmp_path: Path) -> None:
    folders = [str(make_run(name, MIXED)) for name in "0123"]
    sweep, out = tmp_path / "sweep", tmp_path / "a" / "b"
    assert run(str(sweep), f"out={out}") == 0
    assert (out / "report.html").exists()
    assert not (sweep / "report.html").exists()
    for named, title in ((folders[:1], "sweep"), (folders, "0, 1, 2 and 1 more")):
        assert run(*named) == 0
        assert (sweep / "report.md").read_text().startswith(f"# Runs of {title}\n")
        assert (sweep / "report.html").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", "no folder given; name runs or a sweep, e.g. runs/2026-11-21/05-45-42"),
        ("--all", "--all: no such option; give folders of runs, and out=FOLDER"),
        ("{0}/a", "{0}/a: no such folder; name the folder of a run or of a sweep"),
        ("{0}", "{0}: holds no run; name the folder of a run or of a sweep"),
    ],
)
def test_a_slip_is_one_line(words: str, line: str, tmp_path: Path, capsys: Shown) -> None:
    assert run(*words.format(tmp_path).split()) == 1
    assert capsys.readouterr().err == f"mpframe: {line.format(tmp_path)}\n"
