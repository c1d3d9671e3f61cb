"""What becomes of a command line: what Hydra sees of it, which jobs it makes, what is refused."""

import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra._internal import hydra as hydra_core
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import DictConfig, OmegaConf
from time_limit import time_limit

from mpframe.cli import job as job_module
from mpframe.cli.commands import train
from mpframe.config import command_line
from mpframe.config.command_line import jobs, prepare
from mpframe.config.locations import CONF
from mpframe.config.overrides import parse_words, stand_ins, word_of
from mpframe.core.errors import ConfigError, MpframeError

Started = Callable[..., list[DictConfig]]


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    """The jobs that a command line starts, composed by `hydra.main`; none of them trains."""
    composed: list[DictConfig] = []

    def keep(config: DictConfig, hydra: DictConfig) -> float:
        OmegaConf.resolve(config)
        composed.append(config)
        return 0.5

    def start(*words: str) -> list[DictConfig]:
        composed.clear()
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        train._train()
        return list(composed)

    monkeypatch.setattr(job_module, "_train", keep)
    monkeypatch.chdir(tmp_path)
    return start


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        (["dtype=mixed", "seed=3"], ["dtype=mixed", "seed=3"]),
        (["ops.allow+=[softmax]"], ["++ops.move.softmax=allow"]),
        (["ops.allow+=softmax"], ["++ops.move.softmax=allow"]),
        (["ops.deny-=[exp,log]"], ["++ops.move.exp=none", "++ops.move.log=none"]),
        (["model._target_=my.Net"], ["model=own", "++model._target_=my.Net"]),
        (
            ["model._target_=my.Net", "model.width=3", "seed=1"],
            ["model=own", "++model._target_=my.Net", "++model.width=3", "seed=1"],
        ),
        (["ops.modules={head:fp32}"], ["++ops.modules={head:fp32}"]),
        (["seed=1", "-m", "dtype=fp32,amp"], ["seed=1", "dtype=fp32,amp", "-m"]),
        (
            ["-m", "loss_scaling=Backoff,LogMax", "loss_scaling.init_scale=1024"],
            ["loss_scaling=Backoff,LogMax", "++loss_scaling.init_scale=1024", "-m"],
        ),
        (["-m", "dtype=glob(*bf16)"], ["dtype=glob(*bf16)", "-m"]),
        (["--help"], ["--help"]),
        (["-h", "model=mlp"], ["model=mlp", "-h"]),
        (["--shell-completion", "query=bash"], ["--shell-completion", "query=bash"]),
        (["--config-path=pkg://elsewhere", "a=b"], ["a=b", "--config-path=pkg://elsewhere"]),
    ],
)
def test_what_hydra_sees(given: list[str], seen: list[str]) -> None:
    assert prepare(given) == seen


def test_the_path_of_a_job_needs_no_quotes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: Started
) -> None:
    """Hydra would take it for several values."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out" / "dtype=mixed,seed=2").mkdir(parents=True)
    path = "out/dtype=mixed,seed=2"
    for option in ("init_from", "resume", "hydra.run.dir", "hydra.sweep.dir"):
        assert prepare([f"{option}={path}"]) == [f"{option}='{path}'"]
    assert [config.init_from for config in started(f"init_from={path}")] == [path]
    assert prepare(["init_from=out,dtype", "resume=out"]) == ["init_from=out,dtype", "resume=out"]


@pytest.mark.parametrize(
    "text",
    [
        "out",
        "a b",
        "a,b=c",
        "it's",
        "a\\'b",
        "a'b\\\\'",
        "",
        "null",
        "1",
        "ü",
        "[x",
        "\\",
        "a#b",
        "~/x",
    ],
)
def test_any_text_can_be_given_as_a_word(text: str) -> None:
    (override,) = parse_words([word_of("hydra.run.dir", text)])
    assert override.value() == text
    assert not override.is_sweep_override()


@pytest.mark.parametrize(
    ("words", "option", "values"),
    [
        (["seed=3"], "seed", [3]),
        (["-m", "seed=1,2"], "seed", [1, 2]),
        (["-m", "seed=range(1,4)"], "seed", [1, 2, 3]),
        (["-m", "seed=choice(2,1)"], "seed", [2, 1]),
        (["hydra.mode=MULTIRUN", "seed=1,2"], "seed", [1, 2]),
        (["-m", "dtype=glob(*bf16)"], "dtype.mode", ["amp", "mixed"]),
        (["seed=${hydra:job.num}", "-m", "optimizer.lr=1,2"], "seed", [0, 1]),
        (
            ["-m", "loss_scaling=Backoff,LogMax", "loss_scaling.init_scale=1024"],
            "loss_scaling.init_scale",
            [1024, 1024],
        ),
    ],
)
def test_the_jobs_of_a_command_line(
    words: list[str], option: str, values: list[Any], started: Started
) -> None:
    assert [OmegaConf.select(config, option) for config in started(*words)] == values


def test_a_sweep_begins_at_once(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many jobs there are: the command line twice by Hydra, the first job once by us."""
    calls: list[list[str]] = []
    real = hydra_core.Hydra.compose_config

    def counted(self: Any, config_name: str, overrides: list[str], **rest: Any) -> DictConfig:
        calls.append(overrides)
        return real(self, config_name, overrides, **rest)

    monkeypatch.setattr(hydra_core.Hydra, "compose_config", counted)
    before: list[int] = []
    sweep = ConfigLoaderImpl.load_sweep_config

    def job(self: Any, *arguments: Any, **named: Any) -> DictConfig:
        before.append(len(calls))
        return sweep(self, *arguments, **named)

    monkeypatch.setattr(ConfigLoaderImpl, "load_sweep_config", job)
    trained: list[int] = []
    monkeypatch.setattr(job_module, "_train", lambda config, own: trained.append(len(before)))
    started("-m", "seed=range(0,9)", "hydra.sweep.subdir=same")
    assert len(trained) == 9
    assert before[0] == len(calls) == 3
    # Hydra composes a job once to try it and once to run it, and none of the later ones before.
    assert trained == [2 * number + 2 for number in range(9)]


@pytest.fixture
def own_folder(tmp_path: Path) -> Path:
    """A folder of a user's own with a primary configuration, a choice of `dtype` and a group."""
    (tmp_path / "mine.yaml").write_text(
        "defaults:\n  - config\n  - _self_\nseed: 3\n"
        "hydra:\n  sweeper:\n    params:\n      seed: choice(7,8)\n"
    )
    for group in ("dtype", "recipe"):
        (tmp_path / group).mkdir()
    shutil.copy(CONF / "dtype" / "amp.yaml", tmp_path / "dtype" / "special.yaml")
    (tmp_path / "recipe" / "short.yaml").write_text("# @package _global_\ntrainer: {epochs: 1}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("given", "rate"), [([], 1.0), (["hydra.sweeper.max_failure_rate=0.5"], 0.5)]
)
def test_a_search_goes_on_after_a_trial_that_fails(given: list[str], rate: float) -> None:
    """As Optuna's sweeper has it: 0.0 unless it is given."""
    sweeper = {"max_failure_rate": 0.5 if given else 0.0}
    config = OmegaConf.create({"hydra": {"overrides": {"hydra": given}, "sweeper": sweeper}})
    command_line._let_trials_fail(config)
    assert config.hydra.sweeper.max_failure_rate == rate


@pytest.mark.parametrize("place", ["--config-dir={}", "hydra.searchpath=[file://{}]"])
def test_a_folder_of_ones_own_has_its_choices(
    place: str, own_folder: Path, started: Started
) -> None:
    flag = place.format(own_folder)
    (config,) = started(flag, "dtype=special", "+recipe=short", "seed=9")
    assert (config.dtype.mode, config.trainer.epochs, config.seed) == ("amp", 1, 9)
    with pytest.raises(ConfigError, match=r"^dtype=speciak: choose .*; nearest: special$"):
        started(flag, "dtype=speciak")
    with pytest.raises(ConfigError, match=r"^trainer.max_stepz: no such option; nearest: trainer."):
        started(flag, "trainer.max_stepz=3", "+recipe=short")
    with pytest.raises(ConfigError, match=r"^recipe=shorr: choose short; nearest: short$"):
        started(flag, "+recipe=shorr")


def test_a_glob_matches_choices_of_ones_own(own_folder: Path, started: Started) -> None:
    for flag in (f"--config-dir={own_folder}", f"hydra.searchpath=[file://{own_folder}]"):
        assert len(started(flag, "-m", "dtype=glob(s*)")) == 1
        with pytest.raises(
            ConfigError, match=r"^dtype=glob\(x\*\): matches no choice; .* special$"
        ):
            started(flag, "-m", "dtype=glob(x*)")


@pytest.fixture
def other_mlp(own_folder: Path) -> Path:
    """The same folder with a model and an experiment that have the names of shipped ones."""
    (own_folder / "model").mkdir()
    (own_folder / "model" / "mlp.yaml").write_text(
        "_target_: mpframe.workloads.images.mlp\nhidden: 7\n"
    )
    (own_folder / "experiment").mkdir()
    text = "# @package _global_\ndefaults: [override /model: mlp]\nseed: 5\n"
    (own_folder / "experiment" / "digits_mlp.yaml").write_text(text)
    (own_folder / "searching.yaml").write_text(
        f"defaults: [config, _self_]\nhydra: {{searchpath: [file://{own_folder}]}}\n"
    )
    (own_folder / "other").mkdir()
    shutil.move(own_folder / "searching.yaml", own_folder / "other" / "searching.yaml")
    return own_folder


@pytest.mark.parametrize(
    "flags",
    [
        ["--config-dir={}"],
        ["hydra.searchpath=[file://{}]"],
        ["--config-dir={}/other", "--config-name=searching"],
        ["--config-dir={}/other", "hydra.searchpath=[file://{}]"],
    ],
)
def test_a_users_file_stands_for_the_shipped_one_of_its_name(
    flags: list[str], other_mlp: Path, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    keep = job_module._train
    monkeypatch.setattr(
        job_module, "_train", lambda job, own: (said.extend(stand_ins(own)), keep(job, own))[1]
    )
    words = [flag.format(other_mlp) for flag in flags]
    for more in ([], ["-m"]):
        (config,) = started(*words, *more, "experiment=digits_mlp")
        assert (config.model.hidden, config.seed) == (7, 5)
        lines = [f"{name}: {other_mlp}/{name.replace('=', '/')}.yaml stands for mpframe's file of "
                 "that name" for name in ("model=mlp", "experiment=digits_mlp")]  # fmt: skip
        assert sorted(said) == sorted(lines)
        said.clear()
        (config,) = started(*words, *more, "model=cnn")
        assert (config.model._target_, said) == ("mpframe.workloads.images.cnn", [])
    (config,) = started("model=mlp")
    assert (config.model.hidden, said) == (256, [])
    (job,) = jobs([*words, "model=mlp"])
    assert job.config.model["hidden"] == 7


def test_a_users_folders_are_searched_in_hydras_order(
    other_mlp: Path, started: Started, tmp_path: Path
) -> None:
    """That of --config-dir, then those of hydra.searchpath, the first one first."""
    further = tmp_path / "further"
    (further / "model").mkdir(parents=True)
    (further / "model" / "mlp.yaml").write_text(
        "_target_: mpframe.workloads.images.mlp\nhidden: 9\n"
    )
    for first, second, hidden in ((other_mlp, further, 7), (further, other_mlp, 9)):
        for words in (
            [f"--config-dir={first}", f"hydra.searchpath=[file://{second}]"],
            [f"hydra.searchpath=[file://{first},file://{second}]"],
        ):
            (config,) = started(*words, "model=mlp")
            assert config.model.hidden == hidden


@pytest.mark.parametrize("more", [[], ["--config-name=config.yaml"]])
@pytest.mark.parametrize("flag", ["--config-dir={}", "hydra.searchpath=[file://{}]"])
def test_a_config_yaml_does_not_stand_for_the_shipped_one(
    flag: str, more: list[str], tmp_path: Path, started: Started
) -> None:
    """It may be that of a checkpoint, or of another program."""
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    with pytest.raises(ConfigError) as refused:
        started(flag.format(tmp_path), *more)
    assert str(refused.value) == (
        f"{tmp_path}/config.yaml: would replace mpframe's; rename it and add --config-name=NAME"
    )


def test_a_primary_configuration_of_ones_own(own_folder: Path, started: Started) -> None:
    flags = [f"--config-dir={own_folder}", "--config-name=mine"]
    assert [config.seed for config in started(*flags)] == [3]
    assert [config.seed for config in started(*flags, "-m", "dtype=special")] == [7, 8]
    with pytest.raises(ConfigError, match=r"^dtype=speciak: choose .*; nearest: special$"):
        started(*flags, "dtype=speciak")
    with pytest.raises(
        ConfigError, match=r"^--config-name=mien: no mien\.yaml in .*; nearest: mine$"
    ):
        started(flags[0], "--config-name=mien")
    with pytest.raises(
        ConfigError, match=r"^--config-name=mine: no mine.* add --config-dir=FOLDER$"
    ):
        started("--config-name=mine")


def test_an_option_that_some_choices_of_a_sweep_lack_is_refused(started: Started) -> None:
    with pytest.raises(ConfigError, match=r"loss_scaling\.growth_interval: no such option"):
        started("-m", "loss_scaling=Backoff,LogMax", "loss_scaling.growth_interval=5")


def test_the_other_jobs_of_a_sweep_are_checked_by_key(started: Started) -> None:
    with pytest.raises(ConfigError, match=r"^optimizer\.lr=nan: must be a number > 0$"):
        started("-m", "dtype=fp32,amp", "optimizer.lr=1e-3,nan")
    with pytest.raises(ConfigError, match=r"^dtype=mixd: choose "):
        started("-m", "dtype=fp32,mixd")


def test_an_argument_of_ones_own_class_may_be_added(started: Started) -> None:
    (config,) = started("+model.stride=3")
    assert config.model.stride == 3


MODES = "choose amp, amp_bf16, fp32, mixed, mixed_bf16"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("fp16", "float16", "half", "FP16"), "dtype=mixed or dtype=amp"),
        (("bf16", "bfloat16"), "dtype=mixed_bf16 or dtype=amp_bf16"),
        (("16-mixed", "16", "O1"), "dtype=amp"),
        (("bf16-mixed",), "dtype=amp_bf16"),
        (("O2", "mixed_fp16", "16-true"), "dtype=mixed"),
        (("bf16-true",), "dtype=mixed_bf16"),
        (("fp8",), "dtype=mixed_bf16 dtype.products=fp8_tensorwise"),
    ],
)
def test_another_librarys_name_of_a_mode_is_answered_with_ours(
    names: tuple[str, ...], words: str, started: Started
) -> None:
    for name in names:
        for arguments in ([f"dtype={name}"], ["-m", f"dtype=fp32,{name}"]):
            with pytest.raises(ConfigError) as error:
                started(*arguments)
            assert str(error.value) == f"dtype={name}: {MODES}; use {words}"


@pytest.mark.parametrize("sign", ["+", "++"])
@pytest.mark.parametrize(
    "choice",
    [
        *("experiment=digits_mlp", "dtype=amp", "dtype/products=mxfp8", "ops=fast"),
        *("model=mlp", "dataset=digits", "optimizer=sgd", "scheduler=cosine", "numerics=on"),
        *("loss_scaling=LogMax", "callbacks=larc", "objective=default", "hydra/sweeper=basic"),
    ],
)
def test_a_choice_with_a_plus_is_answered_with_the_word_to_write(
    choice: str, sign: str, started: Started
) -> None:
    with pytest.raises(ConfigError) as error:
        started(f"{sign}{choice}")
    assert str(error.value) == f"{sign}{choice}: a choice takes no +; write {choice}"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["hydra.run.dir="], "hydra.run.dir=: is empty, perhaps from a shell variable that is not"),
        (["hydra.run.dir='  '"], "hydra.run.dir=: is empty"),
        (["-m", "hydra.sweep.dir=", "seed=1,2"], "hydra.sweep.dir=: is empty"),
        (
            ["-m", "seed=range(1,1)"],
            r"seed=range\(1,1\): holds no value, so the sweep would",
        ),
        (["--experimental-rerun=x.pickle"], "--experimental-rerun=x.pickle: reads a pickle, which"),
        (
            ["-m", "hydra.run.dir=x", "seed=1"],
            "^hydra.run.dir=x: does nothing with -m; use hydra",
        ),
        (
            ["hydra.sweep.dir=x"],
            "^hydra.sweep.dir=x: does nothing without -m; add -m, or use hydra",
        ),
        (["hydra.sweep.subdir=x"], "^hydra.sweep.subdir=x: does nothing without -m"),
        (["dtype=[mixed,fp32]"], r"^dtype=\[mixed,fp32\]: give one choice, as dtype=NAME$"),
        (["-m", "dtype=[]", "seed=1,2"], r"^dtype=\[\]: give one choice, as dtype=NAME$"),
        (["model=[mlp,cnn]"], r"^model=\[mlp,cnn\]: give one choice"),
        (["~seed"], "^~seed: every run has this option; give it a value, seed=VALUE$"),
        (["~trainer.max_steps"], "^~trainer.max_steps: every run has this option"),
        (
            ["-m", "seed=range(1,100000000)"],
            r"^seed=range\(1,100000000\): make more than 100000 jobs; give fewer values$",
        ),
        (
            ["-m", "seed=range(1,1000)", "dtype=amp", "model.width=range(1,1000)"],
            r"^seed=range\(1,1000\) model.width=range\(1,1000\): make more than 100000 jobs",
        ),
        (
            [f"seed={'1' * 10**6}"],
            r"^seed=1{35}\.\.\.: has 1000005 characters, and 32768 are allowed",
        ),
        (
            ["x" * 10**6],
            r"^x{40}\.\.\.: has 1000000 characters, and 32768 are allowed; put the value",
        ),
        (["--c", "fg"], "^ambiguous option: --c could match .*; see --help$"),
        (["--experimental-rer=x.pickle"], "--experimental-rerun=x.pickle: reads a pickle, which"),
    ],
)
def test_what_would_harm_is_refused(
    words: list[str], says: str, started: Started, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        started(*words)
    assert list(tmp_path.iterdir()) == []


def test_a_list_of_choices_is_for_groups_that_hold_several(started: Started) -> None:
    (config,) = started("callbacks=[default,early_stopping]", "dtype=[amp]")
    assert ("early_stopping" in config.callbacks, config.dtype.mode) == (True, "amp")


def test_the_home_folder_is_meant_as_in_a_shell(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me, too")
    (config,) = started("dataset=fashion_mnist", "dataset.root=~/data")
    assert config.dataset.root == "/home/me, too/data"


def test_a_key_given_twice_in_a_file_is_named(own_folder: Path, started: Started) -> None:
    (own_folder / "dtype" / "twice.yaml").write_text("mode: amp\nhalf: float16\nmode: fp32\n")
    with pytest.raises(ConfigError) as refused:
        started(f"--config-dir={own_folder}", "dtype=twice")
    assert str(refused.value) == (
        f"{own_folder}/dtype/twice.yaml, line 3: found duplicate key mode; correct the file"
    )


@pytest.mark.parametrize(
    ("word", "use"),
    [
        *((f"{name}=4", "trainer.accumulate=N") for name in ("iter_size", "trainer.iter_size")),
        ("+num_gpus=2", "torchrun --nproc-per-node N"),
        ("use_horovod=true", "torchrun --nproc-per-node N"),
        ("lr_policy=poly", "scheduler=CHOICE"),
        ("max_grad_norm=1", "trainer.clip_norm=NUMBER"),
        ("loss_scaling=512", "loss_scaling=static loss_scaling.scale=512"),
        ("loss_scaling=512.0", "loss_scaling=static loss_scaling.scale=512.0"),
    ],
)
def test_another_systems_option_is_answered_with_ours(
    word: str, use: str, started: Started
) -> None:
    with pytest.raises(ConfigError) as refused:
        started(word)
    assert str(refused.value).endswith(f"; use {use}")


@pytest.mark.parametrize("planted", [lambda path: path.symlink_to("precious"), os.mkfifo])
def test_a_sweep_writes_through_no_link_and_waits_for_no_fifo(
    planted: Callable[[Path], None], started: Started, tmp_path: Path
) -> None:
    """Hydra opens multirun.yaml itself."""
    (tmp_path / "out").mkdir()
    planted(tmp_path / "out" / "multirun.yaml")
    said = r"^hydra\.sweep\.dir=out: its multirun\.yaml is not a regular file; delete it, or choose"
    with time_limit(60), pytest.raises(ConfigError, match=said):
        started("-m", "hydra.sweep.dir=out", "seed=1,2")


KEYS = (
    *("seed", "dtype", "model", "trainer", "trainer.epochs", "trainer.max_stepz", "optimizer.lr"),
    *("ops.allow", "loss_scaling", "experiment", "metrics", "callbacks.x", "model._target_"),
    *("dtype@other", "a/b", "run_name", "scheduler", "hydra/launcher", "hydra.job.nam"),
    *("hydra.run.dir", "hydra.sweep.dir", "hydra.sweeper.max_batch_size", "hydra.searchpath"),
)
VALUES = (
    *(
        "",
        "3",
        "nan",
        "-1",
        "[1,2]",
        "{a: 1}",
        "${x}",
        "???",
        "null",
        "1,2",
        "range(1,3)",
        "[",
        "'",
    ),
    *("interval(0,1)", "glob(*)", "choice()", "tag(a,1)", "int(3)", "\x1b[2J", "mixed,amp", "a b"),
    *("../x", "${oc.env:NOPE}", "1e400", "x" * 300, "sort(3,1)", "shuffle(1,2)", "mlp", "off"),
)
FLAGS = ("-m", "-m", "-m", "--cfg", "--cfg=job", "--info", "-h", "--resolve", "-p", "--nope", "-r")


@pytest.mark.parametrize("cases", [12, pytest.param(400, marks=pytest.mark.storm)])
def test_any_command_line_ends_well_or_in_one_line(
    cases: int, started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(cases):
        draw = random.Random(seed)
        words = [
            f"{draw.choice(['', '', '+', '++', '~'])}{draw.choice(KEYS)}={draw.choice(VALUES)}"
            for _ in range(draw.randint(1, 3))
        ]
        if draw.random() < 0.6:
            words.insert(draw.randint(0, len(words)), draw.choice(FLAGS))
        try:
            started(*words)
        except MpframeError as error:
            assert "\n" not in str(error), words  # noqa: PT017 - none need be raised
        except SystemExit as ended:
            assert not ended.code, words  # noqa: PT017
        assert capsys.readouterr().err == "", words
