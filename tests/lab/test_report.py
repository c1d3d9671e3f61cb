"""Reports: what is compared with what, what is told of failed runs, what a page may hold."""

import base64
import itertools
import random
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from mpframe.cli.commands import report as report_command
from mpframe.config.locations import CONF
from mpframe.core.errors import ConfigError
from mpframe.lab.report.page import _panels, as_markdown, as_page, draw
from mpframe.lab.report.records import find_runs
from mpframe.lab.report.tables import (
    costs,
    every_run,
    group_runs,
    recipes,
    results,
    tabulate_unfinished,
)
from mpframe.tracking.summary import Status, Summary
from mpframe.tracking.tags import Tag, metric_tag
from mpframe.tracking.tracker import Tracker

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
SUMMARY = Summary(
    status=Status.FINISHED,
    steps=100,
    skipped_steps=0,
    epochs=1,
    train_loss=0.1,
    val_loss=0.2,
    metric="accuracy",
    val_metric=0.9,
    best=0.96,
    best_step=80,
    seconds=10.0,
    samples_per_second=1000.0,
    median_step_seconds=0.004,
    peak_memory_bytes=100 * 2**20,
    dtype="fp32",
    loss_scaling="none",
    seed=1,
    device="cpu",
    torch="2.11.0",
)
MIXED = replace(SUMMARY, dtype="mixed", half="float16", loss_scaling="Backoff", final_scale=65536.0)

MakeRun = Callable[..., Path]


def options_of(summary: Summary, **other: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "model": {"_target_": "mpframe.workloads.images.mlp", "hidden": 8},
        "dtype": {"mode": summary.dtype, "half": summary.half or "float16"},
        "loss_scaling": {"_target_": f"mpframe.core.loss_scaling.{summary.loss_scaling}"},
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1},
        "seed": summary.seed,
    }
    for path, value in other.items():
        section, _, name = path.partition("__")
        options[section] = {**options[section], name: value} if name else value
    return options


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Write a run's folder: make_run(name, summary or None, option__name=value, ...)."""

    def make(name: str, summary: Summary | None = SUMMARY, **options: Any) -> Path:
        folder = tmp_path / "sweep" / name
        folder.mkdir(parents=True)
        text = yaml.safe_dump(options_of(summary or SUMMARY, **options))
        (folder / "config_resolved.yaml").write_text(text)
        if summary is not None:
            summary.write(folder)
        return folder

    return make


def table(folder: Path, of: Callable[..., list[list[str]]] = results) -> list[dict[str, str]]:
    head, *rows = of(group_runs(find_runs([folder])[1]))
    return [dict(zip(head, row, strict=True)) for row in rows]


def gaps(folder: Path) -> dict[str, float]:
    """The gap to fp32 of each group that is not fp32, by its label."""
    groups = [g for g in group_runs(find_runs([folder])[1]) if g.runs[0].mode != "fp32"]
    pairs = {
        group.label: group.beside(lambda summary: summary.val_metric, group.fp32)
        for group in groups
    }
    return {label: round(p[0].mean - p[1].mean, 4) for label, p in pairs.items() if p}


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
    assert first["metric"] == ("accuracy 0.9000\nbest 0.9600, step 80\ntest 0.8000, best weights")
    records = find_runs([tmp_path])[1]
    text = as_markdown("t", group_runs(records), records)
    assert "| accuracy 0.9000 (best 0.9600, step 80; test 0.8000, best weights) |" in text
    make_run("c", replace(MIXED, seed=3))  # One run without: then by the validation.
    assert "accuracy" in table(tmp_path)[1]


def test_runs_that_differ_in_the_seed_alone_are_one_row(make_run: MakeRun, tmp_path: Path) -> None:
    for seed, accuracy in ((1, 0.90), (2, 0.94), (3, 0.95)):
        make_run(f"a{seed}", replace(SUMMARY, seed=seed, val_metric=accuracy))
        make_run(
            f"b{seed}",
            replace(MIXED, seed=seed, val_metric=accuracy - 0.01, skipped_steps=seed,
                    samples_per_second=2000.0, median_step_seconds=0.002,
                    peak_memory_bytes=75 * 2**20),
        )  # fmt: skip
    full, mixed = table(tmp_path)
    assert full == {
        "precision, scaling": "fp32, none",
        "n": "3",
        "accuracy": "0.9300\n0.9000 – 0.9500",
        "best": "0.9600",
        "gap to fp32": "",
        "val loss": "0.2",
    }
    assert mixed == {
        "precision, scaling": "mixed float16, Backoff",
        "n": "3",
        "accuracy": "0.9200\n0.8900 – 0.9400",
        "best": "0.9600",
        "gap to fp32": "-0.0100\nfp32: n 3, spread 0.0500",
        "val loss": "0.2",
    }
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
    assert (mixed["n"], mixed["gap to fp32"]) == (
        *("1", "+0.0500\nfp32: n 2, too few seeds to tell"),
    )
    assert "x fp32" not in str(table(tmp_path, costs))


@pytest.mark.parametrize("scalings", [("none",), ("none", "Backoff")])
@pytest.mark.parametrize(("seeds", "told"), [(3, "spread 0.0200"), (2, "too few seeds to tell")])
def test_fp32_runs_that_differ_only_in_loss_scaling_count_once(
    scalings: tuple[str, ...], seeds: int, told: str, make_run: MakeRun, tmp_path: Path
) -> None:
    for seed in range(1, seeds + 1):
        accuracy = 0.9 + seed / 100
        for name in scalings:
            full = replace(SUMMARY, seed=seed, val_metric=accuracy, loss_scaling=name)
            make_run(f"{name}{seed}", full, loss_scaling__growth_interval=len(name))
        make_run(f"mixed{seed}", replace(MIXED, seed=seed, val_metric=accuracy))
    *_, mixed = table(tmp_path)
    assert mixed["gap to fp32"] == f"+0.0000\nfp32: n {seeds}, {told}"


def test_without_any_spread_the_seeds_are_too_few(make_run: MakeRun, tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        make_run(f"full{seed}", replace(SUMMARY, seed=seed))
        make_run(f"mixed{seed}", replace(MIXED, seed=seed))
    _, mixed = table(tmp_path)
    assert mixed["gap to fp32"] == "+0.0000\nfp32: n 3, too few seeds to tell"


def test_each_group_is_held_against_fp32_with_its_own_options(
    make_run: MakeRun, tmp_path: Path
) -> None:
    for lr, accuracy in ((0.1, 0.9), (0.2, 0.5)):
        make_run(f"full{lr}", replace(SUMMARY, val_metric=accuracy), optimizer__lr=lr)
        make_run(f"mixed{lr}", replace(MIXED, val_metric=accuracy + 0.03), optimizer__lr=lr)
    assert gaps(tmp_path) == {
        "mixed float16 · Backoff · optimizer.lr=0.1": 0.03,
        "mixed float16 · Backoff · optimizer.lr=0.2": 0.03,
    }
    assert [row["precision, scaling"] for row in table(tmp_path)][:2] == [
        "fp32, none\noptimizer.lr=0.1",
        "fp32, none\noptimizer.lr=0.2",
    ]


def test_options_of_precision_do_not_part_a_run_from_its_fp32_runs(
    make_run: MakeRun, tmp_path: Path
) -> None:
    make_run("0", SUMMARY)
    make_run("1", replace(MIXED, val_metric=0.8), loss_scaling__init_scale=2.0, ops={"deny": []})
    assert list(gaps(tmp_path).values()) == [-0.1]


def test_an_option_that_only_one_scaler_has_tells_no_groups_apart(
    make_run: MakeRun, tmp_path: Path
) -> None:
    make_run("0", MIXED, loss_scaling__growth_interval=7)
    make_run("1", replace(MIXED, loss_scaling="LogMax"), loss_scaling__mean_decay=0.5)
    assert [row["precision, scaling"] for row in table(tmp_path)] == [
        "mixed float16, Backoff",
        "mixed float16, LogMax",
    ]


def test_an_option_that_one_run_lacks_does(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("0", MIXED)
    make_run("1", MIXED, model__dropout=0.5)
    assert [row["precision, scaling"] for row in table(tmp_path)] == [
        "mixed float16, Backoff",
        "mixed float16, Backoff\nmodel.dropout=0.5",
    ]


def test_without_fp32_runs_there_is_no_gap(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("0", MIXED)
    (row,) = table(tmp_path)
    assert "gap to fp32" not in row
    assert table(tmp_path, costs)[0]["samples / s"] == "1000"


@pytest.mark.parametrize(
    ("device", "compute", "emulated"),
    [("cpu", "auto", True), ("cpu", "native", False), ("cuda", "auto", False)],
)
def test_times_of_emulated_float16_are_not_a_gpu_s(
    device: str, compute: str, emulated: bool, make_run: MakeRun, tmp_path: Path
) -> None:
    make_run("0", SUMMARY)
    make_run("1", replace(MIXED, device=device), dtype__compute=compute)
    records = find_runs([tmp_path])[1]
    groups = group_runs(records)
    for text in (as_page("t", groups, records), as_markdown("t", groups, records)):
        before, said, after = text.partition("float16 was emulated on a CPU: these times say")
        assert bool(said) == emulated
        assert not emulated or before.rstrip("<p>\n").endswith(("Speed and memory", "memory</h2"))
        assert not emulated or "step, ms" in after


# --- runs that did not finish


# --- recipes for products below 16 bits


def recipe_options(name: str) -> dict[str, Any]:
    file = yaml.safe_load((Path(CONF) / "dtype" / "products" / f"{name}.yaml").read_text())
    return {"dtype__products": name, "dtype__recipes": file.get("recipes", {})}


BFLOAT = replace(SUMMARY, dtype="mixed", half="bfloat16")


def test_recipes_are_held_against_products_in_half(make_run: MakeRun, tmp_path: Path) -> None:
    for seed, loss in ((1, 0.20), (2, 0.24), (3, 0.22)):
        make_run(f"a{seed}", replace(SUMMARY, seed=seed))
        for name, gap in (("none", 0.0), ("mxfp8", 0.01), ("nvfp4", 0.05)):
            done = replace(BFLOAT, seed=seed, val_loss=loss + gap)
            folder = make_run(f"{name}{seed}", done, **recipe_options(name))
            if name == "nvfp4":
                with Tracker(folder) as tracker:
                    for step, share in ((10, 0.5), (20, 0.01 * seed)):
                        tracker.scalars(step, {"numerics/products/saturated/0/dw.x": share})
                    tracker.scalars(10, {"numerics/products/saturated/1/dx.dy": 0.9})
    full, mx, plain, nv = table(tmp_path, recipes)
    assert [row["precision, scaling"] for row in (full, plain, mx, nv)] == [
        "fp32, none",
        "mixed bfloat16, none\ndtype.products=none",
        "mixed bfloat16, none\ndtype.products=mxfp8",
        "mixed bfloat16, none\ndtype.products=nvfp4",
    ]
    assert full["loss gap to none"] == plain["loss gap to none"] == ""
    assert mx["n"] == "3"
    assert mx["loss gap to none"] == "+0.0100\nnone: n 3, spread 0.0400"
    assert nv["loss gap to none"] == "+0.0500\nnone: n 3, spread 0.0400"
    # Of the last report, the worst operand.
    assert (mx["saturated"], nv["saturated"]) == ("", "2.00%\n1.00% – 3.00%")
    records = find_runs([tmp_path])[1]
    for text in (
        as_page("t", group_runs(records), records),
        as_markdown("t", group_runs(records), records),
    ):
        assert "+0.0500" in text
    assert _least_width(recipes(group_runs(records))) < 800 - 40


def test_without_recipes_there_is_no_such_table(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a", BFLOAT)
    assert table(tmp_path, lambda groups: recipes(groups) or [[]]) == []


def test_unfinished_runs_are_shown_and_not_averaged(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("0", SUMMARY)
    stopped = {Status.DIVERGED: "too high", Status.INTERRUPTED: "SIGTERM", Status.FAILED: "no disk"}
    for number, (status, reason) in enumerate(stopped.items(), start=1):
        make_run(str(number), replace(SUMMARY, status=status, reason=reason, val_metric=0.1))
    make_run("4", None)
    groups = group_runs(find_runs([tmp_path])[1])
    (row,) = table(tmp_path)
    assert row["n"] == "1 of 5"
    assert row["accuracy"] == "0.9000"
    said = {line[-2]: line[-1] for line in tabulate_unfinished(groups)[1:]}
    assert said == {
        "diverged": "too high",
        "interrupted": "SIGTERM",
        "failed": "no disk",
        "no summary": "killed, or still running",
    }
    page, text = as_page("t", groups, []), as_markdown("t", groups, [])
    assert all(reason in page and reason in text for reason in said.values())


def test_a_finished_run_that_mostly_skipped_is_remarked(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("0", replace(MIXED, reason="1 step applied, 43 skipped: most of the run"))
    make_run("1", replace(SUMMARY, status=Status.FAILED, reason="no disk"))
    told = [row["status"] for row in table(tmp_path, every_run)]
    assert told == ["failed", "finished\n1 step applied, 43 skipped: most of the run"]


def test_a_run_that_cannot_be_read_is_shown_with_its_reason(
    make_run: MakeRun, tmp_path: Path
) -> None:
    (make_run("0", None) / "config_resolved.yaml").write_text("a: &a [1]\nb: *a\n")
    (make_run("1", SUMMARY) / "summary.json").write_text("{")
    _, runs = find_runs([tmp_path])
    assert [run.status for run in runs] == ["no summary", "unreadable"]
    assert runs[1].reason.startswith("summary.json: not a run's summary (")
    assert str(tmp_path) not in runs[1].reason
    assert as_page("t", group_runs(runs), runs)


def test_a_reason_does_not_show_where_the_folder_lay(make_run: MakeRun, tmp_path: Path) -> None:
    folder = tmp_path / "sweep" / "0"
    make_run("0", replace(SUMMARY, status=Status.DIVERGED, reason=f"see {folder}/autopsy/a.md"))
    _, (record,) = find_runs([tmp_path])
    assert record.reason == "see autopsy/a.md"


def test_a_diverged_loss_of_nan_is_drawn_and_told(make_run: MakeRun, tmp_path: Path) -> None:
    nan = float("nan")
    folder = make_run("0", replace(SUMMARY, status=Status.DIVERGED, val_loss=nan, val_metric=nan))
    with Tracker(folder) as tracker:
        for step in range(1, 4):
            tracker.scalars(step, {Tag.LOSS_TRAIN: nan if step == 3 else 1.0, Tag.SCALE: 8.0})
    _, runs = find_runs([tmp_path])
    assert [step for step, _ in runs[0].curves["loss/train"]] == [1, 2, 3]
    told = dict(zip(*every_run(group_runs(runs)), strict=True))
    assert (told["metric"], told["val loss"]) == ("accuracy nan\nbest 0.9600, step 80", "nan")
    assert as_page("t", group_runs(runs), runs)


# --- which folders are runs


def test_runs_are_found_once_and_in_the_order_of_their_numbers(
    make_run: MakeRun, tmp_path: Path
) -> None:
    for name in ("10", "2", "1", "3"):
        make_run(name)
    sweep = tmp_path / "sweep"
    home, runs = find_runs([sweep / "2", sweep])
    assert home == sweep
    assert [run.name for run in runs] == ["2", "1", "3", "10"]


def test_a_job_that_failed_before_its_first_line_is_a_run(tmp_path: Path) -> None:
    (tmp_path / "0" / ".hydra").mkdir(parents=True)
    (tmp_path / "0" / ".hydra" / "overrides.yaml").write_text("[]")
    _, (run,) = find_runs([tmp_path])
    assert (run.name, run.status, run.mode) == ("0", "no summary", "unknown")


@pytest.mark.parametrize(("name", "says"), [("nothing", "no such folder"), ("", "holds no run")])
def test_a_folder_without_runs_is_one_line(name: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        find_runs([tmp_path / name])
    expected = f"{tmp_path / name}: {says}; name the folder of a run or of a sweep"
    assert str(error.value) == expected


# --- the page


class Tags(HTMLParser):
    """Every tag of a page with its attributes, and all text outside of them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


EVIL = "<script>alert(1)</script>"


@pytest.fixture
def evil_page(make_run: MakeRun, tmp_path: Path) -> tuple[str, str]:
    """Page and Markdown of runs whose every text is hostile."""
    bad = replace(
        MIXED, status=Status.FAILED, reason=f"x {EVIL} | y", metric=f"a{EVIL}", device=f'"{EVIL}'
    )
    folder = make_run("x<script>alert(1)<", bad, model__hidden=f'"><img src=x onerror={EVIL}')
    (folder / "numerics").mkdir()
    (folder / "numerics" / '"><script>.png').write_bytes(PNG)
    with Tracker(folder) as tracker:
        tracker.scalars(1, {Tag.LOSS_TRAIN: 1.0})
    make_run("$x_{$", SUMMARY, model__hidden=f"$\\frac{{{EVIL}")
    _, runs = find_runs([tmp_path])
    groups = group_runs(runs)
    return as_page(EVIL, groups, runs), as_markdown(EVIL, groups, runs)


def test_what_comes_from_runs_is_text(evil_page: tuple[str, str]) -> None:
    page = Tags(evil_page[0])
    assert EVIL in page.text
    assert {tag for tag, _ in page.tags} <= {
        *("html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "div", "table"),
        *("thead", "tbody", "tr", "th", "td", "br", "span", "figure", "img", "figcaption"),
        *("details", "summary"),
    }
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]


def test_no_text_of_a_run_steers_the_terminal(make_run: MakeRun, tmp_path: Path) -> None:
    escape = "\x1b[2J\u202e"
    bad = replace(MIXED, status=Status.FAILED, reason=escape, metric=escape, device=escape)
    folder = make_run(f"run{escape}", bad, model__hidden=escape)
    with Tracker(folder) as tracker:
        tracker.scalars(1, {Tag.LOSS_TRAIN: 1.0, escape: 2.0})
    make_run("good", replace(SUMMARY, metric=escape), model__hidden=escape)
    _, runs = find_runs([tmp_path])
    groups = group_runs(runs)
    for text in (as_page("t", groups, runs), as_markdown("t", groups, runs)):
        assert not {"\x1b", "\u202e"} & set(text)


def test_the_page_is_one_file_without_an_address(evil_page: tuple[str, str]) -> None:
    page = Tags(evil_page[0])
    sources = [attrs["src"] or "" for tag, attrs in page.tags if tag == "img"]
    assert len(sources) == 2
    assert all(source.startswith("data:image/") for source in sources)
    assert not [attrs for _, attrs in page.tags if "href" in attrs or "srcset" in attrs]
    assert "http" not in re.sub(r'content="default|http-equiv|base64,[^"]*', "", evil_page[0])
    assert any("default-src 'none'" in str(attrs.get("content")) for _, attrs in page.tags)


def test_no_cell_of_the_markdown_is_ended_by_what_it_holds(evil_page: tuple[str, str]) -> None:
    text = evil_page[1]
    assert "<" not in text.replace("\\<", "")
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        bars = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(bars) == 1


def test_range_pictures_are_embedded_with_their_names(make_run: MakeRun, tmp_path: Path) -> None:
    folder = make_run("0") / "numerics"
    folder.mkdir()
    (folder / "weights.png").write_bytes(PNG)
    (folder / "no_picture.png").write_bytes(b"text")
    (folder / "far_too_large.png").write_bytes(PNG + bytes(8 * 2**20))
    (tmp_path / "outside.png").write_bytes(PNG)
    (folder / "link.png").symlink_to(tmp_path / "outside.png")
    _, runs = find_runs([tmp_path])
    assert runs[0].pictures == (("weights.png", PNG),)
    page = as_page("t", group_runs(runs), runs)
    assert f'src="data:image/png;base64,{base64.b64encode(PNG).decode()}"' in page
    assert "<figcaption>0: weights.png</figcaption>" in page


def test_a_report_embeds_no_picture_of_a_folder_elsewhere(
    make_run: MakeRun, tmp_path: Path
) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "passport.png").write_bytes(PNG)
    (make_run("0") / "numerics").symlink_to(tmp_path / "private")
    _, runs = find_runs([tmp_path])
    assert runs[0].pictures == ()


def test_the_same_runs_give_the_same_page(make_run: MakeRun, tmp_path: Path) -> None:
    folder = make_run("0", MIXED)
    with Tracker(folder) as tracker:
        tracker.scalars(1, {Tag.LOSS_TRAIN: 1.0, Tag.SCALE: 8.0, Tag.SKIPPED_TOTAL: 1})
    pages = []
    for _ in range(2):
        _, runs = find_runs([tmp_path])
        pages.append(as_page("t", group_runs(runs), runs))
    assert pages[0] == pages[1]


def nine_runs(make_run: MakeRun, points: int = 400) -> None:
    """Three modes with three seeds each: curves of two metrics, and range pictures."""
    noise = random.Random(0)
    picture = PNG + noise.randbytes(30_000)
    modes = [SUMMARY, MIXED, replace(MIXED, dtype="amp", loss_scaling="LogMax")]
    for number, (summary, seed) in enumerate(itertools.product(modes, (1, 2, 3))):
        folder = make_run(
            f"optimizer.lr=0.003,dtype={summary.dtype},seed={seed}",
            replace(summary, seed=seed, val_metric=noise.uniform(0.9, 0.95), samples_per_second=1e6,
                    skipped_steps=10_000 + seed, final_scale=2.0**24, median_step_seconds=1.0),
            model__hidden=2 ** (number // 3),
        )  # fmt: skip
        (folder / "numerics").mkdir()
        for name in range(10):
            (folder / "numerics" / f"{name}.png").write_bytes(picture)
        with Tracker(folder) as tracker:
            for step in range(points):
                values = {tag: noise.random() for tag in (Tag.LOSS_TRAIN, Tag.SCALE, Tag.LOSS_VAL)}
                values |= {metric_tag(name): noise.random() for name in ("accuracy", "top5")}
                tracker.scalars(step, values)


def test_a_page_of_nine_runs_is_below_two_megabytes_and_fits_800_pixels(
    make_run: MakeRun, tmp_path: Path
) -> None:
    nine_runs(make_run)
    _, runs = find_runs([tmp_path])
    groups = group_runs(runs)
    page = as_page("t", groups, runs)
    assert len(page.encode()) < 2_000_000
    assert page.count("data:image/png") == 29  # of 90; the others by name
    assert page.count("Too large for this page") == 7
    for table in (results(groups), costs(groups), every_run(groups)):
        assert _least_width(table) < 800 - 40


TEXTS = ("run", "precision, scaling", "status", "reason")


def _least_width(table: list[list[str]]) -> float:
    """The least width of a table in pixels: text wraps in 96 pixels, heads between words.

    Numbers do not wrap. A digit of the page's 13.4 pixel letters is at most 8.5 wide, those of a
    second line, of 12.3 pixels, 8; a column's padding is 16.
    """
    width = 0.0
    for head, *cells in zip(*table, strict=True):
        longest = max(8.5 * max(len(word) for word in head.split()), 96 * (head in TEXTS))
        if head not in TEXTS:
            for first, _, second in (cell.partition("\n") for cell in cells):
                longest = max(longest, 8.5 * len(first), 8.0 * len(second))
        width += longest + 16
    return width


def test_every_metric_has_its_curves(make_run: MakeRun, tmp_path: Path) -> None:
    nine_runs(make_run, points=2)
    groups = group_runs(find_runs([tmp_path])[1])
    assert [title for _, title in _panels(groups)] == [
        "training loss", "validation loss", "accuracy", "top5", "loss scale", "skipped steps",
    ]  # fmt: skip


def test_page_and_curves_take_the_colours_of_the_reader(make_run: MakeRun, tmp_path: Path) -> None:
    with Tracker(make_run("0")) as tracker:
        tracker.scalars(1, {Tag.LOSS_TRAIN: 1.0})
    _, runs = find_runs([tmp_path])
    groups = group_runs(runs)
    picture = draw(groups)
    assert b"@media (prefers-color-scheme: dark) { svg {" in picture
    assert b"fill: currentColor" in picture
    assert b"#010203" not in picture
    assert "@media (prefers-color-scheme: dark) { :root {" in as_page("t", groups, runs)


# --- the command


def run(*words: str) -> int:
    try:
        report_command.main(list(words))
    except SystemExit as exit_:
        return int(exit_.code or 0)
    return 0


@pytest.mark.parametrize("named", ["sweep", "sweep/lr=0.1"])
def test_both_files_lie_in_the_sweep(named: str, make_run: MakeRun, tmp_path: Path) -> None:
    make_run("lr=0.1", MIXED)
    assert run(str(tmp_path / named)) == 0
    written = {path.name for path in (tmp_path / "sweep").iterdir()}
    assert written == {"lr=0.1", "report.html", "report.md"}


def test_out_names_another_folder(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("0", MIXED)
    assert run(str(tmp_path / "sweep"), f"out={tmp_path / 'a' / 'b'}") == 0
    assert (tmp_path / "a" / "b" / "report.html").exists()
    assert not (tmp_path / "sweep" / "report.html").exists()


def test_the_title_names_all_folders(make_run: MakeRun, tmp_path: Path) -> None:
    for name in ("0", "1", "2", "3"):
        make_run(name)
    sweep = tmp_path / "sweep"
    for named, title in ((["0"], "sweep"), (["0", "1"], "0, 1"), ("0123", "0, 1, 2 and 1 more")):
        assert run(*(str(sweep / name) for name in named)) == 0
        assert (sweep / "report.md").read_text().startswith(f"# Runs of {title}\n")


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


def test_the_repeated_steps_of_a_resumed_run_are_not_warned_of(
    make_run: MakeRun, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_run("resumed")
    for first in (1, 2):
        with Tracker(folder, purge_step=first) as tracker:
            tracker.scalars(first, {Tag.LOSS_TRAIN: 1.0})
            tracker.scalars(first + 1, {Tag.LOSS_TRAIN: 1.0})
    _, (record,) = find_runs([folder])
    assert [step for step, _ in record.curves[Tag.LOSS_TRAIN]] == [1, 2, 3]
    assert caplog.messages == []
