"""The memory of each rank that divides a GPT of 312 MB: at a start, a step, a save and a resume.

Usage, in scripts/: python -m bench.memory [OPTION=VALUE ...], which prints a table. The options are
those of a run, as `trainer.async_save=true`. The largest rank of each number of ranks is shown, in
MB above what the process takes with everything imported, the median of three.

Two peaks: all that is resident (the kernel's own count), and of that what is private, which is
sampled every 2 ms. The rest are pages of mapped files, which the kernel drops when memory is short.
"""

import json
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.child import run_python
from mpframe.core.callback import Callback

RANKS, REPEATS = (1, 2, 4), 3
PHASES = ("start", "step", "save", "resume")
_SAMPLE = 0.002  # seconds
_OPTIONS = [
    "experiment=gpt", "model.width=768", "model.depth=11", "dataset.context=16",
    "dataset.batch_size=4", "dataset.workers=0", "dataset.eval_windows=4", "device=cpu",
    "trainer.keep_best=0", "trainer.eval_every=null", "trainer.checkpoint_every=null",
    "callbacks.progress_bar=null", "+callbacks.phases._target_=bench.memory.Phases",
]  # fmt: skip


class Peak:
    """The largest memory since the last `take`, in MB: resident, and of it private."""

    def __init__(self) -> None:
        self._private = 0
        threading.Thread(target=self._watch, daemon=True).start()
        self.take()

    def take(self) -> tuple[float, float]:
        """Return the peaks, and begin again."""
        found = _status("VmHWM"), max(self._private, _status("RssAnon"))
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again.
        self._private = 0
        return found[0] / 1024, found[1] / 1024

    def _watch(self) -> None:
        pause = threading.Event()
        while not pause.wait(_SAMPLE):
            self._private = max(self._private, _status("RssAnon"))


def _status(name: str) -> int:
    """An entry of this process's status, in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


class Phases(Callback):
    """Takes the peak at the end of each phase of a run."""

    peak: Peak
    found: dict[str, tuple[float, float]]

    @classmethod
    def mark(cls, phase: str) -> None:
        """End a phase."""
        cls.found[phase] = cls.peak.take()

    def setup(self, trainer: Any, context: Any) -> None:
        if trainer.progress.steps:
            self.mark("resume")

    def on_save(self, trainer: Any) -> None:
        self.mark("step")

    def teardown(self, trainer: Any, error: BaseException | None) -> None:
        self.mark("save")


def run_rank(folder: str, options: Sequence[str]) -> None:
    """Train one step more as a rank, and write this rank's peaks beside the run."""
    import torch.distributed.fsdp  # noqa: F401  # With the first step, of whatever model.

    from mpframe.config.command_line import check_config, compose_named, without_hydra
    from mpframe.run.resume import Resume
    from mpframe.run.run import Run

    def into(resume: Resume, *arguments: Any) -> str:
        Phases.mark("start")
        return load(resume, *arguments)

    load, Resume.into = Resume.into, into  # type: ignore[method-assign]
    composed = without_hydra(compose_named(list(options))[1])
    config = check_config(composed)
    Path(folder).mkdir(exist_ok=True)
    Phases.peak, Phases.found = Peak(), {}
    resident, private = Phases.peak.take()
    Run(config, composed, Path(folder)).train()
    found = {phase: (r - resident, p - private) for phase, (r, p) in Phases.found.items()}
    name = f"{folder}.{os.environ.get('RANK', 0)}.json"
    Path(name).write_text(json.dumps(found))


def measure(ranks: int, options: Sequence[str], folder: Path) -> dict[str, tuple[float, float]]:
    """Return the peaks of the rank with the largest, by phase."""
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    found: dict[str, tuple[float, float]] = {}
    for steps in (1, 2):
        words = [*_OPTIONS, *options, f"trainer.max_steps={steps}", "resume=auto"]
        words += ["trainer.parallel=fsdp"] if ranks > 1 else []
        run_python([*start, "-m", "bench.memory", f"--in={folder}/run", *words], folder, "memory")
        for path in folder.glob("run.*.json"):
            for phase, peaks in json.loads(path.read_text()).items():
                then = found.get(phase, (0.0, 0.0))
                found[phase] = (max(then[0], peaks[0]), max(then[1], peaks[1]))
    return found


def main(options: Sequence[str]) -> None:
    """Print the table."""
    print(f"| MB: resident (private), n = {REPEATS} | {' | '.join(PHASES)} |\n|---|---|---|---|---|")
    for ranks in RANKS:
        every = []
        for _ in range(REPEATS):
            with tempfile.TemporaryDirectory() as folder:
                every.append(measure(ranks, options, Path(folder)))
        cells = []
        for phase in PHASES:
            both = [statistics.median(one[phase][n] for one in every) for n in (0, 1)]
            cells.append(f"{both[0]:.0f} ({both[1]:.0f})")
        print(f"| {ranks} rank{'s' * (ranks > 1)} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("--in="):
        from bench.memory import run_rank as run  # The module that the callback is found in.

        run(sys.argv[1].removeprefix("--in="), sys.argv[2:])
    else:
        main(sys.argv[1:])
