"""The schema, the checks behind it, and every shipped file of conf/ held against them."""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from hydra.utils import get_class
from omegaconf import OmegaConf

from mpframe.cli.commands.options import options_page
from mpframe.config.check import check
from mpframe.config.command_line import check_config, compose_named
from mpframe.config.locations import CONF
from mpframe.config.schema import (
    OPTIONS,
    RUN_OPTIONS,
    SECTIONS,
    WATCHING,
    Config,
    GroupOptions,
    JointOptions,
    only_watches,
)
from mpframe.core.errors import ConfigError
from mpframe.core.ranges import Range

GROUPS = (
    "callbacks",
    "dataset",
    "dtype",
    "experiment",
    "loss_scaling",
    "metrics",
    "model",
    "ops",
    "optimizer",
    "scheduler",
    "trainer",
)
SIZED_BY = {
    "bert_classifier": "text_folder",
    "bert_spans": "tweet_spans",
    "fasterrcnn": "scenes",
    "fcos": "scenes",
    "gpt": "next_token",
    "lstm": "phonemes",
    "ssd": "scenes",
    "ssdlite": "scenes",
    "tabular": "bikes",
    "unet": "shapes",
}
"""The dataset whose facts a model reads, if that is no dataset of images."""
FILES = sorted(path for path in CONF.rglob("*.yaml") if path.parent.name in GROUPS)


def composed(*overrides: str) -> Config:
    with initialize_config_dir(str(CONF), version_base="1.3", job_name="train"):
        return check_config(compose("config", overrides=list(overrides)))


def test_every_group_has_files() -> None:
    assert {path.parent.name for path in FILES} == set(GROUPS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}={path.stem}")
def test_every_shipped_file_composes(path: Path) -> None:
    group = path.parent.name
    own = [f"{group}._target_=my_pkg.Thing"] if path.stem == "own" else []
    if group == "dataset":  # The shipped models are sized by the facts of one kind of dataset.
        own += ["model=own", "model._target_=my_pkg.Net"]
    if group == "model" and path.stem in SIZED_BY:
        own += [f"dataset={SIZED_BY[path.stem]}"]
    config = composed(f"{group}={path.stem}", *own)
    assert config.dtype.mode in ("fp32", "mixed", "amp")


@pytest.mark.parametrize("name", ["numerics", "trainer"])
def test_a_default_stands_in_the_schema_alone(name: str) -> None:
    """A file of a closed section holds what it changes; the choice `default` or `off` nothing."""
    defaults = dataclasses.asdict(SECTIONS[name]())
    for path in (CONF / name).glob("*.yaml"):
        values: Any = OmegaConf.to_container(OmegaConf.load(path))
        switch = {"every"} if path.stem == "off" else set()
        assert not [key for key in values.keys() - switch if values[key] == defaults[key]]
    assert OmegaConf.load(CONF / "config.yaml").keys() & RUN_OPTIONS == {"run_name"}


@pytest.mark.parametrize("words", [["trainer.epochs=two"], ["trainer={epochs: two}"]])
def test_hydra_itself_knows_types_and_options(words: list[str]) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3", job_name="train"):
        with pytest.raises(ConfigCompositionException, match="Error merging override"):
            compose("config", overrides=words)
        with pytest.raises(ConfigCompositionException, match=r"trainer\.epoch"):
            compose("config", overrides=["trainer.epoch=2"])


@pytest.mark.parametrize("name", ["static", "Backoff", "LogMax"])
def test_a_scaling_file_states_every_argument_of_its_class(name: str) -> None:
    """The scale apart, they are the defaults of the class, too."""
    node = composed(f"loss_scaling={name}").loss_scaling
    arguments = inspect.signature(get_class(node["_target_"])).parameters
    defaults = {key: own.default for key, own in arguments.items()}
    if name == "static":
        defaults["scale"] = 1024.0
    else:
        defaults["half"] = "float16"
    assert {"_target_": node["_target_"], **defaults} == node


def test_every_option_has_a_sentence_and_a_default_within_its_range() -> None:
    sections: list[Any] = [*SECTIONS.values(), GroupOptions, JointOptions]
    for section in sections:
        for option in dataclasses.fields(section):
            assert option.metadata["sentence"].endswith("."), option.name
            assert option.metadata["range"].holds(getattr(section(), option.name)), option.name


WATCH = {
    *("run_name", "resume", "numerics.every"),
    *(
        f"trainer.{name}"
        for name in (
            *("async_save", "checkpoint_every", "eval_every", "keep_best", "keep_last"),
            *("log_every", "max_consecutive_skips", "monitor", "on_save_error", "parallel"),
            *("recompute", "requeue", "timeout", "verbosity"),
        )
    ),
}
ACT = {
    *("device", "init_from", "init_from_names", "init_from_except", "seed"),
    *("dtype.compute", "dtype.half", "dtype.master_weights", "dtype.mode"),
    *("dtype.products", "dtype.recipes"),
    *("ops.allow", "ops.deny", "ops.infer", "ops.modules", "ops.move"),
    *("optimizer.groups", "optimizer.lr"),
    *("dataset.batch_size", "dataset.eval_batch_size", "dataset.workers"),
    *(
        f"trainer.{name}"
        for name in (
            *("accumulate", "channels_last", "clip_norm", "clip_value", "compile", "ema_decay"),
            *("epochs", "max_steps", "reduce", "sync_batchnorm"),
        )
    ),
}


def test_every_option_is_known_to_watch_or_to_act() -> None:
    """A new option is put into one of the two sets above, by somebody who has thought of it."""
    assert WATCHING == WATCH
    assert OPTIONS.keys() == WATCH | ACT
    assert not [
        option.name
        for section in (GroupOptions, JointOptions)
        for option in dataclasses.fields(section)
        if option.metadata["watches"]
    ]


def test_the_callbacks_of_every_run_only_watch() -> None:
    names = list(OmegaConf.load(CONF / "callbacks" / "default.yaml"))
    acting = [name for name in names if not only_watches(f"callbacks.{name}.x")]
    assert acting == ["loss_spikes"]  # It may skip a step.
    assert only_watches("metrics.f1.average")
    assert not only_watches("callbacks.early_stopping.patience")


def test_the_page_of_options_is_current() -> None:
    """Mend with `python scripts/options.py`."""
    assert (ROOT / "docs" / "options.md").read_text() == options_page()


@pytest.mark.parametrize(
    ("limits", "inside", "outside"),
    [
        (Range(low=1), [1, 7], [0, -1]),
        (Range(above=0.0), [1e-9], [0.0, float("nan"), float("inf")]),
        (Range(above=0.0, below=1.0), [0.5], [0.0, 1.0]),
        (Range(choices=("a", "b")), ["a"], ["c"]),
        (Range(above=0.0, words=("probe",)), ["probe", 2.0], ["prob", 0.0]),
    ],
)
def test_ranges(limits: Range, inside: list[Any], outside: list[Any]) -> None:
    assert all(limits.holds(value) for value in inside)
    assert not any(limits.holds(value) for value in outside)
    assert limits.holds(None)


def tree(**changes: Any) -> Any:
    base = OmegaConf.to_container(
        OmegaConf.create(
            {
                "dtype": {"mode": "mixed"},
                "loss_scaling": {"_target_": "a.b"},
                "ops": {},
                "trainer": {},
                "dataset": {"_target_": "a.b", "batch_size": 4},
                "model": {"_target_": "a.b"},
                "optimizer": {"_target_": "a.b", "lr": 0.1},
                "scheduler": None,
            }
        )
    )
    for path, value in changes.items():
        section, _, name = path.partition("__")
        if name:
            base[section][name] = value  # type: ignore[index, call-overload]
        else:
            base[section] = value  # type: ignore[index, call-overload]
    return OmegaConf.create(base)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"trainer__epochs": "x"}, "trainer.epochs=x: must be a whole number epochs >= 1"),
        ({"trainer__epochs": True}, "trainer.epochs=true: must be a whole number epochs >= 1"),
        ({"trainer__max_step": 1}, "trainer.max_step: no such option; nearest: trainer.max_steps"),
        (
            {"dtype__mode": "fp16"},
            "dtype.mode=fp16: must be one of fp32, mixed, amp; use dtype=mixed or dtype=amp",
        ),
        (
            {"loss_scaling___target_": None},
            "loss_scaling._target_=null: must be the dotted name of a class or function",
        ),
        ({"optimizer__lr": float("inf")}, "optimizer.lr=inf: must be a number > 0"),
        (
            {"model___target_": 3},
            "model._target_=3: must be the dotted name of a class or function",
        ),
    ],
)
def test_a_wrong_value_is_refused_in_one_line(change: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(tree(**change))
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)


TARGET = {"_target_": "my_pkg.Thing", "size": 3}


def test_open_sections_take_whatever_their_target_takes() -> None:
    config = check(tree(objective=TARGET, loss_scaling=TARGET, callbacks={"own": TARGET, "x": None},
                        metrics={"b": TARGET, "a": TARGET}))  # fmt: skip
    assert config.objective == config.loss_scaling == TARGET
    assert config.callbacks == {"own": TARGET}
    assert list(config.metrics) == ["b", "a"]


def test_a_section_that_may_be_absent_is_null_or_empty() -> None:
    config = check(tree())
    assert (config.objective, config.scheduler) == (None, None)
    assert (config.callbacks, config.metrics) == ({}, {})


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"objective": {"size": 3}}, "objective._target_=null: must be the dotted name of a class"),
        ({"loss_scaling": {"_target_": 1}}, "loss_scaling._target_=1: must be the dotted name of"),
        ({"callbacks": {"own": {"size": 3}}}, "callbacks.own._target_=null: must be the dotted"),
        (
            {"metrics": {"own": "my_pkg.Thing"}},
            "metrics.own=my_pkg.Thing: must be a mapping with a _target_, or null to leave it out",
        ),
        ({"callbacks": [1]}, "callbacks=[1]: must be a mapping; choose a file of conf/callbacks"),
        ({"metric": {}}, "metric: no such option; nearest: metrics"),
        (
            {"resume": ""},
            "resume=: is empty, perhaps from a shell variable that is not set; name a",
        ),
        ({"init_from": " "}, "init_from=: is empty, perhaps from a shell variable that is not set"),
    ],
)
def test_an_open_section_without_a_target_is_refused(change: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(tree(**change))
    assert str(refused.value).startswith(line)


def test_values_arrive_typed() -> None:
    config = check(tree(trainer__clip_norm=1, trainer__max_steps="12"))
    assert config.trainer.clip_norm == 1.0
    assert isinstance(config.trainer.clip_norm, float)
    assert config.trainer.max_steps == 12
    assert check(tree(dtype__master_weights=False)).dtype.master_weights == "off"
    saved = check(tree(trainer__checkpoint_every="30min"))
    assert saved.trainer.checkpoint_every == "30min"
    assert config.data.batch_size == 4
    assert "batch_size" not in config.dataset


OLD = [
    ("trainer__autopsy", "trainer.autopsy: no such option; use callbacks.autopsy=null"),
    ("trainer__bad_micro_batch", "trainer.bad_micro_batch: no such option; a bad micro-batch of a"),
    ("trainer__keep_freed_memory", "trainer.keep_freed_memory: no such option; freed memory is"),
    ("numerics__layers", "numerics.layers: no such option; use callbacks.ranges.layers=[PATTERN]"),
]


def test_a_former_option_of_a_group_or_a_dataset_is_answered() -> None:
    with pytest.raises(ConfigError, match=r"^optimizer\.groups\.g\.lr_scale: .*; use lr=10x$"):
        check(tree(optimizer__groups={"g": {"lr_scale": 10.0}}))
    with pytest.raises(ConfigError, match=r"^dataset\.worker_timeout: .*; use trainer\.timeout="):
        compose_named(["dataset.worker_timeout=5"])


@pytest.mark.parametrize(("option", "line"), OLD)
def test_a_former_option_is_answered_with_what_to_write_now(option: str, line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(tree(numerics={}, **{option: 1}))
    assert str(refused.value).startswith(line)


def test_an_experiment_comes_in_two_sizes() -> None:
    whole, small = composed("experiment=gpt"), composed("experiment=gpt", "+size=small")
    assert (whole.model["depth"], whole.trainer.max_steps) == (12, None)
    assert (small.model["depth"], small.trainer.max_steps) == (4, 200)
    assert composed("experiment=gpt", "+size=small", "model.depth=2").model["depth"] == 2


@pytest.mark.parametrize("name", ["gpt", "ladder", "fine_tuning"])
def test_an_experiment_that_has_another_name_is_answered_with_it(name: str) -> None:
    now = f"{name} +size=small" if name == "gpt" else f"{name}_digits"
    with pytest.raises(ConfigError, match=rf"; use experiment={re.escape(now)}$"):
        compose_named([f"experiment={name}_small"])


def test_the_scaling_that_fits_is_chosen() -> None:
    from mpframe.run.parts import scaling_name

    chosen = {
        d: scaling_name(composed(f"dtype={d}")) for d in ("fp32", "mixed", "amp", "mixed_bf16")
    }
    assert chosen == {"fp32": "none", "mixed": "Backoff", "amp": "Backoff", "mixed_bf16": "none"}
