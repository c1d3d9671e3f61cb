"""Storms of ranks: killed at random moments, saves included, and started again.

`./dev all` runs the short ones, `pytest -m storm` the long ones.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import ranked
from checkout import HELPERS, ROOT
from processes import saving, wait_until
from ranked import NOISY, OWN, SHARDED, assert_same_results, summary_in, trouble
from ranks import Ranks

from mpframe import checkpoint
from mpframe.tracking.summary import Status

OPTIONS = [
    "model=mlp", "model.hidden=64", "model.dropout=0.1", "dataset.augment=crop", f"dtype={SHARDED}",
    "loss_scaling=LogMax", "trainer.ema_decay=0.9", "trainer.checkpoint_every=3",
    "trainer.max_steps=14", "trainer.log_every=1", "resume=auto",
]  # fmt: skip
SLOW = 300  # seconds, on a machine that is busy
HSDP = "fsdp distributed.replicas=2"
KINDS = [(1, "none"), (2, "ddp"), (4, "ddp"), (2, "fsdp"), (4, "fsdp"), (4, HSDP)]


@pytest.fixture(scope="module")
def whole(two: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    two(ranked.run, folder := tmp_path_factory.mktemp("whole") / "run", *OPTIONS)
    return folder


class Storm:
    """Kills ranks of a run at moments that `seed` chooses, and looks at what they leave."""

    def __init__(self, whole: Path, seed: int) -> None:
        self.random, self.hits = random.Random(seed), 0  # killed before the run was over
        self._seconds = summary_in(whole)["train_seconds"]

    def strike(self, folder: Path, size: int, parallel: str) -> None:
        """Let so many ranks go on with a run, and kill one; what is saved can be loaded."""
        began, curves, summary = time.time_ns(), folder / "metrics.csv", folder / "summary.json"
        with Ranks(size) as own:
            victim = self.random.choice(own.processes)
            behind = f"trainer.async_save={self.random.random() < 0.5}"
            own.begin(ranked.run, folder, *OPTIONS, *f"trainer.parallel={parallel}".split(), behind)
            wait_until(lambda: curves.exists() and curves.stat().st_mtime_ns > began, victim, SLOW)
            time.sleep(self.random.uniform(0, 0.7 * self._seconds))
            if self.random.random() < 0.4:
                limit = time.monotonic() + self._seconds
                wait_until(lambda: saving(folder) or time.monotonic() > limit, victim, SLOW)
            os.kill(victim.pid or 0, signal.SIGKILL)
            # The others notice, and end after 2 s; torchrun would kill them before that.
            time.sleep(self.random.uniform(0, 3))
        self.hits += not summary.exists() or summary_in(folder)["status"] != Status.FINISHED
        if checkpoint.all_in(folder):
            checkpoint.read(folder)

    def pass_over(self, folder: Path, runs: Sequence[tuple[int, str]]) -> None:
        """Strike each of these, by its ranks and kind; the last comes to the end."""
        *struck, (size, parallel) = runs
        for each in struck:
            self.strike(folder, *each)
        with Ranks(size) as own:
            ends = own(ranked.run, folder, *OPTIONS, *f"trainer.parallel={parallel}".split())
        assert {getattr(end, "status", end) for end in ends} == {Status.FINISHED}
        assert checkpoint.read(folder).global_step == 14


@pytest.mark.slow
def test_ranks_come_through_a_short_storm(whole: Path, tmp_path: Path) -> None:
    runs = [(4, HSDP), (4, "fsdp"), (2, "ddp"), (1, "none")]
    Storm(whole, seed=1).pass_over(tmp_path / "run", runs)


@pytest.mark.storm
@pytest.mark.parametrize("kinds", [KINDS, [(2, "ddp")]], ids=["one, two and four", "two"])
def test_ranks_come_through_a_storm(whole: Path, tmp_path: Path, kinds: Any) -> None:
    """As many ranks as before come to the same."""
    storm = Storm(whole, seed=2)
    for number in range(6):
        storm.pass_over(folder := tmp_path / str(number), storm.random.choices(kinds, k=3))
        if len(kinds) == 1:
            assert_same_results(whole, folder)
    assert storm.hits > 6  # of 12 strikes


@pytest.mark.slow
@pytest.mark.parametrize(("name", "limit"), [("SIGKILL", 300), ("SIGSTOP", 5)])
@pytest.mark.parametrize("gone", [[2, 3], [0]], ids=["a machine", "a rank"])
def test_ranks_that_disappear_at_once_are_named(
    tmp_path: Path, name: str, limit: int, gone: list[int]
) -> None:
    """Two of two by two, as if their machine or its network were gone, or one beside its shards.

    The last one to end has heard from all others that are there. Before, one may still wait for
    this rank in a group of its own, and is silent as well.
    """
    options = [*OWN[:-1], "trainer.max_steps=400", "trainer.log_every=1", f"dtype={SHARDED}",
               *f"trainer.parallel={HSDP}".split()]  # fmt: skip
    curves = tmp_path / "run" / "metrics.csv"
    with Ranks(4) as own:
        own.begin(ranked.run, tmp_path / "run", *options, f"trainer.timeout={limit}")
        wait_until(curves.exists, own.processes[0], SLOW)
        for rank in gone:
            os.kill(own.processes[rank].pid or 0, signal.Signals[name])
        ends = [own.results_of(rank, within=60) for rank in range(4) if rank not in gone]
    lines = [line.partition(": was killed, or gave no answer for ")[::2] for _, line in ends]
    assert {kind for kind, _ in ends} == {"LostRankError"}, ends
    silent = [{int(rank) for rank in re.findall(r"\d+", ranks)} for ranks, _ in lines]
    assert {*gone} in silent, ends
    for rank, named in zip((r for r in range(4) if r not in gone), silent, strict=True):
        assert {*gone} <= named <= {*range(4)} - {rank}, ends
    for named, (_, rest) in zip(silent, lines, strict=True):
        waits = " or waits for a silent one" if len(named) > 1 else ""
        assert rest == f"{limit} s (trainer.timeout){waits}; continue with resume=auto"


@pytest.mark.slow
def test_torchrun_starts_killed_ranks_again(two: Ranks, tmp_path: Path) -> None:
    """As the page tells to type it. The run comes to the same, and its ranks end with code 0."""
    options = [*NOISY[:-1], f"dtype={SHARDED}", "trainer.parallel=fsdp"]
    two(ranked.run, tmp_path / "undisturbed", *options)
    kill = [*trouble(1, 5, "SIGKILL"), "resume=auto", f"hydra.run.dir={tmp_path}/run"]
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    start += ["--max-restarts=1", f"{ROOT}/scripts/train.py", *options, *kill]
    own: Any = {"capture_output": True, "text": True, "timeout": 240, "cwd": HELPERS}
    done = subprocess.run(start, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False, **own)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("finished: ") + done.stdout.count("finished: ") == 1
    assert_same_results(tmp_path / "undisturbed", tmp_path / "run")
