"""The memory of each rank that divides a GPT of 312 MB: at a start, a resume, a step and a save.

Usage, in scripts/: python -m bench.memory [OPTION=VALUE ...], which prints a table. The options are
those of a run, as `trainer.async_save=true`. The largest rank of each number of ranks is shown, in
MB (10^6 bytes) above the same run of a GPT of 0.06 MB, the median of three resumed runs each.

Two peaks: all that is resident (the kernel's own count), and of that what is private, which is
sampled every 2 ms. The rest are pages of mapped files, which the kernel drops when memory is short.
The C library is told to give freed memory back at once, as it would count otherwise.
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

RANKS, REPEATS = (2, 4), 3
PHASES = ("start", "resume", "step", "save")
_TINY = ["model.width=24", "model.depth=1"]  # The process itself, whatever the model.
Peaks = tuple[float, float]  # MB: resident, and of it private
_SAMPLE = 0.002  # seconds
_OPTIONS = [
    "experiment=gpt", "model.width=768", "model.depth=11", "dataset.context=16",
    "dataset.batch_size=4", "dataset.workers=0", "dataset.eval_windows=4", "device=cpu",
    "trainer.keep_best=0", "trainer.eval_every=null", "trainer.checkpoint_every=null",
    "trainer.parallel=fsdp", "resume=auto",
    "callbacks.progress_bar=null", "+callbacks.phases._target_=bench.memory.Phases",
]  # fmt: skip


class Peak:
    """The largest memory since the last `take`, in MB: resident, and of it private."""

    def __init__(self) -> None:
        self._private, self._lock = 0, threading.Lock()
        threading.Thread(target=self._watch, daemon=True).start()
        self.take()

    def take(self) -> Peaks:
        """Return the peaks, and begin again."""
        with self._lock:
            found = _status("VmHWM"), max(self._private, _status("RssAnon"))
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again.
            self._private = 0
        return found[0] * 1.024e-3, found[1] * 1.024e-3  # from units of 1024 bytes

    def _watch(self) -> None:
        pause = threading.Event()
        while not pause.wait(_SAMPLE):
            with self._lock:
                self._private = max(self._private, _status("RssAnon"))


def _status(name: str) -> int:
    """An entry of this process's status, in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


class Phases(Callback):
    """Takes the peak at the end of each phase of a run."""

    peak: Peak
    found: dict[str, Peaks]

    @classmethod
    def mark(cls, phase: str) -> None:
        """End a phase."""
        cls.found[phase] = cls.peak.take()

    def setup(self, trainer: Any, context: Any) -> None:
        if trainer.progress.steps:
            self.mark("resume")

    def on_save(self, trainer: Any) -> None:
        self.mark("step")


def run_rank(folder: str, options: Sequence[str]) -> None:
    """Train one step more as a rank, and write this rank's peaks beside the run."""
    import torch.distributed.fsdp  # noqa: F401  # With the first step, of whatever model.

    from mpframe.config.command_line import compose_named
    from mpframe.config.composing import check_config, without_hydra
    from mpframe.run import run
    from mpframe.training.callbacks.checkpoints import Checkpoints

    def into(*arguments: Any) -> str:
        Phases.mark("start")
        return load(*arguments)

    def close_after_saving(checkpoints: Any) -> None:  # A test of the last weights follows.
        close(checkpoints)
        Phases.mark("save")

    load, run.resume_from = run.resume_from, into  # type: ignore[attr-defined, assignment]
    close, Checkpoints.close = Checkpoints.close, close_after_saving  # type: ignore[method-assign, assignment]
    composed = without_hydra(compose_named(list(options))[1])
    config = check_config(composed)
    Path(folder).mkdir(exist_ok=True)
    Phases.peak, Phases.found = Peak(), {}
    resident, private = Phases.peak.take()
    run.Run(config, composed, Path(folder)).train()
    found = {phase: (r - resident, p - private) for phase, (r, p) in Phases.found.items()}
    name = f"{folder}.{os.environ.get('RANK', 0)}.json"
    Path(name).write_text(json.dumps(found))


def measure(ranks: int, options: Sequence[str], folder: Path) -> dict[str, list[Peaks]]:
    """Return the peaks of the largest rank by phase, of a new run and of REPEATS resumed ones."""
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    found: dict[str, list[Peaks]] = {}
    for steps in range(1, REPEATS + 2):
        words = [*_OPTIONS, *options, f"trainer.max_steps={steps}"]
        run_python([*start, "-m", "bench.memory", f"--in={folder}/run", *words], folder, "memory")
        of_ranks = [json.loads(path.read_text()) for path in folder.glob("run.*.json")]
        for phase in of_ranks[0]:
            every = [one[phase] for one in of_ranks]
            found.setdefault(phase, []).append((max(r for r, _ in every), max(p for _, p in every)))
    return found


def take_medians(ranks: int, options: Sequence[str]) -> dict[str, list[float]]:
    """Return the median peaks of the resumed runs by phase: resident, and of it private."""
    with tempfile.TemporaryDirectory() as folder:
        found = measure(ranks, options, Path(folder))
    return {
        phase: [statistics.median(peaks) for peaks in zip(*found[phase][-REPEATS:], strict=True)]
        for phase in PHASES
    }


def main(options: Sequence[str]) -> None:
    """Print the table."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # bytes
    print(f"| MB: resident (private), n = {REPEATS} | {' | '.join(PHASES)} |")
    print("|---" * (len(PHASES) + 1) + "|")
    for ranks in RANKS:
        found, tiny = take_medians(ranks, options), take_medians(ranks, [*options, *_TINY])
        differences = ([a - b for a, b in zip(found[p], tiny[p], strict=True)] for p in PHASES)
        cells = ["{:.0f} ({:.0f})".format(*both) for both in differences]
        print(f"| {ranks} ranks | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("--in="):
        from bench.memory import run_rank as run  # The module that the callback is found in.

        run(sys.argv[1].removeprefix("--in="), sys.argv[2:])
    else:
        main(sys.argv[1:])
