"""The default program, left right after its first optimizer step: what start-up takes."""

import os
import sys
from typing import Any

from mpframe.cli.commands.train import main
from mpframe.training.trainer import Trainer

train_step = Trainer.train_step


def _last_step(trainer: Trainer, *batches: Any) -> None:
    train_step(trainer, *batches)
    sys.stdout.flush()
    os._exit(0)  # At once: ending a run in order takes time that is no part of starting it.


if __name__ == "__main__":
    Trainer.train_step = _last_step  # type: ignore[assignment, method-assign]
    main()
