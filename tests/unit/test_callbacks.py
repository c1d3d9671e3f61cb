"""What callbacks keep over a resume: each its own state, also two of one class."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpframe import Precision, Trainer, checkpoint
from mpframe.objectives import supervised
from mpframe.run.run import _restore
from mpframe.training.callback import Callback, by_key
from mpframe.training.callbacks.checkpoints import Checkpoints, SavePlan


class Counting(Callback):
    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def saved(folder: Path, callbacks: list[Callback]) -> dict[str, Any]:
    model = nn.Linear(2, 1)
    model, optimizer = Precision().prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    trainer = Trainer(model, optimizer, supervised(nn.MSELoss()), callbacks=callbacks)
    Checkpoints(folder, SavePlan(), "", "a run").save(trainer)
    return dict(checkpoint.read(folder).state["callbacks"])


def test_two_of_one_class_keep_a_state_each(tmp_path: Path) -> None:
    states = saved(tmp_path, [Counting(1), Callback(), Counting(2)])
    assert states == {"Counting": {"value": 1}, "Counting 2": {"value": 2}}
    fresh = [Counting(), Callback(), Counting()]
    _restore(fresh, states)
    assert [c.value for c in fresh if isinstance(c, Counting)] == [1, 2]


def test_a_checkpoint_by_class_name_alone_still_loads() -> None:
    first, second = Counting(), Counting(7)
    _restore([first, second], {"Counting": {"value": 3}})
    assert (first.value, second.value) == (3, 7)


def test_keys_are_those_of_the_classes() -> None:
    assert list(by_key([Callback(), Counting(), Callback()])) == [
        "Callback",
        "Counting",
        "Callback 2",
    ]
