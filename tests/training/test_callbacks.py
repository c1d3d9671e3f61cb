"""Callbacks by name: the order, the state of each over a resume, and errors in a user's own."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from run_context import context
from torch import nn

from mpframe import Precision, Trainer, checkpoint
from mpframe.core.callback import Callback, run_callbacks
from mpframe.core.errors import CheckpointError, ConfigError, UserCodeError
from mpframe.core.objective import supervised
from mpframe.run.parts import build_callbacks
from mpframe.run.resume import restore
from mpframe.training.callbacks.checkpoints import Checkpoints, SavePlan
from mpframe.training.callbacks.records import Curves
from mpframe.training.run_context import RunContext, set_up


class Counting(Callback):
    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Told(Callback):
    """Notes what it is told, in a list that several share."""

    def __init__(self, name: str, said: list[str]) -> None:
        self._name, self._said = name, said

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        self._said.append(f"setup {self._name} in {context.folder.name}")

    def teardown(self, trainer: Trainer, error: BaseException | None) -> None:
        self._said.append(f"teardown {self._name} {error!r}")

    def on_save(self, trainer: Trainer) -> None:
        self._said.append(f"save {self._name}")


class Failing(Callback):
    def __init__(self, event: str) -> None:
        setattr(self, event, self._fail)

    def _fail(self, *arguments: object) -> None:
        raise ConnectionError("no route to the server")


def trainer_with(callbacks: dict[str, Callback]) -> Trainer:
    model = nn.Linear(2, 1)
    model, optimizer = Precision().prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return Trainer(model, optimizer, supervised(nn.MSELoss()), callbacks=callbacks)


def saved(folder: Path, callbacks: dict[str, Callback]) -> dict[str, Any]:
    saves, trainer = Checkpoints(SavePlan()), trainer_with(callbacks)
    saves.setup(trainer, context(folder))
    saves.save(trainer)
    return dict(checkpoint.read(folder).state["callbacks"])


# --- states


def test_a_state_is_kept_by_the_callbacks_name(tmp_path: Path) -> None:
    states = saved(tmp_path, {"a": Counting(1), "none": Callback(), "b": Counting(2)})
    assert states == {"a": {"value": 1}, "b": {"value": 2}}
    first, second = Counting(), Counting()
    restore({"b": second, "a": first}, states)
    assert (first.value, second.value) == (1, 2)


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ({"a": {"value": 1}}, []),
        ({"a": {"value": 1}, "gone": {"x": 1}, "lost": {}},
         ["warning: the checkpoint holds the state of callbacks.gone, callbacks.lost, and this run "
          "has no such callback: the next checkpoint is without"]),
        ({}, ["warning: the checkpoint holds no state of callbacks.a, which begins without"]),
    ],
)  # fmt: skip
def test_a_state_without_a_callback_and_the_reverse_are_said(
    saved: dict[str, Any], said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    restore({"a": Counting(), "none": Callback()}, saved)
    assert caplog.messages == said


@pytest.mark.parametrize("state", [7, {"other": 1}])
def test_a_state_that_does_not_fit_names_its_callback(state: object) -> None:
    with pytest.raises(CheckpointError, match=r"^its state of callbacks\.a does not fit \("):
        restore({"a": Counting()}, {"a": state})


# --- the order


def test_setup_goes_forward_and_teardown_backward(tmp_path: Path) -> None:
    said: list[str] = []
    trainer = trainer_with({"a": Told("a", said), "b": Told("b", said)})
    with set_up(trainer, context(tmp_path / "run")):
        run_callbacks(trainer.callbacks, "on_save", trainer)
    assert said == [
        *("setup a in run", "setup b in run", "save a", "save b"),
        *("teardown b None", "teardown a None"),
    ]


def test_every_callback_is_torn_down_and_the_first_error_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[str] = []
    trainer = trainer_with({"a": Told("a", said), "mine": Failing("teardown")})
    with pytest.raises(KeyError, match="first"), set_up(trainer, context(tmp_path)):
        raise KeyError("first")
    assert said[-1] == "teardown a KeyError('first')"
    (line,) = caplog.messages
    assert line.startswith("warning: callbacks.mine: Failing raised ConnectionError (no route to")
    failed = pytest.raises(UserCodeError, match=r"^callbacks\.mine: Failing raised ConnectionError")
    with failed, set_up(trainer, context(tmp_path)):
        pass  # Then the teardown's is the first.


def test_only_what_was_set_up_is_torn_down(tmp_path: Path) -> None:
    said: list[str] = []
    callbacks = {"a": Told("a", said), "mine": Failing("setup"), "b": Told("b", said)}
    with (
        pytest.raises(UserCodeError, match=r"^callbacks\.mine: Failing raised ConnectionError"),
        set_up(trainer_with(callbacks), context(tmp_path / "run")),
    ):
        said.append("trained")
    assert [line[:10] for line in said] == ["setup a in", "teardown a"]


# --- a user's own


def test_an_error_in_a_users_callback_is_one_line_with_its_name_and_ours_passes() -> None:
    with pytest.raises(UserCodeError) as refused:
        run_callbacks({"mine": Failing("on_epoch_end")}, "on_epoch_end", None)
    assert str(refused.value).startswith(
        "callbacks.mine: Failing raised ConnectionError (no route to the server) at "
    )
    assert "\n" not in str(refused.value)
    with pytest.raises(AttributeError, match="_tracker"):
        run_callbacks({"curves": Curves(log_every=1)}, "on_save", None)


CURVES = "mpframe.training.callbacks.records.Curves"


@pytest.mark.parametrize(
    ("node", "line"),
    [
        ({"_target_": "builtins.dict"},
         r"^callbacks\.mine\._target_=builtins\.dict: must return a "
         r"mpframe\.core\.callback\.Callback, got dict$"),
        ({"_target_": "nowhere.Mine"}, r"^callbacks\.mine\._target_=nowhere\.Mine: "),
        ({"_target_": CURVES, "log_evry": 1},
         r"^callbacks\.mine\.log_evry=1: .*takes no such argument; nearest: log_every$"),
    ],
)  # fmt: skip
def test_an_entry_that_is_no_callback_is_refused(node: dict[str, Any], line: str) -> None:
    config: Any = SimpleNamespace(callbacks={"mine": node})
    with pytest.raises(ConfigError, match=line):
        build_callbacks(config)
