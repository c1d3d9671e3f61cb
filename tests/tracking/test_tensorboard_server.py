"""The real TensorBoard server on a folder of runs, read over HTTP.

The server has two readers, its own in Python and the fast one that it starts as a process beside
it where that is installed; each has its own rule for hiding what a resumed run repeated.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import ProxyHandler, Request, build_opener

import pytest

from mpframe.tracking.tags import Tag, metric_tag
from mpframe.tracking.tracker import Tracker

pytestmark = pytest.mark.slow  # test_tracking.py reads the same with TensorBoard's own reader.
PATIENCE = 90.0  # seconds; a busy machine takes 20 to start the server
ACCURACY = metric_tag("accuracy")
HISTOGRAM = "numerics/weights/exponents/head"
Ask = Callable[..., Any]


def log_run(folder: Path, lr: float, steps: range, purge_step: int | None, offset: float) -> None:
    """A run as the trainer logs it: loss and scale at each step, accuracy at every fifth."""
    with Tracker(folder, purge_step) as tracker:
        tracker.text(Tag.TEXT_CONFIG, "```yaml\nseed: 0\n```")
        tracker.hparams({"optimizer.lr": lr, "dtype": "mixed", "ema": None}, [ACCURACY])
        tracker.layout(["accuracy"])
        tracker.histogram(HISTOGRAM, [1.0, 3.0], [0.0, 1.0, 2.0], steps.start)
        for step in steps:
            scale = float("inf") if step == 2 else 2.0**16
            tracker.scalars(step, {Tag.LOSS_TRAIN: offset + step, Tag.SCALE: scale})
            if step % 5 == 0:
                tracker.scalars(step, {ACCURACY: (offset + step) / 1000})
        tracker.mark_finished()


@pytest.fixture(params=["auto", "false"], ids=["default reader", "python reader"])
def ask(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ask]:
    """A server at a port of its own choice, once it has read every run to its last step.

    There are two: `plain`, and `resumed`, which was killed at 20 and went on from 10.
    """
    log_run(tmp_path / "sweep" / "resumed", 0.1, range(1, 21), None, 0.0)
    log_run(tmp_path / "sweep" / "resumed", 0.1, range(11, 31), 11, 500.0)
    log_run(tmp_path / "plain", 0.01, range(1, 11), None, 0.0)
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(tmp_path)]
    command += ["--host", "localhost", "--port", "0", "--load_fast", request.param]
    with (log := tmp_path / "log.txt").open("wb") as output:
        # In a session of its own, so that the data server it starts ends with it.
        options = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
        server = subprocess.Popen(command, **options)
    opener = build_opener(ProxyHandler({}))  # Addresses on this machine are not asked of a proxy.

    def asked(path: str, body: dict[str, Any] | None = None, **query: str) -> Any:
        (address,) = re.findall(r"http://localhost:\d+", log.read_text(errors="replace"))
        data = None if body is None else json.dumps(body).encode()
        head = {"Content-Type": "application/json"} if data else {}
        request = Request(f"{address}/data/{path}?{urlencode(query)}", data, head)
        with opener.open(request, timeout=30) as answer:
            return json.load(answer)

    def ready() -> bool:
        last = {"plain": 10, "sweep/resumed": 30}
        try:
            return all(points(asked, r, Tag.LOSS_TRAIN)[-1][0] == step for r, step in last.items())
        except (ValueError, HTTPError):  # It does not listen yet, or has not met the run.
            return False

    try:
        deadline = time.monotonic() + PATIENCE
        while not ready():
            assert server.poll() is None, f"the server ended: {log.read_text()}"
            assert time.monotonic() < deadline, f"not ready in {PATIENCE} s: {log.read_text()}"
            time.sleep(0.1)
        yield asked
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(timeout=PATIENCE)


def points(ask: Ask, run: str, tag: str) -> list[tuple[int, Any]]:
    return [(step, v) for _, step, v in ask("plugin/scalars/scalars", run=run, tag=tag)]


def test_each_step_is_shown_once_with_its_meaning_and_one_session_per_run(
    ask: Ask, tmp_path: Path
) -> None:
    assert ask("environment")["data_location"] == str(tmp_path)
    tags = {run: set(tags) for run, tags in ask("plugin/scalars/tags").items()}
    own = {Tag.LOSS_TRAIN, Tag.SCALE, ACCURACY}
    assert tags == {"plain": own, "sweep/resumed": own}
    assert points(ask, "plain", Tag.LOSS_TRAIN) == [(s, float(s)) for s in range(1, 11)]
    scales = [scale for _, scale in points(ask, "plain", Tag.SCALE)]
    assert scales[:3] == [65536.0, "Infinity", 65536.0]
    expected = [(s, s + (500.0 if s > 10 else 0.0)) for s in range(1, 31)]
    assert points(ask, "sweep/resumed", Tag.LOSS_TRAIN) == expected
    assert points(ask, "sweep/resumed", ACCURACY) == [
        (s, pytest.approx(value / 1000)) for s, value in expected if s % 5 == 0
    ]
    for kind, tag, said in (
        ("scalars", Tag.SCALE, "<p><strong>Loss scale</strong> (unit: none): the number that "),
        ("histograms", HISTOGRAM, "<p><strong>Exponents of <code>head</code>"),
    ):
        assert ask(f"plugin/{kind}/tags")["plain"][tag]["description"].startswith(said)
    ((_, step, bars),) = ask("plugin/histograms/histograms", run="plain", tag=HISTOGRAM)
    assert (step, sum(count for *_, count in bars)) == (1, 4.0)
    experiment = ask("plugin/hparams/experiment", {})
    types = {info["name"]: info["type"][10:] for info in experiment["hparamInfos"]}
    assert types == {"optimizer.lr": "FLOAT64", "dtype": "STRING", "ema": "STRING"}
    assert [info["name"]["tag"] for info in experiment["metricInfos"]] == [ACCURACY]
    statuses = [f"STATUS_{name}" for name in ("UNKNOWN", "SUCCESS", "FAILURE", "RUNNING")]
    for order, names in (("ASC", ["plain", "sweep/resumed"]), ("DESC", ["sweep/resumed", "plain"])):
        column = {"hparam": "optimizer.lr", "order": f"ORDER_{order}"}
        body = {"colParams": [column, {"metric": {"tag": ACCURACY, "group": ""}}], "startIndex": 0}
        body |= {"allowedStatuses": statuses, "sliceSize": 9}
        found = ask("plugin/hparams/session_groups", body)["sessionGroups"]
        assert [group["name"] for group in found] == names
    last, first = found[1], found[0]
    assert last["hparams"] == {"optimizer.lr": 0.01, "dtype": "mixed", "ema": "none"}
    values = [group["metricValues"][0]["value"] for group in (last, first)]
    assert values == pytest.approx([0.01, 0.53])
    assert {own["status"] for group in found for own in group["sessions"]} == {"STATUS_SUCCESS"}
