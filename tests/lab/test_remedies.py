"""The remedies as words: a run that is given them pins and denies just what was named."""

import pytest
from hydra import compose, initialize_config_dir

from mpframe.config.command_line import check_config, prepare
from mpframe.config.locations import CONF
from mpframe.config.schema import Config
from mpframe.core.casting.op_lists import OpLists
from mpframe.core.casting.policy import Policy
from mpframe.lab.remedies import deny_words, pin_words
from mpframe.run.parts import build_precision

NAMES = ["", "fc", "head", "0", "05", "2", "2.1", "2.10", "2.1.1", "layer4.1.conv2", "layer4.11"]

MOVED = ["mul", "linear"]


def composed(*words: str) -> Config:
    overrides = prepare(["dtype=mixed", *words])
    with initialize_config_dir(str(CONF), version_base="1.3", job_name="train"):
        return check_config(compose("config", overrides=overrides))


@pytest.mark.parametrize(
    "modules",
    [["layer4.1.conv2"], ["fc", "head"], ["0"], ["2.10"], ["0", "2.10", "2.1.1"], ["2.1", "fc"]],
)
def test_the_named_modules_are_pinned_and_no_others(modules: list[str]) -> None:
    pins = composed(*pin_words(modules)).ops.modules
    policy = Policy("mixed", "float16", OpLists(modules=pins))
    inside = [name for name in NAMES if any(f"{name}.".startswith(f"{m}.") for m in modules)]
    assert [name for name in NAMES if policy.pin_of(name)] == inside


def test_the_whole_model_is_pinned_by_its_empty_name() -> None:
    policy = Policy("mixed", "float16", OpLists(modules=composed(*pin_words([""])).ops.modules))
    assert all(map(policy.pin_of, NAMES))


def test_ops_are_denied() -> None:
    before, after = (build_precision(composed(*w)).policy.ops for w in ((), deny_words(MOVED)))
    assert after.deny == before.deny | {*MOVED}
    assert not {*MOVED} & (after.allow | after.infer)


def test_nothing_is_no_word() -> None:
    assert (pin_words([]), deny_words([])) == ((), ())
