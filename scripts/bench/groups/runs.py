"""Whole training runs beside the same by hand and by other trainers; a process for each.

What is compared is the time from before the first step to the end of the last validation: loading,
steps, logging, validating. Beside it stand the time that the processor computed for it, which other
load disturbs less, and the whole process, imports and start-up included.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter

from bench.child import run_python
from bench.measure import Competitor, Times, race
from bench.table import Claim, Table
from bench.whole import trainers
from bench.whole.loop_time import LoopTime
from bench.whole.one_run import OURS
from bench.whole.workloads import WORKLOADS, Workload
from mpframe.core.errors import MpframeError, first_line

MOST = 1.03  # times a loop by hand
SIZES: dict[str, dict[str, int]] = {name: {} for name in WORKLOADS}
"""The workloads, each with its own sizes."""


def tables(
    rounds: int,
    folder: Path,
    workloads: Mapping[str, Mapping[str, int]] = SIZES,
    names: Sequence[str] | None = None,
) -> list[Table]:
    """A table for each workload.

    Args:
        rounds: measured rounds, >= 1.
        folder: not used: runs go into a temporary folder.
        workloads: the sizes of each, by its name.
        names: the trainers that take part; None: all that are installed.
    """
    chosen = [OURS, *(trainers.installed() if names is None else names)]
    return [_table(name, sizes, rounds, chosen) for name, sizes in workloads.items()]


def _table(name: str, sizes: Mapping[str, int], rounds: int, names: Sequence[str]) -> Table:
    work = WORKLOADS[name](**sizes)
    why = _missing(work)
    if why is not None:
        return Table(work.title, "", trainers.BY_HAND, {}, notes=[f"skipped: {why}"])
    with tempfile.TemporaryDirectory() as scratch:
        runs = {own: Runs(name, sizes, own, Path(scratch)) for own in names}
        # No warm-up: nothing of a process is left for the next.
        times = race([Competitor(own, run) for own, run in runs.items()], rounds, warmup=0)
    cpu = {own: [time.cpu_seconds for time in run.times] for own, run in runs.items()}
    whole = {own: run.whole for own, run in runs.items()}
    return Table(
        work.title,
        _setting(work),
        trainers.BY_HAND,
        times,
        [*_claims(times, ""), *_claims(cpu, ", CPU time")],
        trainers.skipped(),
        {"CPU time, ms": _in_ms(cpu), "whole process, ms": _in_ms(whole)},
    )


class Runs:
    """The runs of one trainer.

    Args:
        workload: one of `WORKLOADS`.
        sizes: its arguments.
        trainer: who trains.
        folder: of all that is logged; exists.

    Attributes:
        times: of the loop of each run so far.
        whole: seconds of its process.
    """

    def __init__(self, workload: str, sizes: Mapping[str, int], trainer: str, folder: Path) -> None:
        self._given = {"workload": workload, "sizes": dict(sizes), "trainer": trainer}
        self._folder = folder
        self.times, self.whole = list[LoopTime](), list[float]()

    def __call__(self) -> float:
        """Seconds of the loop of one more run.

        Raises:
            MpframeError: the process failed.
        """
        own = tempfile.mkdtemp(dir=self._folder)
        words = ["-m", "bench.whole.one_run", json.dumps({**self._given, "folder": own})]
        began = perf_counter()
        printed = run_python(words, self._folder, f"runs: {self._given['trainer']!r}")
        self.whole.append(perf_counter() - began)
        self.times.append(LoopTime(**json.loads(printed.strip().rpartition("\n")[2])))
        return self.times[-1].seconds


def _claims(times: Times, kind: str) -> list[Claim]:
    others = [own for own in times if own != OURS]
    by_hand = (trainers.BY_HAND, trainers.CUT)
    return [
        Claim.between(times, OURS, own, MOST if own in by_hand else 1.0, kind) for own in others
    ]


def _in_ms(times: Times) -> dict[str, list[float]]:
    return {own: [value * 1e3 for value in values] for own, values in times.items()}


def _missing(work: Workload) -> str | None:
    """What this machine lacks for a workload; None: nothing."""
    try:
        work.data(), work.model()
    except (ImportError, MpframeError) as error:
        return first_line(error)
    return None


def _setting(work: Workload) -> str:
    length = f"{work.epochs} epochs" if work.max_steps is None else f"{work.max_steps} steps"
    return (
        f"Batch {work.batch_size}, {length}, AdamW, fp32, one thread, TensorBoard every 10 steps, "
        "a validation after each epoch and at the end."
    )
