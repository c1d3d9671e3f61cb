"""Training steps that leave no trace."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from mpframe.precision.undisturbed import undisturbed
from mpframe.training.trainer import Trainer


@contextmanager
def restored(trainer: Trainer) -> Iterator[None]:
    """Within the block the trainer may step; afterwards its state is bit for bit restored."""
    before = copy.deepcopy(trainer.state_dict())
    trainer.model.train()
    with undisturbed(trainer.model):
        yield
    trainer.load_state_dict(before)
    trainer.optimizer.zero_grad()
