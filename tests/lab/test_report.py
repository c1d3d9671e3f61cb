"""Reports: what is compared with what, what is told of failed runs; text of runs stays text."""

import re
from collections.abc import Callable
from contextlib import closing
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
from mpframe.lab.report.page import as_page
from mpframe.lab.report.records import Record, find_runs
from mpframe.lab.report.tables import (
    COST_NOTES,
    EMULATED,
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


class Runs:
    """Folders of runs, and what is reported of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self, name: str, summary: Summary | None = SUMMARY, **more: Any) -> Path:
        """Write a run's folder. Its options are given as option__name=value."""
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
        folder = self.folder / "sweep" / name
        folder.mkdir(parents=True)
        (folder / "config_resolved.yaml").write_text(yaml.safe_dump(options))
        if summary is not None:
            summary.write(folder)
        return folder

    def records(self) -> list[Record]:
        return find_runs([self.folder])[1]

    def table(self, of: Callable[..., list[list[str]]] = results) -> list[dict[str, str]]:
        head, *rows = of(group_runs(self.records()))
        return [dict(zip(head, row, strict=True)) for row in rows]

    def page(self, title: str = "t") -> str:
        return as_page(title, group_runs(self.records()), self.records())


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: Patch) -> Runs:
    """Without curves, which take a second. Who looks at them calls `monkeypatch.undo()`."""
    monkeypatch.setattr(page_module, "draw", lambda groups: b"<svg/>")
    return Runs(tmp_path)


def test_a_class_has_its_last_name_unless_another_one_shares_it(runs: Runs) -> None:
    for number, names in enumerate((("mine.Net", "a.SGD"), ("mine.Wide", "b.SGD"))):
        model, optimizer = names
        runs.make(str(number), model___target_=model, optimizer___target_=optimizer)
    assert [group.differing for group in group_runs(runs.records())] == [
        ("model=Net", "optimizer._target_=a.SGD"),
        ("model=Wide", "optimizer._target_=b.SGD"),
    ]


def test_tested_runs_are_compared_by_their_test(runs: Runs) -> None:
    tested = {"test_loss": 0.3, "tested": "best"}
    runs.make("a", replace(SUMMARY, **tested, test_metrics={"accuracy": 0.8}))
    runs.make("b", replace(MIXED, **tested, test_metrics={"accuracy": 0.7}))
    _, mixed = runs.table()
    assert (mixed["test accuracy"], mixed["gap to fp32"][:7]) == ("0.7000", "-0.1000")
    assert "accuracy" not in mixed
    assert runs.table(every_run)[0]["metric"] == "accuracy 0.9000"
    runs.make("c", replace(MIXED, seed=3))  # One run without: then by the validation.
    assert "accuracy" in runs.table()[1]


def test_runs_that_differ_in_the_seed_alone_are_one_row(runs: Runs) -> None:
    cheaper: dict[str, Any] = {"samples_per_second": 2000.0, "median_step_seconds": 0.002}
    for seed, accuracy in ((1, 0.90), (2, 0.94), (3, 0.95)):
        runs.make(f"a{seed}", replace(SUMMARY, seed=seed, val_metric=accuracy))
        own = {"seed": seed, "val_metric": accuracy - 0.01, "skipped_steps": seed}
        runs.make(f"b{seed}", replace(MIXED, peak_memory_bytes=75 * 2**20, **cheaper, **own))
    common = {"n": "3", "best": "0.9600", "val loss": "0.2"}
    full, mixed = runs.table()
    one = {"accuracy": "0.9300\n0.9000 – 0.9500", "gap to fp32": ""}
    assert full == {**common, MODE: "fp32, none", **one}
    gap = "-0.0100\nfp32: n 3, spread 0.0500"
    one = {"accuracy": "0.9200\n0.8900 – 0.9400", "gap to fp32": gap}
    assert mixed == {**common, MODE: "mixed float16, Backoff", **one}
    full, mixed = runs.table(costs)
    assert full["step, ms"] == "4"
    assert list(mixed.items()) == [
        *((MODE, "mixed float16, Backoff"), ("step, ms", "2\n0.50 x fp32")),
        *(("samples / s", "2000\n2.00 x fp32"), ("memory, MiB", "75\n0.75 x fp32")),
        *(("skipped", "2\n1 – 3"), ("final scale", "65536")),
    ]


def test_ways_to_divide_a_run_are_rows_and_options_that_only_watch_are_not(runs: Runs) -> None:
    for seed, way in enumerate(("ddp", "ddp", "fsdp")):
        options = {"trainer": {"parallel": way, "log_every": seed + 1}}
        runs.make(f"a{seed}", replace(SUMMARY, seed=seed), **options)
    words = "fp32, none\ntrainer.parallel="
    rows = [(row[MODE], row["n"]) for row in runs.table()]
    assert rows == [(f"{words}ddp", "2"), (f"{words}fsdp", "1")]


FEW = "too few seeds to tell"


def test_one_seed_beside_several_of_fp32_is_no_finding(runs: Runs) -> None:
    for seed in (1, 2, 3):
        runs.make(f"full{seed}", replace(SUMMARY, seed=seed, val_metric=0.9 + seed * 0.01))
    runs.make("mixed", replace(MIXED, val_metric=0.95, median_step_seconds=0.002))
    _, mixed = runs.table()
    assert (mixed["n"], mixed["gap to fp32"]) == ("1", f"+0.0300\nfp32: n 3, {FEW}")
    assert "x fp32" not in str(runs.table(costs))


@pytest.mark.parametrize(
    ("seeds", "differ", "told"), [(3, 0.01, "spread 0.0200"), (2, 0.01, FEW), (3, 0.0, FEW)]
)
def test_fp32_runs_that_differ_only_in_loss_scaling_count_once(
    seeds: int, differ: float, told: str, runs: Runs
) -> None:
    for seed in range(1, seeds + 1):
        own: dict[str, Any] = {"seed": seed, "val_metric": 0.9 + seed * differ}
        for name in ("none", "Backoff"):
            full = replace(SUMMARY, loss_scaling=name, **own)
            runs.make(f"{name}{seed}", full, loss_scaling__growth_interval=len(name))
        runs.make(f"mixed{seed}", replace(MIXED, **own))
    assert runs.table()[-1]["gap to fp32"] == f"+0.0000\nfp32: n {seeds}, {told}"


def test_fp32_has_the_groups_own_options(runs: Runs) -> None:
    for lr, accuracy in ((0.1, 0.9), (0.2, 0.5)):
        runs.make(f"full{lr}", replace(SUMMARY, val_metric=accuracy), optimizer__lr=lr)
        # Options of precision do not part a run from its fp32 runs.
        own = {"optimizer__lr": lr, "loss_scaling__init_scale": 2.0, "ops": {"deny": []}}
        runs.make(f"mixed{lr}", replace(MIXED, val_metric=accuracy + 0.03), **own)
    rows = {row[MODE]: row["gap to fp32"][:7] for row in runs.table()}
    assert list(rows.values()) == ["", "", "+0.0300", "+0.0300"]
    assert list(rows)[:2] == ["fp32, none\noptimizer.lr=0.1", "fp32, none\noptimizer.lr=0.2"]


def test_times_of_emulated_float16_are_not_a_gpu_s(runs: Runs) -> None:
    for words, warned in (("cpu auto", [EMULATED]), ("cpu native", []), ("cuda auto", [])):
        device, compute = words.split()
        folder = runs.make(words, replace(MIXED, device=device), dtype__compute=compute)
        groups = group_runs(records := find_runs([folder])[1])
        shown = {section.title: section.notes for section in sections(groups)}
        assert list(shown["Speed and memory"]) == [*COST_NOTES, *warned]
        assert (EMULATED in as_page("t", groups, records)) == bool(warned)


def test_each_recipe_has_a_row_and_a_gap(runs: Runs) -> None:
    bfloat = replace(SUMMARY, dtype="mixed", half="bfloat16")
    for seed in (1, 2, 3):
        runs.make(f"a{seed}", replace(SUMMARY, seed=seed))
        for name, gap in (("none", 0.0), ("mxfp8", 0.01), ("nvfp4", 0.05)):
            file = yaml.safe_load((Path(CONF) / "dtype" / "products" / f"{name}.yaml").read_text())
            own = {"dtype__products": name, "dtype__recipes": file.get("recipes", {})}
            runs.make(f"{name}{seed}", replace(bfloat, seed=seed, val_metric=0.9 - gap), **own)
    full, *rows = runs.table()
    assert full[MODE] == "fp32, none"
    gaps = {row[MODE].partition("products=")[2]: row["gap to fp32"].split()[0] for row in rows}
    assert gaps == {"none": "+0.0000", "mxfp8": "-0.0100", "nvfp4": "-0.0500"}
    assert {row["n"] for row in rows} == {"3"}


def test_unfinished_runs_are_shown_and_not_averaged(runs: Runs) -> None:
    runs.make("0", SUMMARY)
    stopped = {Status.DIVERGED: "too high", Status.INTERRUPTED: "SIGTERM", Status.FAILED: "no disk"}
    for status, reason in stopped.items():
        runs.make(f"1{status}", replace(SUMMARY, status=status, reason=reason, val_metric=0.1))
    runs.make("4", None)
    runs.make("5", replace(MIXED, reason="1 step applied, 43 skipped: most of the run"))
    runs.make("6", replace(MIXED, status=Status.DIVERGED, reason="too high", final_scale=1.0))
    first, second = runs.table()
    assert (first["n"], first["accuracy"]) == ("1 of 5", "0.9000")
    assert (second["n"], runs.table(costs)[1]["final scale"]) == ("1 of 2", "65536")
    assert second["gap to fp32"].startswith("+0.0000\nfp32: n 1")
    told = dict(row["status"].split("\n") for row in runs.table(every_run)[1:])
    skipped = {"finished": "1 step applied, 43 skipped: most of the run"}
    others = {"no summary": "killed, or still running", **skipped}
    assert told == {str(status): reason for status, reason in stopped.items()} | others
    page = runs.page()
    assert all(reason in page for reason in told.values())


def test_a_run_that_cannot_be_read_is_shown(runs: Runs) -> None:
    (runs.make("0", None) / "config_resolved.yaml").write_text("a: &a [1]\nb: *a\n")
    (runs.make("1", SUMMARY) / "summary.json").write_text("{")
    away = f"see {runs.folder}/sweep/2/autopsy/a.md"
    runs.make("2", replace(SUMMARY, status=Status.DIVERGED, reason=away))
    (early := runs.folder / "3" / ".hydra").mkdir(parents=True)  # It failed before its first line.
    (early / "overrides.yaml").write_text("[]")
    found = {run.name: run for run in runs.records()}
    unread = {"sweep/0": "no summary", "sweep/1": "unreadable", "sweep/2": "diverged"}
    assert {name: run.status for name, run in found.items()} == {"3": "no summary", **unread}
    assert found["sweep/1"].reason.startswith("summary.json: not a run's summary (")
    assert (found["sweep/2"].reason, found["3"].mode) == ("see autopsy/a.md", "unknown")
    assert str(runs.folder) not in runs.page()


def test_repeated_steps_are_not_warned_of(runs: Runs, caplog: Log) -> None:
    folder = runs.make("resumed")
    for first in (1, 2):
        with closing(Tracker(folder, purge_step=first)) as tracker:
            for step in (first, first + 1):
                tracker.scalars(step, {Tag.LOSS_TRAIN: 1.0})
    (record,) = runs.records()
    assert [step for step, _ in record.curves[Tag.LOSS_TRAIN]] == [1, 2, 3]
    assert caplog.messages == []


def test_the_page_lies_in_the_sweep_or_in_out_and_runs_in_the_order_of_their_numbers(
    runs: Runs, capsys: Shown
) -> None:
    folders = [str(runs.make(name, MIXED)) for name in ("10", "2", "1", "3")]
    sweep, out = runs.folder / "sweep", runs.folder / "a" / "b"
    home, found = find_runs([sweep / "2", sweep])
    assert (home, [run.name for run in found]) == (sweep, ["2", "1", "3", "10"])
    report_command.main([str(sweep), f"out={out}"])
    assert [(folder / "report.html").exists() for folder in (out, sweep)] == [True, False]
    for named, title in ((folders[:1], "sweep"), (folders, "10, 2, 1 and 1 more")):
        report_command.main(named)
        assert f"<h1>Runs of {title}</h1>" in (sweep / "report.html").read_text()
    with pytest.raises(SystemExit):
        report_command.main([str(out)])
    assert f"{out}: holds no run; name the folder of a run or of a sweep" in capsys.readouterr().err


EVIL = "<script>alert(1)</script>"
ESCAPE = "\x1b[2J\u202e"
HARMLESS = "html head meta title style body h1 h2 p div table thead tbody tr th td br span figure "
HARMLESS += "img figcaption"


def test_what_comes_from_runs_is_text_in_one_file_without_an_address(
    runs: Runs, monkeypatch: Patch
) -> None:
    """Every text of the runs is hostile."""
    monkeypatch.undo()
    told = {"reason": f"x {EVIL} | y{ESCAPE}", "metric": f"a{EVIL}{ESCAPE}"}
    bad = replace(MIXED, status=Status.FAILED, device=f'"{EVIL}{ESCAPE}', **told)
    hidden = f'"><img src=x onerror={EVIL}{ESCAPE}'
    folder = runs.make(f"x<script>alert(1)<{ESCAPE}", bad, model__hidden=hidden)
    with closing(Tracker(folder)) as tracker:
        for step, loss in enumerate((1.0, float("nan")), start=1):
            tracker.scalars(step, {Tag.LOSS_TRAIN: loss, ESCAPE: 2.0})
    runs.make("$x_{$", SUMMARY, model__hidden=f"$\\frac{{{EVIL}$")
    page = runs.page(EVIL)
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
