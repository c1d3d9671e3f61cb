"""Storms: runs killed at random moments, saves included, come to the same as the undisturbed run.

`./dev all` runs the short storm, `pytest -m storm` the long one, over a checkpoint of more than 100
MB. One run of each kind is struck in test_interruption.py.
"""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from checkout import ROOT
from in_process import assert_same_run
from processes import exit_code, saving, start, training, wait_until

from mpframe import checkpoint

OPTIONS = ["model=mlp", "model.dropout=0.1", "dataset.augment=crop", "dtype=mixed"]
OPTIONS += ["loss_scaling=LogMax", "trainer.ema_decay=0.9", "trainer.checkpoint_every=3"]
OPTIONS += ["trainer.eval_every=4", "trainer.max_steps=14", "trainer.log_every=1"]
OPTIONS += ["trainer.keep_best=1"]
SLOW = 300  # seconds, on a machine that is busy
STRIKES = {"SIGKILL": 30, "SIGTERM": 10}


class Storm:
    """An undisturbed run, and others that are struck at moments of a seed and must equal it."""

    def __init__(self, folder: Path, options: list[str], seed: int) -> None:
        self.folder, self.options, self.random = folder, options, random.Random(seed)
        self.whole = folder / "whole"
        process = start(self.whole, *options)
        assert wait_until(lambda: (self.whole / ".lock").exists(), process, SLOW)
        locked = time.monotonic()
        assert wait_until(lambda: training(self.whole), process, SLOW)
        began = time.monotonic()
        self.startup = began - locked
        assert exit_code(process, SLOW) == 0
        self.seconds = time.monotonic() - began

    def strike(self, number: int, name: str, *options: str, early: bool = False) -> None:
        """Signal a run at a random moment, early: before its first step; let it go on; compare."""
        struck, expected = self.folder / f"{name}-{number}", {"SIGKILL": -9, "SIGTERM": 143}[name]
        # Every third time in a save, wherever in it that may be.
        while self._signalled(struck, name, number % 3 == 0, early, *options) != expected:
            shutil.rmtree(struck)  # It was over before its moment came.
        assert exit_code(start(struck, *self.options, *options, "resume=auto"), SLOW) == 0
        assert_same_run(self.whole, struck)
        shutil.rmtree(struck)

    def _signalled(self, struck: Path, name: str, in_save: bool, early: bool, *options: str) -> int:
        process = start(struck, *self.options, *options)
        begun = (struck / ".lock").exists if early else lambda: training(struck)
        wait_until(begun, process, SLOW)
        time.sleep(self.random.uniform(0, 0.5 * self.startup if early else 0.9 * self.seconds))
        if in_save and not early and wait_until(lambda: saving(struck), process, SLOW):
            time.sleep(self.random.uniform(0, 0.02 * self.seconds))
        if process.is_alive():
            os.kill(process.pid or 0, signal.Signals[name])
        return exit_code(process, SLOW)


@pytest.mark.slow
def test_a_short_storm(tmp_path: Path) -> None:
    storm = Storm(tmp_path, [*OPTIONS, "model.hidden=64"], seed=1)
    for number in range(3):
        storm.strike(number, "SIGKILL", f"trainer.async_save={bool(number % 2)}")
    storm.strike(0, "SIGTERM")
    for name in STRIKES:
        storm.strike(0, name, early=True)


def test_the_page_tells_the_size_of_the_storm() -> None:
    page = " ".join((ROOT / "docs" / "checkpoints.md").read_text().split())
    kills, terms = STRIKES.values()
    assert f"by SIGKILL at {kills} random moments" in page
    assert f"by SIGTERM at {terms}. All {kills + terms} resumed runs eq" in page


@pytest.mark.storm
@pytest.mark.parametrize(("name", "strikes"), STRIKES.items())
def test_a_long_storm(tmp_path: Path, name: str, strikes: int) -> None:
    storm = Storm(tmp_path, [*OPTIONS, "model.hidden=2816"], seed=2)  # 130 MB
    assert (checkpoint.newest(storm.whole) / "state.pt").stat().st_size >= 100_000_000
    for number in range(strikes):
        storm.strike(number, name, f"trainer.async_save={bool(number % 2)}")
