"""Reports: what is compared with what, what is told of failed runs, which folders are runs.

The page: text from runs stays text, and all of it fits.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from fixtures import Log, Patch, Shown

from mpframe.cli.commands import report as report_command
from mpframe.config import CONF
from mpframe.lab.report import page as page_module
from mpframe.lab.report.page import as_page, draw
from mpframe.lab.report.records import Record, find_runs
from mpframe.lab.report.tables import (
    EMULATED,
    RunGroup,
    costs,
    every_run,
    group_runs,
    results,
    sections,
)
from mpframe.tracking.summary import Status, Summary
from mpframe.tracking.tags import Tag
from mpframe.tracking.tracker import Tracker

MODE = "precision, scaling"
SUMMARY = Summary(
    status=Status.FINISHED, steps=100, skipped_steps=0, epochs=1, train_loss=0.1, val_loss=0.2,
    metric="accuracy", val_metric=0.9, best=0.96, best_step=80, seconds=10.0, seed=1,
    samples_per_second=1000.0, median_step_seconds=0.004, peak_memory_bytes=100 * 2**20,
    dtype="fp32", loss_scaling="none", device="cpu", torch="2.11.0",
)  # fmt: skip
MIXED = replace(SUMMARY, dtype="mixed", half="float16", loss_scaling="Backoff", final_scale=65536.0)

MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: Patch) -> MakeRun:
    """Write a run's folder. Its options are given as option__name=value.

    No curves: they take a second. Who looks at them calls `monkeypatch.undo()`.
    """
    monkeypatch.setattr(page_module, "draw", lambda groups: b"<svg/>")

    def make(name: str, summary: Summary | None = SUMMARY, **more: Any) -> Path:
        own = summary or SUMMARY
        options: dict[str, Any] = {
            "model": {"_target_": "mpframe.workloads.images.mlp", "hidden": 8},
            "dtype": {"mode": own.dtype, "half": own.half or "float16"},
            "loss_scaling": {"_target_": f"mpframe.core.loss_scaling.{own.loss_scaling}"},
            "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1},
            "seed": own.seed,
        }
        for path, value in more.items():
            section, _, option = path.partition("__")
            options[section] = {**options[section], option: value} if option else value
        folder = tmp_path / "sweep" / name
        folder.mkdir(parents=True)
        (folder / "config_resolved.yaml").write_text(yaml.safe_dump(options))
        if summary is not None:
            summary.write(folder)
        return folder

    return make


def read(folder: Path) -> tuple[list[Record], list[RunGroup]]:
    records = find_runs([folder])[1]
    return records, group_runs(records)


def table(folder: Path, of: Callable[..., list[list[str]]] = results) -> list[dict[str, str]]:
    head, *rows = of(read(folder)[1])
    return [dict(zip(head, row, strict=True)) for row in rows]


def page_of(folder: Path, title: str = "t") -> str:
    records, groups = read(folder)
    return as_page(title, groups, records)


def trace(folder: Path, *steps: dict[str, float]) -> None:
    with Tracker(folder) as tracker:
        for step, values in enumerate(steps, start=1):
            tracker.scalars(step, values)


def test_a_class_has_its_last_name_unless_another_one_shares_it(
    make_run: MakeRun, tmp_path: Path
) -> None:
    for number, names in enumerate((("mine.Net", "a.SGD"), ("mine.Wide", "b.SGD"))):
        model, optimizer = names
        make_run(str(number), model___target_=model, optimizer___target_=optimizer)
    assert [group.differing for group in read(tmp_path)[1]] == [
        ("model=Net", "optimizer._target_=a.SGD"),
        ("model=Wide", "optimizer._target_=b.SGD"),
    ]


def test_tested_runs_are_compared_by_their_test(make_run: MakeRun, tmp_path: Path) -> None:
    tested = {"test_loss": 0.3, "tested": "best"}
    make_run("a", replace(SUMMARY, **tested, test_metrics={"accuracy": 0.8}))
    make_run("b", replace(MIXED, **tested, test_metrics={"accuracy": 0.7}))
    _, mixed = table(tmp_path)
    assert (mixed["test accuracy"], mixed["gap to fp32"][:7]) == ("0.7000", "-0.1000")
    assert "accuracy" not in mixed
    cell = table(tmp_path, every_run)[0]["metric"]
    assert cell == "accuracy 0.9000\nbest 0.9600, step 80\ntest 0.8000, best weights"
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
    gap = "-0.0100\nfp32: n 3, spread 0.0500"
    one = {"accuracy": "0.9200\n0.8900 – 0.9400", "gap to fp32": gap}
    assert mixed == {**common, MODE: "mixed float16, Backoff", **one}
    full, mixed = table(tmp_path, costs)
    assert full["step, ms"] == "4"
    assert list(mixed.items()) == [
        *((MODE, "mixed float16, Backoff"), ("step, ms", "2\n0.50 x fp32")),
        *(("samples / s", "2000\n2.00 x fp32"), ("memory, MiB", "75\n0.75 x fp32")),
        *(("skipped", "2\n1 – 3"), ("final scale", "65536")),
    ]


def test_ways_to_divide_a_run_are_rows_and_options_that_only_watch_are_not(
    make_run: MakeRun, tmp_path: Path
) -> None:
    for seed, way in enumerate(("ddp", "ddp", "fsdp")):
        options = {"trainer": {"parallel": way, "log_every": seed + 1}}
        make_run(f"a{seed}", replace(SUMMARY, seed=seed), **options)
    words = "fp32, none\ntrainer.parallel="
    rows = [(row[MODE], row["n"]) for row in table(tmp_path)]
    assert rows == [(f"{words}ddp", "2"), (f"{words}fsdp", "1")]


FEW = "too few seeds to tell"


def test_one_seed_beside_several_of_fp32_is_no_finding(make_run: MakeRun, tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        make_run(f"full{seed}", replace(SUMMARY, seed=seed, val_metric=0.9 + seed * 0.01))
    make_run("mixed", replace(MIXED, val_metric=0.95, median_step_seconds=0.002))
    _, mixed = table(tmp_path)
    assert (mixed["n"], mixed["gap to fp32"]) == ("1", f"+0.0300\nfp32: n 3, {FEW}")
    assert "x fp32" not in str(table(tmp_path, costs))


@pytest.mark.parametrize(
    ("seeds", "differ", "told"), [(3, 0.01, "spread 0.0200"), (2, 0.01, FEW), (3, 0.0, FEW)]
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


def test_times_of_emulated_float16_are_not_a_gpu_s(make_run: MakeRun) -> None:
    for words, warned in (("cpu auto", [EMULATED]), ("cpu native", []), ("cuda auto", [])):
        device, compute = words.split()
        folder = make_run(words, replace(MIXED, device=device), dtype__compute=compute)
        shown = {section.title: section.warnings for section in sections(read(folder)[1])}
        assert list(shown["Speed and memory"]) == warned
        assert (EMULATED in page_of(folder)) == bool(warned)


def test_each_recipe_has_a_row_and_a_gap(make_run: MakeRun, tmp_path: Path) -> None:
    bfloat = replace(SUMMARY, dtype="mixed", half="bfloat16")
    for seed in (1, 2, 3):
        make_run(f"a{seed}", replace(SUMMARY, seed=seed))
        for name, gap in (("none", 0.0), ("mxfp8", 0.01), ("nvfp4", 0.05)):
            file = yaml.safe_load((Path(CONF) / "dtype" / "products" / f"{name}.yaml").read_text())
            own = {"dtype__products": name, "dtype__recipes": file.get("recipes", {})}
            make_run(f"{name}{seed}", replace(bfloat, seed=seed, val_metric=0.9 - gap), **own)
    full, *rows = table(tmp_path)
    assert full[MODE] == "fp32, none"
    gaps = {row[MODE].partition("products=")[2]: row["gap to fp32"].split()[0] for row in rows}
    assert gaps == {"none": "+0.0000", "mxfp8": "-0.0100", "nvfp4": "-0.0500"}
    assert {row["n"] for row in rows} == {"3"}


def test_unfinished_runs_are_shown_and_not_averaged(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("0", SUMMARY)
    stopped = {Status.DIVERGED: "too high", Status.INTERRUPTED: "SIGTERM", Status.FAILED: "no disk"}
    for status, reason in stopped.items():
        make_run(f"1{status}", replace(SUMMARY, status=status, reason=reason, val_metric=0.1))
    make_run("4", None)
    make_run("5", replace(MIXED, reason="1 step applied, 43 skipped: most of the run"))
    make_run("6", replace(MIXED, status=Status.DIVERGED, reason="too high", final_scale=1.0))
    first, second = table(tmp_path)
    assert (first["n"], first["accuracy"]) == ("1 of 5", "0.9000")
    assert (second["n"], table(tmp_path, costs)[1]["final scale"]) == ("1 of 2", "65536")
    told = dict(row["status"].split("\n") for row in table(tmp_path, every_run)[1:])
    skipped = {"finished": "1 step applied, 43 skipped: most of the run"}
    others = {"no summary": "killed, or still running", **skipped}
    assert told == {str(status): reason for status, reason in stopped.items()} | others
    page = page_of(tmp_path)
    assert all(reason in page for reason in told.values())


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
    assert str(tmp_path) not in page_of(tmp_path)


def test_a_diverged_loss_of_nan_is_drawn(make_run: MakeRun, tmp_path: Path) -> None:
    folder = make_run("0", replace(SUMMARY, status=Status.DIVERGED, val_loss=float("nan")))
    trace(folder, *({Tag.LOSS_TRAIN: loss} for loss in (1.0, float("nan"))))
    assert draw(read(tmp_path)[1]) == draw(read(tmp_path)[1])  # always the same picture
    assert table(tmp_path, every_run)[0]["val loss"] == "nan"


def test_repeated_steps_are_not_warned_of(make_run: MakeRun, caplog: Log) -> None:
    folder = make_run("resumed")
    for first in (1, 2):
        with Tracker(folder, purge_step=first) as tracker:
            for step in (first, first + 1):
                tracker.scalars(step, {Tag.LOSS_TRAIN: 1.0})
    (record,), _ = read(folder)
    assert [step for step, _ in record.curves[Tag.LOSS_TRAIN]] == [1, 2, 3]
    assert caplog.messages == []


def test_the_page_lies_in_the_sweep_or_in_out_and_runs_in_the_order_of_their_numbers(
    make_run: MakeRun, tmp_path: Path
) -> None:
    folders = [str(make_run(name, MIXED)) for name in ("10", "2", "1", "3")]
    sweep, out = tmp_path / "sweep", tmp_path / "a" / "b"
    home, runs = find_runs([sweep / "2", sweep])
    assert (home, [run.name for run in runs]) == (sweep, ["2", "1", "3", "10"])
    report_command.main([str(sweep), f"out={out}"])
    assert [(folder / "report.html").exists() for folder in (out, sweep)] == [True, False]
    for named, title in ((folders[:1], "sweep"), (folders, "10, 2, 1 and 1 more")):
        report_command.main(named)
        assert f"<h1>Runs of {title}</h1>" in (sweep / "report.html").read_text()


def test_a_slip_is_one_line(tmp_path: Path, capsys: Shown) -> None:
    for word, line in (
        ("", "no folder given; name runs or a sweep, e.g. runs/2026-11-21/05-45-42"),
        ("--all", "--all: no such option; give folders of runs, and out=FOLDER"),
        (f"{tmp_path}/a", f"{tmp_path}/a: no such folder; name the folder of a run or of a sweep"),
        (str(tmp_path), f"{tmp_path}: holds no run; name the folder of a run or of a sweep"),
    ):
        with pytest.raises(SystemExit) as ended:
            report_command.main(word.split())
        assert (ended.value.code, capsys.readouterr().err) == (1, f"mpframe: {line}\n")


EVIL = "<script>alert(1)</script>"
ESCAPE = "\x1b[2J\u202e"
HARMLESS = "html head meta title style body h1 h2 p div table thead tbody tr th td br span figure "
HARMLESS += "img figcaption"


def test_what_comes_from_runs_is_text_in_one_file_without_an_address(
    make_run: MakeRun, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Every text of the runs is hostile."""
    monkeypatch.undo()
    told = {"reason": f"x {EVIL} | y{ESCAPE}", "metric": f"a{EVIL}{ESCAPE}"}
    bad = replace(MIXED, status=Status.FAILED, device=f'"{EVIL}{ESCAPE}', **told)
    hidden = f'"><img src=x onerror={EVIL}{ESCAPE}'
    folder = make_run(f"x<script>alert(1)<{ESCAPE}", bad, model__hidden=hidden)
    trace(folder, {Tag.LOSS_TRAIN: 1.0, ESCAPE: 2.0})
    make_run("$x_{$", SUMMARY, model__hidden=f"$\\frac{{{EVIL}$")
    page = page_of(tmp_path, EVIL)
    tags: list[tuple[str, dict[str, str | None]]] = []
    text: list[str] = []
    parser: Any = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append((tag, dict(attrs)))
    parser.handle_data = text.append
    parser.feed(page)
    assert EVIL in "".join(text)
    assert {tag for tag, _ in tags} <= {*HARMLESS.split()}
    names = {name for _, attrs in tags for name in attrs}
    assert not [n for n in names if n.startswith("on") or n in ("href", "srcset")]
    assert not {"\x1b", "\u202e"} & set(page)  # Nothing steers the terminal.
    sources = [str(attrs["src"]) for tag, attrs in tags if tag == "img"]
    assert [source[:11] for source in sources] == ["data:image/"]
    assert "http" not in re.sub(r'content="default|http-equiv|base64,[^"]*', "", page)
    assert any("default-src 'none'" in str(attrs.get("content")) for _, attrs in tags)
