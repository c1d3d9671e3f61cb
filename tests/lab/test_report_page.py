"""The page of a report: text from runs stays text, and all of it fits."""

import base64
import itertools
import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from reported_runs import MIXED, PNG, SUMMARY, MakeRun, make_run, read, texts, trace

from mpframe.lab.report.page import _panels, draw
from mpframe.tracking.summary import Status
from mpframe.tracking.tags import Tag, metric_tag

__all__ = ["make_run"]  # a fixture


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
ESCAPE = "\x1b[2J\u202e"
HARMLESS = "html head meta title style body h1 h2 p div table thead tbody tr th td br span figure "
HARMLESS += "img figcaption details summary"


@pytest.fixture
def evil(make_run: MakeRun, tmp_path: Path) -> tuple[str, str]:
    """Page and Markdown of runs whose every text is hostile."""
    told = {"reason": f"x {EVIL} | y{ESCAPE}", "metric": f"a{EVIL}{ESCAPE}"}
    bad = replace(MIXED, status=Status.FAILED, device=f'"{EVIL}{ESCAPE}', **told)
    hidden = f'"><img src=x onerror={EVIL}{ESCAPE}'
    folder = make_run(f"x<script>alert(1)<{ESCAPE}", bad, model__hidden=hidden)
    (folder / "numerics").mkdir()
    (folder / "numerics" / '"><script>.png').write_bytes(PNG)
    trace(folder, {Tag.LOSS_TRAIN: 1.0, ESCAPE: 2.0})
    make_run("$x_{$", SUMMARY, model__hidden=f"$\\frac{{{EVIL}$")
    return texts(tmp_path, EVIL)


def test_what_comes_from_runs_is_text_in_one_file_without_an_address(evil: tuple[str, str]) -> None:
    page = Tags(evil[0])
    assert EVIL in page.text
    assert {tag for tag, _ in page.tags} <= {*HARMLESS.split()}
    names = {name for _, attrs in page.tags for name in attrs}
    assert not [n for n in names if n.startswith("on") or n in ("href", "srcset")]
    assert not {"\x1b", "\u202e"} & set("".join(evil))  # Nothing steers the terminal.
    sources = [str(attrs["src"]) for tag, attrs in page.tags if tag == "img"]
    assert [source[:11] for source in sources] == ["data:image/"] * 2
    assert "http" not in re.sub(r'content="default|http-equiv|base64,[^"]*', "", evil[0])
    assert any("default-src 'none'" in str(attrs.get("content")) for _, attrs in page.tags)


def test_no_cell_of_the_markdown_is_ended_by_what_it_holds(evil: tuple[str, str]) -> None:
    assert "<" not in evil[1].replace("\\<", "")
    for block in re.findall(r"(?:^\|.*\n)+", evil[1], re.M):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


def test_range_pictures_are_embedded_with_their_names(make_run: MakeRun, tmp_path: Path) -> None:
    """Not what is no picture, too large, or in a folder elsewhere."""
    folder = make_run("0") / "numerics"
    for place in (folder, tmp_path / "private"):
        place.mkdir()
    (folder / "weights.png").write_bytes(PNG)
    (folder / "no_picture.png").write_bytes(b"text")
    (folder / "far_too_large.png").write_bytes(PNG + bytes(8 * 2**20))
    (tmp_path / "private" / "passport.png").write_bytes(PNG)
    (folder / "link.png").symlink_to(tmp_path / "private" / "passport.png")
    (make_run("1") / "numerics").symlink_to(tmp_path / "private")
    assert [run.pictures for run in read(tmp_path)[0]] == [(("weights.png", PNG),), ()]
    page, _ = texts(tmp_path)
    assert f'src="data:image/png;base64,{base64.b64encode(PNG).decode()}"' in page
    assert "<figcaption>0: weights.png</figcaption>" in page


def test_a_page_of_nine_runs_is_below_two_megabytes(make_run: MakeRun, tmp_path: Path) -> None:
    noise = random.Random(0)
    picture = PNG + noise.randbytes(30_000)
    modes = [SUMMARY, MIXED, replace(MIXED, dtype="amp", loss_scaling="LogMax")]
    tags = [Tag.LOSS_TRAIN, Tag.SCALE, Tag.LOSS_VAL, *map(metric_tag, ("accuracy", "top5"))]
    for number, (summary, seed) in enumerate(itertools.product(modes, (1, 2, 3))):
        done = replace(summary, seed=seed)
        name = f"optimizer.lr=0.003,dtype={summary.dtype},seed={seed}"
        folder = make_run(name, done, model__hidden=2 ** (number // 3))
        (folder / "numerics").mkdir()
        for index in range(10):
            (folder / "numerics" / f"{index}.png").write_bytes(picture)
        trace(folder, *({tag: noise.random() for tag in tags} for _ in range(40)))
    page, _ = texts(tmp_path)
    assert len(page.encode()) < 2_000_000
    assert page.count("data:image/png") == 29  # of 90; the others by name
    assert page.count("Too large for this page") == 7
    groups = read(tmp_path)[1]
    titles = ["training loss", "validation loss", "accuracy", "top5", "loss scale", "skipped steps"]
    assert [title for _, title in _panels(groups)] == titles
    assert b"@media (prefers-color-scheme: dark) { svg {" in draw(groups)
