"""The real TensorBoard server on a resumed run, read over HTTP.

It starts its fast reader as a process beside it where that is installed, which has its own rule for
hiding what a resumed run repeated. test_tracking.py reads the same with the reader in Python.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import ProxyHandler, build_opener

import pytest

from mpframe.tracking.tags import Tag
from mpframe.tracking.tracker import Tracker

PATIENCE = 90.0  # seconds; a busy machine takes 20 to start the server
HISTOGRAM = "numerics/weights/exponents/head"


@pytest.mark.slow
def test_each_step_is_shown_once_with_its_meaning(tmp_path: Path) -> None:
    """Of a run that was killed at 20 and went on from 10."""
    for steps, purge_step, offset in ((range(1, 21), 0, 0.0), (range(11, 31), 11, 500.0)):
        with closing(Tracker(tmp_path / "run", purge_step)) as tracker:
            tracker.text(Tag.TEXT_CONFIG, "```yaml\nseed: 0\n```")
            tracker.histogram(HISTOGRAM, [1.0, 3.0], [0.0, 1.0, 2.0], steps.start)
            for step in steps:
                scale = float("inf") if step == 2 else 2.0**16
                tracker.scalars(step, {Tag.LOSS_TRAIN: offset + step, Tag.SCALE: scale})
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(tmp_path)]
    with (log := tmp_path / "log.txt").open("wb") as output:
        # In a session of its own, so that the data server it starts ends with it.
        options = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
        server = subprocess.Popen([*command, "--host", "localhost", "--port", "0"], **options)
    opener = build_opener(ProxyHandler({}))  # Addresses on this machine are not asked of a proxy.

    def ask(path: str, **query: str) -> Any:
        (address,) = re.findall(r"http://localhost:\d+", log.read_text(errors="replace"))
        url = f"{address}/data/plugin/{path}?{urlencode({'run': 'run', **query})}"
        with opener.open(url, timeout=30) as answer:
            return json.load(answer)

    def points(tag: str) -> list[tuple[int, Any]]:
        try:
            return [(step, value) for _, step, value in ask("scalars/scalars", tag=tag)]
        except (ValueError, HTTPError):  # It does not listen yet, or has not met the run.
            return [(0, None)]

    try:
        deadline = time.monotonic() + PATIENCE
        while points(Tag.LOSS_TRAIN)[-1][0] != 30:
            assert server.poll() is None, f"the server ended: {log.read_text()}"
            assert time.monotonic() < deadline, f"not ready in {PATIENCE} s: {log.read_text()}"
            time.sleep(0.1)
        expected = [(step, step + (500.0 if step > 10 else 0.0)) for step in range(1, 31)]
        assert points(Tag.LOSS_TRAIN) == expected
        assert points(Tag.SCALE)[:3] == [(1, 65536.0), (2, "Infinity"), (3, 65536.0)]
        for kind, tag, said in (
            ("scalars", Tag.SCALE, "<p>the number that the loss "),
            ("histograms", HISTOGRAM, "<p>how many values have each "),
        ):
            assert ask(f"{kind}/tags")["run"][tag]["description"].startswith(said)
        (_, first, bars), (_, second, _) = ask("histograms/histograms", tag=HISTOGRAM)
        assert (first, second, sum(count for *_, count in bars)) == (1, 11, 4.0)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(timeout=PATIENCE)
