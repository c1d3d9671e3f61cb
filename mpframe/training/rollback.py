"""Steps that leave no trace, for a measurement before the training.

    with rollback(trainer):
        trainer.train_step(batch)

Afterwards weights and their masters, buffers, the optimizer's state, the loss scale, the progress
and all random generators are as before, bit for bit. Batches need no rollback, because a loader's
order depends only on the epoch.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from mpframe import checkpoint
from mpframe.checkpoint import Snapshot
from mpframe.core.buffers import State
from mpframe.training.callbacks.loss_spike import LossSpikes
from mpframe.training.callbacks.schedules import Schedules
from mpframe.training.trainer import Trainer


@contextmanager
def rollback(trainer: Trainer) -> Iterator[None]:
    """Context manager in which a trainer may train, and which undoes all of it.

    In it the trainer has no callbacks, no schedule and no limit for spikes of the loss. The copy of
    its state is on the host, so it takes no memory of an accelerator.
    """
    state = {"trainer": trainer.state_dict(), "rng": checkpoint.rng_state()}
    before = Snapshot(0, state).to_cpu().state
    attributes, buffers = State.of(trainer.model), [*trainer.model.buffers()]
    modes = [(module, module.training) for module in trainer.model.modules()]
    values = [buffer.detach().to("cpu", copy=True) for buffer in buffers]
    parts = trainer.callbacks, trainer.algorithms, trainer.scaler
    trainer.callbacks, trainer.scaler = {}, copy.deepcopy(trainer.scaler)
    trainer.algorithms = {
        name: algorithm
        for name, algorithm in trainer.algorithms.items()
        if not isinstance(algorithm, Schedules | LossSpikes)
    }
    try:
        yield
    finally:
        trainer.optimizer.zero_grad()
        attributes.restore()
        trainer.load_state_dict(before["trainer"])
        for module, mode in modes:
            module.training = mode
        for buffer, value in zip(buffers, values, strict=True):  # Some are in no state.
            buffer.detach().copy_(value)
        trainer.callbacks, trainer.algorithms, trainer.scaler = parts
        checkpoint.restore_rng(before["rng"])
