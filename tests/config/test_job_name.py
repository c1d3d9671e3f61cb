"""A sweep's jobs are named by what was swept; the command that continues it is the one typed."""

import signal
import sys
from pathlib import Path

from fixtures import Patch
from omegaconf import DictConfig, OmegaConf

from mpframe.config.sweep import leave_out, make_stop_error, name_of

SECRET = "hunter-2-hunter"


def name(*words: str, shared: tuple[str, ...] = (), number: int = 3) -> str:
    return name_of(words, shared, number, [SECRET])


def test_a_name_says_what_was_swept_but_nothing_secret_or_that_every_job_has_alike() -> None:
    for words, named in {
        ("seed=2", "dtype=mixed"): "dtype=mixed,seed=2",
        ("++model.width=8", "+model.depth=1"): "model.depth=1,model.width=8",
        ("model.hidden=[8,8]",): "model.hidden=[8,8]",
        ("optimizer.lr=0.00012345678901234567",): "optimizer.lr=0.00012345678901234567",
        ("dtype@other=fp32",): "dtype@other=fp32",
        (): "3",
    }.items():
        assert name(*words) == named
    words = ["trainer.epochs=1", "++model.width=8", "~scheduler", "seed=2"]
    assert name(*words, shared=("trainer.epochs", "model.width", "scheduler")) == "seed=2"
    assert name(*words[:1], shared=("trainer.epochs",), number=7) == "7"
    for number in (3, 4):
        named = f"model.token=hidden,seed=1,job={number}"
        assert name(f"model.token={SECRET}", "seed=1", number=number) == named


def test_what_no_folder_takes_is_replaced_or_cut_and_told_apart() -> None:
    for word, start in {
        "model=nets/wide": "model=nets_wide~", "run_name='../../x'": "run_name=.._.._x~",
        "run_name='\x1b[31m\n'": "run_name=_[31m_~", "run_name='C:\\\\x'": "run_name=C_x~",
        "ops.modules={head:fp32}": "ops.modules=_head_fp32_~",
        "seed=${oc.env:N}": "seed=_oc.env_N_~", "~scheduler": "_scheduler~",
    }.items():  # fmt: skip
        named = name(word)
        assert (named[: len(start)], len(named), named) == (start, len(start) + 8, name(word))
    words = ("x='a/b'", "x='a b'", "x='a:b'", 'x="a b"', "x=a_b", "x='a_b'", "x=A_b")
    assert len({name(word) for word in words}) == len(words)
    for letter in "xé漢":
        names = {name(f"run_name='{letter * 250}{end}'") for end in "ab"}
        start = "run_name=" + letter * 40
        found = [(len(named.encode()) < 200, named[: len(start)]) for named in names]
        assert found == [(True, start)] * 2


def job(*words: str, **hydra: object) -> DictConfig:
    """As Hydra composes it, but with nothing besides."""
    own = {"job": {"num": 5}, "overrides": {"task": list(words), "hydra": []}, **hydra}
    return OmegaConf.create({"hydra": own, "name": "${job_name:}"})


def test_in_a_configuration_it_is_a_word(monkeypatch: Patch) -> None:
    """A reference in an option is not followed; what it refers to may be a secret, or nowhere."""
    monkeypatch.setenv("API_TOKEN", SECRET)
    assert job("seed=1", "dtype=fp32").name == "dtype=fp32,seed=1"
    assert job(f"model.token={SECRET}").name == "model.token=hidden,job=5"
    assert job("seed=${nowhere}").name.startswith("seed=_nowhere_~")


def test_options_are_left_out_by_hydras_own_option() -> None:
    config = job("seed=1")
    config.hydra.job.config = {"override_dirname": {"exclude_keys": ["dtype"]}}
    leave_out(config, ["seed", "dtype", "dataset@x"])
    assert config.hydra.overrides.hydra == [
        "hydra.job.config.override_dirname.exclude_keys=['dtype','seed','dataset@x']"
    ]
    config.hydra.job.config.override_dirname.exclude_keys = ["seed"]
    assert config.name == "5"


def test_what_continues_is_what_was_typed(monkeypatch: Patch) -> None:
    words = ["train", "-m", "seed=1,2", "hydra.sweep.dir=runs/old"]
    monkeypatch.setattr(sys, "orig_argv", ["python", "mpframe", *words])
    typed = "train -m seed=1,2 'hydra.sweep.dir=runs/my sweep'"
    error = make_stop_error(signal.SIGINT, Path("runs/my sweep"))
    assert str(error) == f"stopped by SIGINT; continue the sweep with: python mpframe {typed}"
