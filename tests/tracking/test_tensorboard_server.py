"""The real TensorBoard server on a folder of runs, read over HTTP.

The server has two readers, its own in Python and the fast one that it starts as a process beside
it where that is installed; each has its own rule for hiding what a resumed run repeated.
"""

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
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
ALL_STATUSES = ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING"]
CONFIG_TEXT = "```yaml\nseed: 0\n```"
ACCURACY = metric_tag("accuracy")
PICTURE = "numerics/weights/layers_by_exponent"
HISTOGRAM = "numerics/weights/exponents/head"
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def log_run(folder: Path, lr: float, steps: range, purge_step: int | None, offset: float) -> None:
    """A run as the trainer logs it: loss and scale at each step, accuracy at every fifth."""
    with Tracker(folder, purge_step) as tracker:
        tracker.text(Tag.TEXT_CONFIG, CONFIG_TEXT)
        tracker.hparams({"optimizer.lr": lr, "dtype": "mixed", "ema": None}, [ACCURACY])
        tracker.layout(["accuracy"])
        tracker.image(PICTURE, PNG, steps.start)
        tracker.histogram(HISTOGRAM, [1.0, 3.0], [0.0, 1.0, 2.0], steps.start)
        for step in steps:
            scale = float("inf") if step == 2 else 2.0**16
            tracker.scalars(step, {Tag.LOSS_TRAIN: offset + step, Tag.SCALE: scale})
            if step % 5 == 0:
                tracker.scalars(step, {ACCURACY: (offset + step) / 1000})
        tracker.mark_finished()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: `plain`, and `resumed`, which was killed at 20 and went on from 10."""
    folder = tmp_path_factory.mktemp("runs")
    log_run(folder / "sweep" / "resumed", 0.1, range(1, 21), None, 0.0)
    log_run(folder / "sweep" / "resumed", 0.1, range(11, 31), 11, 500.0)
    log_run(folder / "plain", 0.01, range(1, 11), None, 0.0)
    return folder


class Server:
    """A TensorBoard server that listens on localhost, at a port of its own choice."""

    def __init__(self, runs: Path, log: Path, load_fast: str) -> None:
        command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(runs)]
        command += ["--host", "localhost", "--port", "0", "--load_fast", load_fast]
        self._log = log
        with log.open("wb") as output:
            # In a session of its own, so that the data server it starts ends with it.
            self._process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        # Addresses on this machine are not asked of a proxy.
        self._opener = build_opener(ProxyHandler({}))
        self._address = ""

    def wait_until_ready(self, last_steps: dict[str, int]) -> None:
        """Wait until it listens and has read every run to its last step."""
        deadline = time.monotonic() + PATIENCE
        while not (self._listens() and all(self._has_read(*last) for last in last_steps.items())):
            assert self._process.poll() is None, f"the server ended: {self._said()}"
            assert time.monotonic() < deadline, f"not ready in {PATIENCE} s: {self._said()}"
            time.sleep(0.1)

    def _listens(self) -> bool:
        found = re.search(r"http://localhost:\d+", self._said())
        self._address = found[0] if found else ""
        return found is not None

    def _has_read(self, run: str, last_step: int) -> bool:
        try:
            points = self.get("plugin/scalars/scalars", run=run, tag=Tag.LOSS_TRAIN)
        except HTTPError:  # it has not met the run yet
            return False
        return bool(points[-1][1] == last_step)

    def get(self, path: str, **query: str) -> Any:
        return self._json(Request(f"{self._address}/data/{path}?{urlencode(query)}"))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        head = {"Content-Type": "application/json"}
        return self._json(Request(f"{self._address}/data/{path}", json.dumps(body).encode(), head))

    def _said(self) -> str:
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=PATIENCE)

    def _json(self, request: Request) -> Any:
        with self._opener.open(request, timeout=30) as answer:
            return json.load(answer)


@pytest.fixture(scope="module", params=["auto", "false"], ids=["default reader", "python reader"])
def server(
    request: pytest.FixtureRequest, runs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log.txt"
    server = Server(runs, log, request.param)
    try:
        server.wait_until_ready({"plain": 10, "sweep/resumed": 30})
        yield server
    finally:
        server.kill()


def session_groups(server: Server, **column: str) -> list[dict[str, Any]]:
    columns = [{"hparam": "optimizer.lr"} | column, {"metric": {"tag": ACCURACY, "group": ""}}]
    body = {"allowedStatuses": ALL_STATUSES, "colParams": columns, "startIndex": 0, "sliceSize": 9}
    groups: list[dict[str, Any]] = server.post("plugin/hparams/session_groups", body)[
        "sessionGroups"
    ]
    return groups


def test_the_curves(server: Server, runs: Path) -> None:
    assert server.get("environment")["data_location"] == str(runs)
    assert sorted(server.get("runs")) == ["plain", "sweep/resumed"]
    tags = {run: set(tags) for run, tags in server.get("plugin/scalars/tags").items()}
    expected = {Tag.LOSS_TRAIN.value, Tag.SCALE.value, ACCURACY}
    assert tags == {"plain": expected, "sweep/resumed": expected}
    points = server.get("plugin/scalars/scalars", run="plain", tag=Tag.LOSS_TRAIN)
    assert [(step, value) for _, step, value in points] == [(s, float(s)) for s in range(1, 11)]
    points = server.get("plugin/scalars/scalars", run="plain", tag=Tag.SCALE)
    assert [value for _, step, value in points if step <= 3] == [65536.0, "Infinity", 65536.0]


def test_a_tag_is_shown_with_its_meaning_and_its_values(server: Server) -> None:
    shown = server.get("plugin/scalars/tags")["plain"][Tag.SCALE]["description"]
    assert shown == (
        "<p><strong>Loss scale</strong> (unit: none): the number that the loss of the step was "
        "multiplied by.</p>"
    )
    pictures, counts = (
        server.get(f"plugin/{kind}/tags")["plain"] for kind in ("images", "histograms")
    )
    assert "<strong>Ranges of all layers</strong>" in pictures[PICTURE]["description"]
    assert "<strong>Exponents of <code>head</code>" in counts[HISTOGRAM]["description"]
    (picture,) = server.get("plugin/images/images", run="plain", tag=PICTURE, sample="0")
    assert picture["step"] == 1
    ((_, step, bars),) = server.get("plugin/histograms/histograms", run="plain", tag=HISTOGRAM)
    assert (step, sum(count for *_, count in bars)) == (1, 4.0)


def test_a_resumed_run_shows_each_step_once(server: Server) -> None:
    def curve(tag: str) -> list[tuple[int, float]]:
        points = server.get("plugin/scalars/scalars", run="sweep/resumed", tag=tag)
        return [(step, pytest.approx(value)) for _, step, value in points]

    expected = [(s, s + (500.0 if s > 10 else 0.0)) for s in range(1, 31)]
    assert curve(Tag.LOSS_TRAIN) == expected
    assert curve(ACCURACY) == [(s, value / 1000) for s, value in expected if s % 5 == 0]


def test_hparams_have_one_session_per_run(server: Server) -> None:
    experiment = server.post("plugin/hparams/experiment", {})
    types = {info["name"]: info["type"] for info in experiment["hparamInfos"]}
    assert types == {
        "optimizer.lr": "DATA_TYPE_FLOAT64",
        "dtype": "DATA_TYPE_STRING",
        "ema": "DATA_TYPE_STRING",
    }
    assert [info["name"]["tag"] for info in experiment["metricInfos"]] == [ACCURACY]
    groups = {group["name"]: group for group in session_groups(server)}
    assert {name: group["hparams"] for name, group in groups.items()} == {
        "plain": {"optimizer.lr": 0.01, "dtype": "mixed", "ema": "none"},
        "sweep/resumed": {"optimizer.lr": 0.1, "dtype": "mixed", "ema": "none"},
    }
    values = {name: group["metricValues"][0]["value"] for name, group in groups.items()}
    assert values == pytest.approx({"plain": 0.01, "sweep/resumed": 0.53})
    statuses = {session["status"] for group in groups.values() for session in group["sessions"]}
    assert statuses == {"STATUS_SUCCESS"}
    for order, expected in (
        ("ORDER_ASC", ["plain", "sweep/resumed"]),
        ("ORDER_DESC", ["sweep/resumed", "plain"]),
    ):
        assert [group["name"] for group in session_groups(server, order=order)] == expected
