"""The check of a composed configuration: a typed one, or a line that says what is allowed."""
# ruff: noqa: E501 - a table, one case a line

from typing import Any

from fixtures import refused
from omegaconf import OmegaConf

from mpframe.config.check import check
from mpframe.config.schema import use_instead
from mpframe.core.errors import ConfigError


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
    ({"trainer__channels_last": 1}, "trainer.channels_last=1: must be true or false"),
    ({"trainer__ema_decay": 1}, "trainer.ema_decay=1: must be a number > 0 and < 1 (per step), or null"),
    ({"trainer__max_step": 1}, "trainer.max_step: no such option; nearest: trainer.max_steps"),
    ({"dtype__mode": "fp16"}, "dtype.mode=fp16: must be one of fp32, mixed, amp; use dtype=mixed or dtype=amp"),
    ({"dtype__half": "float8"}, "dtype.half=float8: must be one of float16, bfloat16; nearest: float16, bfloat16"),
    ({"dtype__master_weights": 2}, "dtype.master_weights=2: must be true or false"),
    ({"dtype__master_weights": "split"}, "dtype.master_weights=split: must be true or false"),
    ({"ops__allow": "softmax"}, "ops.allow=softmax: must be a list"),
    ({"optimizer__lr": float("inf")}, "optimizer.lr=inf: must be a number > 0"),
    ({"seed": 2**63}, "seed=9223372036854775808: must be a whole number >= 0 and <= 9223372036854775807"),
    ({"run_name": "a/../../b"}, "run_name=a/../../b: must stay within runs/; for another place set hydra.run.dir"),
    ({"resume": ""}, f"resume=: {EMPTY}"),
    ({"init_from": " "}, f"init_from=: {EMPTY}"),
    ({"init_from_except": ["head.*"]}, "init_from_except=['head.*']: only works with init_from; give both"),
    ({"model___target_": 3}, f"model._target_=3: {NO_TARGET}"),
    ({"objective": {"size": 3}}, f"objective._target_=null: {NO_TARGET}"),
    ({"callbacks": {"own": {"size": 3}}}, f"callbacks.own._target_=null: {NO_TARGET}"),
    ({"callbacks": [1]}, "callbacks=[1]: must be a mapping; choose a file of conf/callbacks"),
    ({"metrics": {"own": "my.Thing"}}, "metrics.own=my.Thing: must be a mapping with a _target_, or null to leave it out"),
    ({"metric": {}}, "metric: no such option; nearest: metrics"),
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
    for names, words in {
        "fp16 float16 half FP16": "dtype=mixed or dtype=amp",
        "bf16 bfloat16": "dtype=mixed_bf16 or dtype=amp_bf16",
        "16-mixed 16 O1": "dtype=amp", "bf16-mixed": "dtype=amp_bf16",
        "O2 mixed_fp16 16-true": "dtype=mixed", "bf16-true": "dtype=mixed_bf16",
        "fp8": "dtype=mixed_bf16 dtype.products=fp8_tensorwise",
        "iter_size": "trainer.accumulate=N", "max_grad_norm": "trainer.clip_norm=NUMBER",
        "num_gpus use_horovod": "torchrun --nproc-per-node N", "lr_policy": "scheduler=CHOICE",
        "O3": "dtype=mixed ops=none dtype.master_weights=false loss_scaling=none",
        "precision mixed_precision opt_level": "dtype=CHOICE", "accelerator": "device=NAME",
        "strategy": "trainer.parallel=CHOICE", "learning_rate": "optimizer.lr=NUMBER",
        "grad_clip": "trainer.clip_norm=NUMBER",
    }.items():  # fmt: skip
        assert {use_instead(name) for name in names.split()} == {f"use {words}"}
    assert use_instead("precision", "bf16-mixed") == "use dtype=amp_bf16"
    assert use_instead("precision", 16) == "use dtype=amp"
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
