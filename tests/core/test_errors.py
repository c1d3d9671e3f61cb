"""Which names a misspelt one is answered with, and which line an error in a user's code names."""

import json

import pytest

from mpframe.core.errors import UserCodeError, nearest
from mpframe.core.user_code import user_code

TRAINER = [f"trainer.{name}" for name in ("max_steps", "ema_decay", "autopsy", "epochs", "compile")]


def test_only_near_names_are_offered_the_nearest_first_and_at_most_so_many() -> None:
    for name, known, offered in (
        ("trainer.max_stepz", TRAINER, "trainer.max_steps"),
        ("trainr.epochs", TRAINER, "trainer.epochs"),
        ("trainer.lr", TRAINER, ""),
        ("loss_scaling.scale", ["loss_scaling", "loss_scaling.half", "loss_scaling.mode"], ""),
        ("SKPI", ["warn", "Skip", "stop"], "Skip"),
        ("softmax_", ["_softmax_backward_data", "softmax", "log_softmax"], "softmax"),
        ("hed.*", ["body.weight", "head.weight", "head.bias"], "head.bias, head.weight"),
        ("fp16", ["fp32", "float16", "bfloat16"], "float16, fp32, bfloat16"),
        ("", ["amp", "fp32"], ""),
        ("amp", [], ""),
        ("stepz", ["step", "stepping", "stops", "steps"], "step, steps"),
    ):
        assert nearest(name, known) == (f"nearest: {offered}" if offered else "")
    assert nearest("step", [f"step_{n}" for n in range(9)], 2) == "nearest: step_0, step_1"


def reads_json() -> None:
    json.loads("{")


def has_a_bug() -> None:
    raise KeyError("hh")


@pytest.mark.parametrize("called", [reads_json, has_a_bug])
def test_the_last_line_that_the_user_wrote_is_named(called) -> None:
    """A model's, and not the objective's that calls it, nor a library's."""

    def objective() -> None:
        called()

    with pytest.raises(UserCodeError) as raised, user_code("objective:", objective):
        objective()
    assert f" at test_errors.py:{called.__code__.co_firstlineno + 1};" in str(raised.value)
