"""Reports: what is compared with what, what is told of failed runs, which folders are runs."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from reported_runs import MIXED, SUMMARY, MakeRun, read, table, texts, trace, write_run

from mpframe.cli.commands import report as report_command
from mpframe.config.locations import CONF
from mpframe.core.errors import ConfigError
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


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    return partial(write_run, tmp_path)


# --- what is compared with what


def test_tested_runs_are_compared_by_their_test(make_run: MakeRun, tmp_path: Path) -> None:
    tested = {"test_loss": 0.3, "tested": "best"}
    for seed in (1, 2):
        full = replace(SUMMARY, seed=seed, **tested, test_metrics={"accuracy": 0.8})
        make_run(f"a{seed}", full)
        make_run(f"b{seed}", replace(MIXED, seed=seed, **tested, test_metrics={"accuracy": 0.7}))
    _, mixed = table(tmp_path)
    assert (mixed["test accuracy"], mixed["best"]) == ("0.7000", "0.9600")
    assert mixed["gap to fp32"] == "-0.1000\nfp32: n 2, too few seeds to tell"
    assert "accuracy" not in mixed
    first, *_ = table(tmp_path, every_run)
    assert first["metric"] == "accuracy 0.9000\nbest 0.9600, step 80\ntest 0.8000, best weights"
    line = "| accuracy 0.9000 (best 0.9600, step 80; test 0.8000, best weights) |"
    assert line in texts(tmp_path)[1]
    make_run("c", replace(MIXED, seed=3))  # One run without: then by the validation.
    assert "accuracy" in table(tmp_path)[1]


def test_runs_that_differ_in_the_seed_alone_are_one_row(make_run: MakeRun, tmp_path: Path) -> None:
    for seed, accuracy in ((1, 0.90), (2, 0.94), (3, 0.95)):
        make_run(f"a{seed}", replace(SUMMARY, seed=seed, val_metric=accuracy))
        costs_less = {"samples_per_second": 2000.0, "median_step_seconds": 0.002}
        costs_less |= {"peak_memory_bytes": 75 * 2**20, "skipped_steps": seed}
        own = replace(MIXED, seed=seed, val_metric=accuracy - 0.01, **costs_less)  # type: ignore[arg-type]
        make_run(f"b{seed}", own)
    common = {"n": "3", "best": "0.9600", "val loss": "0.2"}
    assert table(tmp_path) == [
        common
        | {"precision, scaling": "fp32, none", "gap to fp32": ""}
        | {"accuracy": "0.9300\n0.9000 – 0.9500"},
        common
        | {"precision, scaling": "mixed float16, Backoff", "accuracy": "0.9200\n0.8900 – 0.9400"}
        | {"gap to fp32": "-0.0100\nfp32: n 3, spread 0.0500"},
    ]
    full, mixed = table(tmp_path, costs)
    assert full["step, ms"] == "4"
    assert mixed == {
        "precision, scaling": "mixed float16, Backoff",
        "step, ms": "2\n0.50 x fp32",
        "samples / s": "2000\n2.00 x fp32",
        "memory, MiB": "75\n0.75 x fp32",
        "skipped": "2\n1 – 3",
        "final scale": "65536",
    }


def test_one_seed_is_no_finding(make_run: MakeRun, tmp_path: Path) -> None:
    for seed in (1, 2):
        make_run(f"full{seed}", replace(SUMMARY, seed=seed))
    make_run("mixed", replace(MIXED, val_metric=0.95, median_step_seconds=0.002))
    _, mixed = table(tmp_path)
    assert mixed["n"] == "1"
    assert mixed["gap to fp32"] == "+0.0500\nfp32: n 2, too few seeds to tell"
    assert "x fp32" not in str(table(tmp_path, costs))


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
        accuracy = 0.9 + seed * differ
        for name in ("none", "Backoff"):
            full = replace(SUMMARY, seed=seed, val_metric=accuracy, loss_scaling=name)
            make_run(f"{name}{seed}", full, loss_scaling__growth_interval=len(name))
        make_run(f"mixed{seed}", replace(MIXED, seed=seed, val_metric=accuracy))
    *_, mixed = table(tmp_path)
    assert mixed["gap to fp32"] == f"+0.0000\nfp32: n {seeds}, {told}"


def test_each_group_is_held_against_fp32_with_its_own_options(
    make_run: MakeRun, tmp_path: Path
) -> None:
    for lr, accuracy in ((0.1, 0.9), (0.2, 0.5)):
        make_run(f"full{lr}", replace(SUMMARY, val_metric=accuracy), optimizer__lr=lr)
        # Options of precision do not part a run from its fp32 runs.
        own = {"optimizer__lr": lr, "loss_scaling__init_scale": 2.0, "ops": {"deny": []}}
        make_run(f"mixed{lr}", replace(MIXED, val_metric=accuracy + 0.03), **own)
    rows = {row["precision, scaling"]: row["gap to fp32"][:7] for row in table(tmp_path)}
    assert list(rows.values()) == ["", "", "+0.0300", "+0.0300"]
    assert list(rows)[:2] == ["fp32, none\noptimizer.lr=0.1", "fp32, none\noptimizer.lr=0.2"]


def test_an_option_that_only_one_class_has_tells_no_groups_apart(
    make_run: MakeRun, tmp_path: Path
) -> None:
    """The class does; but an option that a run of the same class lacks does, too."""
    make_run("0", MIXED, loss_scaling__growth_interval=7)
    make_run("1", replace(MIXED, loss_scaling="LogMax"), loss_scaling__mean_decay=0.5)
    make_run("2", MIXED, loss_scaling__growth_interval=7, model__dropout=0.5)
    rows = table(tmp_path)
    assert [row["precision, scaling"] for row in rows] == [
        "mixed float16, Backoff",
        "mixed float16, LogMax",
        "mixed float16, Backoff\nmodel.dropout=0.5",
    ]
    assert "gap to fp32" not in rows[0]


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
    assert [EMULATED in text for text in texts(tmp_path)] == [emulated] * 2


def recipe_options(name: str) -> dict[str, Any]:
    file = yaml.safe_load((Path(CONF) / "dtype" / "products" / f"{name}.yaml").read_text())
    return {"dtype__products": name, "dtype__recipes": file.get("recipes", {})}


BFLOAT = replace(SUMMARY, dtype="mixed", half="bfloat16")


def test_recipes_are_held_against_products_in_half(make_run: MakeRun, tmp_path: Path) -> None:
    saturated = "numerics/products/saturated"
    for seed, loss in ((1, 0.20), (2, 0.24), (3, 0.22)):
        make_run(f"a{seed}", replace(SUMMARY, seed=seed))
        for name, gap in (("none", 0.0), ("mxfp8", 0.01), ("nvfp4", 0.05)):
            done = replace(BFLOAT, seed=seed, val_loss=loss + gap)
            folder = make_run(f"{name}{seed}", done, **recipe_options(name))
            if name == "nvfp4":  # Of the last report, the worst operand.
                first = {f"{saturated}/0/dw.x": 0.5, f"{saturated}/1/dx.dy": 0.9}
                trace(folder, first, {f"{saturated}/0/dw.x": 0.01 * seed})
    full, mx, plain, nv = table(tmp_path, recipes)
    assert [row["precision, scaling"] for row in (full, plain, mx, nv)] == [
        "fp32, none",
        "mixed bfloat16, none\ndtype.products=none",
        "mixed bfloat16, none\ndtype.products=mxfp8",
        "mixed bfloat16, none\ndtype.products=nvfp4",
    ]
    assert full["loss gap to none"] == plain["loss gap to none"] == ""
    assert (mx["n"], mx["saturated"], nv["saturated"]) == ("3", "", "2.00%\n1.00% – 3.00%")
    assert mx["loss gap to none"] == "+0.0100\nnone: n 3, spread 0.0400"
    assert nv["loss gap to none"] == "+0.0500\nnone: n 3, spread 0.0400"
    assert all("+0.0500" in text for text in texts(tmp_path))


def test_without_recipes_there_is_no_such_table(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a", BFLOAT)
    assert recipes(read(tmp_path)[1]) == []


# --- runs that did not finish, and what cannot be read


def test_unfinished_runs_are_shown_and_not_averaged(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("0", SUMMARY)
    stopped = {Status.DIVERGED: "too high", Status.INTERRUPTED: "SIGTERM", Status.FAILED: "no disk"}
    for number, (status, reason) in enumerate(stopped.items(), start=1):
        make_run(str(number), replace(SUMMARY, status=status, reason=reason, val_metric=0.1))
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


def test_a_run_that_cannot_be_read_is_shown_with_its_reason(
    make_run: MakeRun, tmp_path: Path
) -> None:
    """Without the folder where it lay."""
    (make_run("0", None) / "config_resolved.yaml").write_text("a: &a [1]\nb: *a\n")
    (make_run("1", SUMMARY) / "summary.json").write_text("{")
    away = f"see {tmp_path / 'sweep' / '2'}/autopsy/a.md"
    make_run("2", replace(SUMMARY, status=Status.DIVERGED, reason=away))
    (tmp_path / "3" / ".hydra").mkdir(parents=True)  # It failed before its first line.
    (tmp_path / "3" / ".hydra" / "overrides.yaml").write_text("[]")
    runs = {run.name: run for run in read(tmp_path)[0]}
    states = {name: run.status for name, run in runs.items()}
    unread = {"sweep/0": "no summary", "sweep/1": "unreadable", "sweep/2": "diverged"}
    assert states == {"3": "no summary", **unread}
    assert runs["sweep/1"].reason.startswith("summary.json: not a run's summary (")
    assert runs["sweep/2"].reason == "see autopsy/a.md"
    assert runs["3"].mode == "unknown"
    assert str(tmp_path) not in "".join(texts(tmp_path))


def test_a_diverged_loss_of_nan_is_drawn_and_told(make_run: MakeRun, tmp_path: Path) -> None:
    nan = float("nan")
    folder = make_run("0", replace(SUMMARY, status=Status.DIVERGED, val_loss=nan, val_metric=nan))
    trace(folder, *({Tag.LOSS_TRAIN: loss, Tag.SCALE: 8.0} for loss in (1.0, 1.0, nan)))
    (record,), groups = read(tmp_path)
    assert [step for step, _ in record.curves["loss/train"]] == [1, 2, 3]
    (told,) = table(tmp_path, every_run)
    assert (told["metric"], told["val loss"]) == ("accuracy nan\nbest 0.9600, step 80", "nan")
    assert draw(groups) == draw(read(tmp_path)[1])  # The same runs give the same picture.


def test_the_repeated_steps_of_a_resumed_run_are_not_warned_of(
    make_run: MakeRun, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_run("resumed")
    for first in (1, 2):
        with Tracker(folder, purge_step=first) as tracker:
            tracker.scalars(first, {Tag.LOSS_TRAIN: 1.0})
            tracker.scalars(first + 1, {Tag.LOSS_TRAIN: 1.0})
    (record,), _ = read(folder)
    assert [step for step, _ in record.curves[Tag.LOSS_TRAIN]] == [1, 2, 3]
    assert caplog.messages == []


def test_runs_are_found_once_and_in_the_order_of_their_numbers(
    make_run: MakeRun, tmp_path: Path
) -> None:
    for name in ("10", "2", "1", "3"):
        make_run(name)
    sweep = tmp_path / "sweep"
    home, runs = find_runs([sweep / "2", sweep])
    assert home == sweep
    assert [run.name for run in runs] == ["2", "1", "3", "10"]


@pytest.mark.parametrize(("name", "says"), [("nothing", "no such folder"), ("", "holds no run")])
def test_a_folder_without_runs_is_one_line(name: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        find_runs([tmp_path / name])
    expected = f"{tmp_path / name}: {says}; name the folder of a run or of a sweep"
    assert str(error.value) == expected


# --- the command


def run(*words: str) -> int:
    try:
        report_command.main(list(words))
    except SystemExit as exit_:
        return int(exit_.code or 0)
    return 0


def test_both_files_lie_in_the_sweep_or_in_out(make_run: MakeRun, tmp_path: Path) -> None:
    for name in ("0", "1", "2", "3"):
        make_run(name, MIXED)
    sweep = tmp_path / "sweep"
    assert run(str(sweep), f"out={tmp_path / 'a' / 'b'}") == 0
    assert (tmp_path / "a" / "b" / "report.html").exists()
    assert not (sweep / "report.html").exists()
    for named, title in ((["0"], "sweep"), ("0123", "0, 1, 2 and 1 more")):
        assert run(*(str(sweep / name) for name in named)) == 0
        assert (sweep / "report.md").read_text().startswith(f"# Runs of {title}\n")
        assert (sweep / "report.html").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "mpframe: no folder given; name runs or a sweep, e.g. runs/2026-11-21/05-45-42\n"),
        (("--all",), "mpframe: --all: no such option; give folders of runs, and out=FOLDER\n"),
    ],
)
def test_a_slip_is_one_line(
    words: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 1
    assert capsys.readouterr().err == line
