"""The remedies as words: a run that is given them pins and denies just what was named."""

import pytest
from in_process import composed

from mpframe.config.command_line import check_config, prepare
from mpframe.config.schema import Config
from mpframe.core.casting.op_lists import OpLists
from mpframe.core.casting.policy import Policy
from mpframe.lab.remedies import deny_words, pin_words
from mpframe.run.parts import build_precision

NAMES = ["", "fc", "head", "0", "05", "2", "2.1", "2.10", "2.1.1", "layer4.1.conv2", "layer4.11"]


def given(*words: str) -> Config:
    return check_config(composed(*prepare(["dtype=mixed", *words])))


@pytest.mark.parametrize("modules", [["fc", "layer4.1"], ["0", "2.10", "2.1.1"], [""]])
def test_the_named_modules_are_pinned_and_no_others(modules: list[str]) -> None:
    policy = Policy("mixed", "float16", OpLists(modules=given(*pin_words(modules)).ops.modules))
    inside = [n for n in NAMES if any(not m or f"{n}.".startswith(f"{m}.") for m in modules)]
    assert [name for name in NAMES if policy.pin_of(name)] == inside


def test_ops_are_denied() -> None:
    moved = ["mul", "linear"]
    before, after = (build_precision(given(*w)).policy.ops for w in ((), deny_words(moved)))
    assert after.deny == before.deny | {*moved}
    assert not {*moved} & (after.allow | after.infer)
    assert (pin_words([]), deny_words([])) == ((), ())
