"""The check of a composed configuration: a typed one, or a line that says what is allowed."""
# ruff: noqa: E501 - a table, one case a line

from typing import Any

import pytest
from omegaconf import OmegaConf

from mpframe.config.check import check
from mpframe.config.schema import use_instead
from mpframe.core.errors import ConfigError
from mpframe.core.ranges import Range


def test_ranges() -> None:
    rows: list[tuple[Range, list[Any], list[Any]]] = [
        (Range(low=1), [1, 7], [0, -1]),
        (Range(above=0.0), [1e-9], [0.0, float("nan"), float("inf")]),
        (Range(above=0.0, below=1.0), [0.5], [0.0, 1.0]),
        (Range(choices=("a", "b")), ["a"], ["c"]),
        (Range(above=0.0, words=("probe",)), ["probe", 2.0], ["prob", 0.0]),
    ]
    for limits, inside, outside in rows:
        assert all(limits.holds(value) for value in [*inside, None])
        assert not any(limits.holds(value) for value in outside)


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


NO_TARGET = "must be the dotted name of a class or function"
EMPTY = "is empty, perhaps from a shell variable that is not set; name a folder, and . for this one"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"trainer__epochs": "x"}, "trainer.epochs=x: must be a whole number epochs >= 1"),
    ({"trainer__epochs": True}, "trainer.epochs=true: must be a whole number epochs >= 1"),
    ({"trainer__epochs": None}, "trainer.epochs=null: must be a whole number epochs >= 1"),
    ({"trainer__max_steps": 1e3}, "trainer.max_steps=1000.0: must be a whole number or null steps >= 0"),
    ({"trainer__max_steps": -1}, "trainer.max_steps=-1: must be a whole number or null steps >= 0"),
    ({"trainer__checkpoint_every": 2.5}, "trainer.checkpoint_every=2.5: must be a whole number or null steps >= 1, or as in 10min"),
    ({"trainer__checkpoint_every": "0min"}, "trainer.checkpoint_every=0min: must be a whole number or null steps >= 1, or as in 10min"),
    ({"trainer__compile": 1}, "trainer.compile=1: must be true or false"),
    ({"trainer__clip_norm": float("inf")}, "trainer.clip_norm=inf: must be a number or null > 0"),
    ({"trainer__ema_decay": 1}, "trainer.ema_decay=1: must be a number or null per step > 0 and < 1"),
    ({"trainer__max_step": 1}, "trainer.max_step: no such option; nearest: trainer.max_steps"),
    ({"dtype__mode": "fp16"}, "dtype.mode=fp16: must be one of fp32, mixed, amp; use dtype=mixed or dtype=amp"),
    ({"dtype__half": "float8"}, "dtype.half=float8: must be one of float16, bfloat16; nearest: float16, bfloat16"),
    ({"dtype__master_weights": 2}, "dtype.master_weights=2: must be one of on, off, split"),
    ({"ops__allow": "softmax"}, "ops.allow=softmax: must be a list"),
    ({"dataset__batch_size": 64.0}, "dataset.batch_size=64.0: must be a whole number samples >= 1"),
    ({"optimizer__lr": float("inf")}, "optimizer.lr=inf: must be a number > 0"),
    ({"seed": 2**63}, "seed=9223372036854775808: must be a whole number >= 0 and <= 9223372036854775807"),
    ({"run_name": "a/../../b"}, "run_name=a/../../b: must stay within runs/; for another place set hydra.run.dir"),
    ({"resume": ""}, f"resume=: {EMPTY}"),
    ({"init_from": " "}, f"init_from=: {EMPTY}"),
    ({"init_from_except": ["head.*"]}, "init_from_except=['head.*']: only works with init_from; give both"),
    ({"model___target_": 3}, f"model._target_=3: {NO_TARGET}"),
    ({"loss_scaling___target_": None}, f"loss_scaling._target_=null: {NO_TARGET}"),
    ({"objective": {"size": 3}}, f"objective._target_=null: {NO_TARGET}"),
    ({"callbacks": {"own": {"size": 3}}}, f"callbacks.own._target_=null: {NO_TARGET}"),
    ({"callbacks": [1]}, "callbacks=[1]: must be a mapping; choose a file of conf/callbacks"),
    ({"metrics": {"own": "my.Thing"}}, "metrics.own=my.Thing: must be a mapping with a _target_, or null to leave it out"),
    ({"metric": {}}, "metric: no such option; nearest: metrics"),
    ({"trainer__autopsy": 1}, "trainer.autopsy: no such option; use callbacks.autopsy=null"),
    ({"trainer__keep_freed_memory": 1}, "trainer.keep_freed_memory: no such option; freed memory is always kept"),
    ({"optimizer__groups": {"g": 3}}, "optimizer.groups.g=3: must be a mapping; give it parameters"),
    ({"optimizer__groups": {"default": {}}}, "optimizer.groups.default: is the group of all other parameters; choose another name"),
    ({"optimizer__groups": {"g": {"lr_scale": 10.0}}}, "optimizer.groups.g.lr_scale: no such option; use lr=10x"),
    ({"optimizer__groups": {"g": {"frozen": True, "lr": 1.0}}}, "optimizer.groups.g.lr=1.0: does nothing with frozen=true; leave out one of them"),
    ({"optimizer": {"parts": {}}}, "optimizer.parts={}: must name at least one optimizer"),
    ({"optimizer": {"parts": {"a": {"lr": 1.0}}}}, f"optimizer.parts.a._target_=null: {NO_TARGET}"),
    ({"optimizer": {"parts": {"a": {"_target_": "b", "lr": "2x"}}}}, "optimizer.parts.a.lr=2x: must be a number > 0; a factor is for a group"),
    ({"optimizer": {"parts": {"a": {"_target_": "b", "frozen": True}}}}, "optimizer.parts.a.frozen=true: is for a group; leave the parameters to no part"),
]  # fmt: skip


def test_a_wrong_value_is_refused_in_one_line() -> None:
    for change, line in REFUSED:
        with pytest.raises(ConfigError) as refused:
            check(tree(**change))
        assert str(refused.value) == line, change


def test_another_librarys_name_is_answered_with_ours() -> None:
    for names, words in {
        ("fp16", "float16", "half", "FP16"): "dtype=mixed or dtype=amp",
        ("bf16", "bfloat16"): "dtype=mixed_bf16 or dtype=amp_bf16",
        ("16-mixed", "16", "O1"): "dtype=amp",
        ("bf16-mixed",): "dtype=amp_bf16",
        ("O2", "mixed_fp16", "16-true"): "dtype=mixed",
        ("bf16-true",): "dtype=mixed_bf16",
        ("fp8",): "dtype=mixed_bf16 dtype.products=fp8_tensorwise",
        ("iter_size",): "trainer.accumulate=N",
        ("num_gpus", "use_horovod"): "torchrun --nproc-per-node N",
        ("lr_policy",): "scheduler=CHOICE",
        ("max_grad_norm",): "trainer.clip_norm=NUMBER",
    }.items():
        assert {use_instead(name) for name in names} == {f"use {words}"}
    assert use_instead("epochs") == ""


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
