"""How mpframe is started to train a workload, and the clock that it carries."""

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from bench.whole.loaders import SEED
from bench.whole.loop_time import LoopTime
from bench.whole.workloads import Workload
from mpframe.cli.commands.train import main
from mpframe.core.callback import Callback
from mpframe.training.evaluation import Evaluation
from mpframe.training.run_context import RunContext
from mpframe.training.trainer import Trainer

_FILE = "loop_time.json"


class LoopClock(Callback):
    """Writes into the run's folder how long it took from the first step to the last validation."""

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        """The first step is next."""
        self._folder, self._began = context.folder, LoopTime.now()

    def on_evaluate(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """The last of them counts."""
        self._ended = LoopTime.now()

    def teardown(self, trainer: Trainer, error: BaseException | None) -> None:
        """Write the time."""
        time = self._ended.since(self._began)
        (self._folder / _FILE).write_text(json.dumps(asdict(time)))


def train(work: Workload, folder: Path) -> LoopTime:
    """Train as the command line does, in this process."""
    sys.argv[1:] = [*options(work), f"hydra.run.dir={folder}"]
    main()
    return LoopTime(**json.loads((folder / _FILE).read_text()))


def options(work: Workload) -> list[str]:
    """The command line: a default run in fp32, with its only checkpoint at the end."""
    limit = [] if work.max_steps is None else [f"trainer.max_steps={work.max_steps}"]
    return [
        *_own("dataset", work.data),
        f"dataset.batch_size={work.batch_size}",
        *_own("model", work.model),
        *("dtype=fp32", "device=cpu", f"seed={SEED}"),
        *("optimizer=adamw", f"optimizer.lr={work.lr}", "scheduler=none"),
        *(f"trainer.epochs={work.epochs}", *limit),
        *(
            "trainer.keep_best=0",
            "trainer.checkpoint_every=1000000min",
            "callbacks.progress_bar=null",
        ),
        f"+callbacks.loop_clock._target_={__name__}.LoopClock",
    ]


def _own(group: str, made: "partial[Any]") -> list[str]:
    name = made.func.__name__
    home = made.func.__module__.removesuffix(f".{name}")  # A model's module has its name.
    given = [f"+{group}.{key}={value}" for key, value in made.keywords.items()]
    return [f"{group}=own", f"{group}._target_={home}.{name}", *given]
