"""Options that are measured in place of a training: `trainer.find=lr` or `batch_size`.

    lr            a range test of the learning rate, drawn
    batch_size    the largest micro-batch that memory holds

A run imports the file that it is asked for, and calls its `find`. `rollback` undoes what the
measurement has trained.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from mpframe import checkpoint
from mpframe.checkpoint import Snapshot
from mpframe.core.buffers import ModuleState
from mpframe.training.callbacks.guards import LossSpikes
from mpframe.training.callbacks.schedules import Schedules
from mpframe.training.trainer import Trainer


@contextmanager
def rollback(trainer: Trainer) -> Iterator[None]:
    """Context manager in which a trainer may train, and which undoes all of it, bit for bit.

    In it the trainer has no callbacks, no schedule and no limit for spikes of the loss. Afterwards
    model, optimizer, scaler, progress and random generators are as before. Their copy is on the
    host, so it takes no memory of an accelerator.
    """
    modes = [(module, module.training) for module in trainer.model.modules()]
    attributes = ModuleState.of(trainer.model)
    state = {"trainer": trainer.state_dict(), "rng": checkpoint.rng_state()}
    before = Snapshot(0, state).to_cpu().state
    parts = trainer.callbacks, trainer.algorithms, trainer.scaler
    kept = [n for n, a in parts[1].items() if not isinstance(a, Schedules | LossSpikes)]
    trainer.callbacks, trainer.algorithms = {}, {name: parts[1][name] for name in kept}
    trainer.scaler = copy.deepcopy(trainer.scaler)
    trainer.model.train()
    try:
        yield
    finally:
        trainer.optimizer.zero_grad()
        attributes.restore()
        trainer.load_state_dict(before["trainer"])
        for module, mode in modes:
            module.training = mode
        trainer.callbacks, trainer.algorithms, trainer.scaler = parts
        checkpoint.restore_rng(before["rng"])
