"""Steps that never were."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from mpframe.precision.undisturbed import undisturbed
from mpframe.training.trainer import Trainer


@contextmanager
def undone(trainer: Trainer) -> Iterator[None]:
    """The block trains; afterwards all that trains is bit for bit what it was."""
    before = copy.deepcopy(trainer.state_dict())
    trainer.model.train()
    with undisturbed(trainer.model):
        yield
    trainer.load_state_dict(before)
    trainer.optimizer.zero_grad()
