"""The schema, the check of a composed configuration behind it, and every shipped file of conf/."""

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from fixtures import Shown, refused
from hydra.utils import get_class
from in_process import composed
from omegaconf import OmegaConf

from mpframe.cli.commands import options
from mpframe.config import CONF, schema
from mpframe.config.check import check
from mpframe.config.command_line import check_config
from mpframe.config.schema import SECTIONS, use_instead
from mpframe.core.errors import ConfigError
from mpframe.core.loss_scaling.scaler import name_of
from mpframe.run.parts import build_scaler


def tree(**changes: Any) -> Any:
    own = {"_target_": "a.b"}
    base: Any = {"dtype": {"mode": "mixed"}, "ops": {}, "trainer": {}, "scheduler": None}
    base |= {"model": {**own}, "loss_scaling": {**own}}
    base |= {"dataset": {**own, "batch_size": 4}, "optimizer": {**own, "lr": 0.1}}
    for path, value in changes.items():
        section, _, name = path.partition("__")
        (base[section] if name else base)[name or section] = value
    return OmegaConf.create(base)


NO_TARGET = "must be the dotted name of a class or function"
EMPTY = "is empty, perhaps from a shell variable that is not set; name a folder, and . for this one"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"trainer__epochs": "x"}, "trainer.epochs=x: must be a whole number >= 1 (epochs)"),
    ({"trainer__epochs": True}, "trainer.epochs=true: must be a whole number >= 1 (epochs)"),
    ({"trainer__max_steps": 1e3}, "trainer.max_steps=1000.0: must be a whole number >= 0 (steps), or null"),
    ({"trainer__checkpoint_every": "0min"}, "trainer.checkpoint_every=0min: must be a whole number >= 1 (steps), or as in 10min, or null"),
    ({"trainer__compile": 1}, "trainer.compile=1: must be one of false, true, step"),
    ({"trainer__ema_decay": 1}, "trainer.ema_decay=1: must be a number > 0 and < 1 (per step), or null"),
    ({"dtype__mode": "fp16"}, "dtype.mode=fp16: must be one of fp32, mixed, amp; use dtype=mixed or dtype=amp"),
    ({"dtype__half": "float8"}, "dtype.half=float8: must be one of float16, bfloat16; nearest: float16, bfloat16"),
    ({"dtype__master_weights": 2}, "dtype.master_weights=2: must be true or false"),
    ({"ops__allow": "softmax"}, "ops.allow=softmax: must be a list"),
    ({"optimizer__lr": float("inf")}, "optimizer.lr=inf: must be a number > 0"),
    ({"seed": 2**63}, "seed=9223372036854775808: must be a whole number >= 0 and <= 9223372036854775807"),
    ({"run_name": "a/../../b"}, "run_name=a/../../b: must stay within runs/; for another place set hydra.run.dir"),
    ({"resume": ""}, f"resume=: {EMPTY}"),
    ({"init_from": " "}, f"init_from=: {EMPTY}"),
    ({"init_from_except": ["head.*"]}, "init_from_except=['head.*']: only works with init_from; give both"),
    ({"model___target_": 3}, f"model._target_=3: {NO_TARGET}"),
    ({"callbacks": {"own": {"size": 3}}}, f"callbacks.own._target_=null: {NO_TARGET}"),
    ({"metrics": {"own": "my.Thing"}}, "metrics.own=my.Thing: must be a mapping with a _target_"),
    ({"trainer__autopsy": 1}, "trainer.autopsy: no such option; use callbacks.autopsy=null"),
    ({"optimizer__groups": {"g": 3}}, "optimizer.groups.g=3: must be a mapping; give it parameters"),
    ({"optimizer__groups": {"default": {}}}, "optimizer.groups.default: is the group of all other parameters; choose another name"),
    ({"optimizer__groups": {"g": {"frozen": True, "lr": 1.0}}}, "optimizer.groups.g.lr=1.0: does nothing with frozen=true; leave out one of them"),
    ({"optimizer": {"parts": {}}}, "optimizer.parts={}: must name at least one optimizer"),
    ({"optimizer": {"parts": {"a": {"_target_": "b", "lr": "2x"}}}}, "optimizer.parts.a.lr=2x: must be a number > 0; a factor is for a group"),
    ({"optimizer": {"parts": {"a": {"_target_": "b", "frozen": True}}}}, "optimizer.parts.a.frozen=true: is for a group; leave the parameters to no part"),
]  # fmt: skip


def test_a_wrong_value_is_refused_in_one_line() -> None:
    for change, line in REFUSED:
        assert refused(ConfigError, check, tree(**change)) == line, change


def test_another_librarys_name_is_answered_with_ours() -> None:
    assert use_instead("precision", "bf16-mixed") == "use dtype=amp_bf16"
    assert use_instead("precision", 16) == "use dtype=amp"
    assert use_instead("BF16") == "use dtype=mixed_bf16 or dtype=amp_bf16"
    assert use_instead("precision", "other") == "use dtype=CHOICE"
    assert use_instead("iter_size", 16) == "use trainer.accumulate=N"
    assert use_instead("epochs") == ""


TARGET = {"_target_": "my_pkg.Thing", "size": 3}


def test_open_sections_take_whatever_their_target_takes() -> None:
    config = check(tree(objective=TARGET, loss_scaling=TARGET, callbacks={"own": TARGET, "x": None},
                        metrics={"b": TARGET, "a": TARGET}))  # fmt: skip
    assert config.objective == config.loss_scaling == TARGET
    assert (config.callbacks, list(config.metrics)) == ({"own": TARGET}, ["b", "a"])
    bare = check(tree())
    assert (bare.objective, bare.scheduler, bare.callbacks, bare.metrics) == (None, None, {}, {})


def test_values_arrive_typed() -> None:
    config = check(tree(trainer__clip_norm=1, trainer__max_steps="12"))
    assert (repr(config.trainer.clip_norm), config.trainer.max_steps) == ("1.0", 12)
    masters = [
        check(tree(dtype__master_weights=v)).dtype.master_weights for v in ("on", "off", True)
    ]
    assert masters == [True, False, True]
    compiled = [check(tree(trainer__compile=v)).trainer.compile for v in (True, "false", "step")]
    assert compiled == [True, False, "step"]
    assert check(tree(ops__allow=["linear", 1])).ops.allow == ["linear", "1"]
    assert check(tree(trainer__checkpoint_every="30min")).trainer.checkpoint_every == "30min"
    assert (config.data.batch_size, "batch_size" in config.dataset) == (4, False)


def checked(*words: str) -> schema.Config:
    return check_config(composed(*words))


@pytest.mark.slow
def test_every_shipped_file_composes() -> None:
    """Models and datasets fit one another where an experiment chooses both: test_runs.py."""
    others = ("experiment", "rung")
    paths = [path for path in CONF.glob("*/*.yaml") if path.parent.name not in others]
    assert len(paths) > 75
    for path in paths:
        group, name = path.parent.name, path.stem
        words = [f"{group}={name}", *[f"{group}._target_=my_pkg.Thing"] * (name == "own")]
        config = composed(*words)
        if group not in ("model", "dataset"):
            check_config(config)


def test_a_scaling_file_states_every_argument_and_the_one_that_fits_is_chosen() -> None:
    """The scale apart, they are the defaults of the class, too."""
    for name in ("static", "Backoff", "LogMax"):
        node = checked(f"loss_scaling={name}").loss_scaling
        arguments = inspect.signature(get_class(node["_target_"])).parameters
        defaults = {key: own.default for key, own in arguments.items()}
        own = {"scale": 1024.0} if name == "static" else {"half": "float16"}
        assert {"_target_": node["_target_"], **defaults, **own} == node
    for dtype, name in {"fp32": "none", "mixed": "Backoff", "mixed_bf16": "none"}.items():
        assert name_of(build_scaler(checked(f"dtype={dtype}"))) == name


WATCH = """run_name resume trainer.async_save trainer.checkpoint_every
    trainer.eval_every trainer.keep_best trainer.keep_last trainer.log_every
    trainer.max_consecutive_skips trainer.monitor trainer.parallel
    trainer.recompute trainer.requeue trainer.timeout trainer.verbosity"""


def test_every_option_has_a_sentence_and_a_default_in_its_range_and_these_only_watch() -> None:
    assert set(WATCH.split()) == schema.WATCHING
    of_parts = [schema.GroupOptions, schema.JointOptions]
    for section in (*SECTIONS.values(), *of_parts):
        for option in dataclasses.fields(section):
            assert option.metadata["sentence"].endswith("."), option.name
            assert option.metadata["range"].holds(getattr(section(), option.name)), option.name
            assert not (section in of_parts and option.metadata["watches"])


def test_the_page_of_options_is_current(tmp_path: Path, capsys: Shown) -> None:
    """Mend with `python scripts/options.py`."""
    options.main([])
    options.main([f"out={tmp_path / 'page.md'}"])
    page = (ROOT / "docs" / "options.md").read_text()
    assert page == (tmp_path / "page.md").read_text() == capsys.readouterr().out


def test_an_experiment_comes_in_two_sizes() -> None:
    whole = checked("experiment=gpt")
    assert (whole.model["depth"], whole.trainer.max_steps) == (12, None)
    small = checked("experiment=gpt", "+size=small", "dataset.context=8")
    assert (small.model["depth"], small.trainer.max_steps) == (4, 200)
    assert small.dataset["context"] == 8
