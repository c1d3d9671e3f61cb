"""The real TensorBoard server on a folder of runs, read over HTTP.

It has two readers, its own in Python and the fast one that it starts as a process beside it where
that is installed; each has its own rule for hiding what a resumed run repeated.
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
from urllib.request import ProxyHandler, build_opener

import pytest

from mpframe.tracking.tags import Tag, metric_tag
from mpframe.tracking.tracker import Tracker

pytestmark = pytest.mark.slow  # test_tracking.py reads the same with TensorBoard's own reader.
PATIENCE = 90.0  # seconds; a busy machine takes 20 to start the server
ACCURACY = metric_tag("accuracy")
HISTOGRAM = "numerics/weights/exponents/head"
Ask = Callable[..., Any]


def log_run(folder: Path, steps: range, purge_step: int | None, offset: float) -> None:
    """A run as the trainer logs it: loss and scale at each step, accuracy at every fifth."""
    with Tracker(folder, purge_step) as tracker:
        tracker.text(Tag.TEXT_CONFIG, "```yaml\nseed: 0\n```")
        tracker.histogram(HISTOGRAM, [1.0, 3.0], [0.0, 1.0, 2.0], steps.start)
        for step in steps:
            scale = float("inf") if step == 2 else 2.0**16
            tracker.scalars(step, {Tag.LOSS_TRAIN: offset + step, Tag.SCALE: scale})
            if step % 5 == 0:
                tracker.scalars(step, {ACCURACY: (offset + step) / 1000})


@pytest.fixture(params=["auto", "false"], ids=["default reader", "python reader"])
def ask(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ask]:
    """A server at a port of its own choice, once it has read every run to its last step.

    There are two: `plain`, and `resumed`, which was killed at 20 and went on from 10.
    """
    log_run(tmp_path / "sweep" / "resumed", range(1, 21), None, 0.0)
    log_run(tmp_path / "sweep" / "resumed", range(11, 31), 11, 500.0)
    log_run(tmp_path / "plain", range(1, 11), None, 0.0)
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(tmp_path)]
    command += ["--host", "localhost", "--port", "0", "--load_fast", request.param]
    with (log := tmp_path / "log.txt").open("wb") as output:
        # In a session of its own, so that the data server it starts ends with it.
        options = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
        server = subprocess.Popen(command, **options)
    opener = build_opener(ProxyHandler({}))  # Addresses on this machine are not asked of a proxy.

    def asked(path: str, **query: str) -> Any:
        (address,) = re.findall(r"http://localhost:\d+", log.read_text(errors="replace"))
        with opener.open(f"{address}/data/{path}?{urlencode(query)}", timeout=30) as answer:
            return json.load(answer)

    def ready() -> bool:
        try:
            last = [points(asked, run)[-1][0] for run in ("plain", "sweep/resumed")]
        except (ValueError, HTTPError):  # It does not listen yet, or has not met the run.
            return False
        return last == [10, 30]

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


def points(ask: Ask, run: str, tag: str = Tag.LOSS_TRAIN) -> list[tuple[int, Any]]:
    return [(step, v) for _, step, v in ask("plugin/scalars/scalars", run=run, tag=tag)]


def test_each_step_is_shown_once_with_its_meaning(ask: Ask) -> None:
    assert points(ask, "plain") == [(s, float(s)) for s in range(1, 11)]
    scales = [scale for _, scale in points(ask, "plain", Tag.SCALE)]
    assert scales[:3] == [65536.0, "Infinity", 65536.0]
    expected = [(s, s + (500.0 if s > 10 else 0.0)) for s in range(1, 31)]
    assert points(ask, "sweep/resumed") == expected
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
