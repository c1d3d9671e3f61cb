"""What becomes of a command line: what Hydra sees, the files it finds, the jobs it makes."""

import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
from fixtures import Patch, Shown, time_limit
from hydra._internal import hydra as hydra_core
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import OmegaConf

from mpframe.cli import job as job_module
from mpframe.config import command_line
from mpframe.config.command_line import jobs, prepare
from mpframe.config.overrides import parse_words, word_of
from mpframe.core.errors import ConfigError, MpframeError

BOTH = ["loss_scaling=Backoff,LogMax", "loss_scaling.init_scale=1024"]
BF16 = {"dtype.mode": ["amp", "mixed"], "seed": [0, 1]}
SEEN = {
    "ops.allow+=[softmax]": "++ops.move.softmax=allow",
    "ops.deny-=[exp,log]": "++ops.move.exp=none ++ops.move.log=none",
    "model._target_=my.Net model.width=3 seed=1":
        "model=own ++model._target_=my.Net ++model.width=3 seed=1",
    "ops.modules={head:fp32}": "++ops.modules={head:fp32}",
    "seed=1 -m dtype=fp32,amp": "seed=1 dtype=fp32,amp -m",
    f"-m {BOTH[0]} {BOTH[1]}": f"{BOTH[0]} ++{BOTH[1]} -m",
    "-h model=mlp": "model=mlp -h",
    "--shell-completion query=bash": "--shell-completion query=bash",
    "--config-path=pkg://elsewhere a=b": "a=b --config-path=pkg://elsewhere",
}  # fmt: skip


def test_what_hydra_sees(monkeypatch: Patch) -> None:
    for given, seen in SEEN.items():
        assert prepare(given.split()) == seen.split()
    assert prepare(["ops.deny-=[exp, log]"]) == SEEN["ops.deny-=[exp,log]"].split()
    monkeypatch.setenv("HOME", "/home/me, too")  # The home folder is meant as in a shell.
    assert prepare(["dataset.root=~/data"]) == ["dataset.root='/home/me, too/data'"]


def test_the_path_of_a_job_needs_no_quotes(tmp_path: Path, started: Any) -> None:
    """Hydra would take it for several values."""
    path = "out/dtype=mixed,seed=2"
    (tmp_path / path).mkdir(parents=True)
    for option in ("init_from", "resume", "hydra.run.dir", "hydra.sweep.dir"):
        assert prepare([f"{option}={path}"]) == [f"{option}='{path}'"]
    assert [config.init_from for config in started(f"init_from={path}")] == [path]
    assert prepare(["init_from=out,dtype", "resume=out"]) == ["init_from=out,dtype", "resume=out"]


def test_any_text_can_be_given_as_a_word() -> None:
    words = ["a,b=c", "it's", "a\\'b", "a'b\\\\'", "", "null", "1", "ü", "[x", "\\", "~/x"]
    for text in ["out", "a b", *words]:
        (override,) = parse_words([word_of("hydra.run.dir", text)])
        assert (override.value(), override.is_sweep_override()) == (text, False)


@pytest.mark.parametrize(
    ("words", "made"),
    [
        ("hydra.mode=MULTIRUN seed=choice(2,1)", {"seed": [2, 1]}),
        ("seed=${hydra:job.num} -m dtype=glob(*bf16)", BF16),
        pytest.param(
            *(f"-m {BOTH[0]} {BOTH[1]}", {"loss_scaling.init_scale": [1024, 1024]}),
            marks=pytest.mark.slow,
        ),
        (
            "+model.stride=3 dtype=[amp] callbacks=[default,early_stopping]",
            {"model.stride": [3], "callbacks.early_stopping.patience": [10]},
        ),
    ],
)
def test_what_jobs_it_makes(words: str, made: dict[str, list[Any]], started: Any) -> None:
    configs = started(*words.split())
    assert {key: [OmegaConf.select(own, key) for own in configs] for key in made} == made


def test_a_sweep_begins_at_once(started: Any, monkeypatch: Patch) -> None:
    """However many jobs there are: the command line twice by Hydra, the first job once by us."""
    happened: list[str] = []

    def noted(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*given: Any, **named: Any) -> Any:
            happened.append(name)
            return real(*given, **named)

        monkeypatch.setattr(owner, name, call)

    noted(hydra_core.Hydra, "compose_config")
    noted(ConfigLoaderImpl, "load_sweep_config")
    monkeypatch.setattr(job_module, "_train", lambda config, own: happened.append("train"))
    started("-m", "seed=range(0,2)", "hydra.sweep.subdir=same")
    # Hydra composes a job once to try it and once to run it, and none of the later ones before.
    job = ["load_sweep_config", "load_sweep_config", "train"]
    assert happened == [*["compose_config"] * 3, *job * 2]


def test_a_search_goes_on_after_a_trial_that_fails() -> None:
    """As Optuna's sweeper has it: 0.0 unless it is given."""
    for given, had, rate in (([], 0.0, 1.0), (["hydra.sweeper.max_failure_rate=0.5"], 0.5, 0.5)):
        own = {"overrides": {"hydra": given}, "sweeper": {"max_failure_rate": had}}
        config = OmegaConf.create({"hydra": {**own, "runtime": {"choices": {}}}})
        command_line._adapt_sweeper(config)
        assert config.hydra.sweeper.max_failure_rate == rate


@pytest.mark.parametrize("planted", [lambda path: path.symlink_to("precious"), os.mkfifo])
def test_a_sweep_writes_through_no_link_or_fifo(planted: Any, started: Any, tmp_path: Path) -> None:
    """Hydra opens multirun.yaml itself."""
    (tmp_path / "out").mkdir()
    planted(tmp_path / "out" / "multirun.yaml")
    said = r"^hydra\.sweep\.dir=out: its multirun\.yaml is not a regular file; delete it, or choose"
    with time_limit(60), pytest.raises(ConfigError, match=said):
        started("-m", "hydra.sweep.dir=out", "seed=1,2")


KEYS = """seed dtype model trainer trainer.epochs trainer.max_stepz optimizer.lr ops.allow
    loss_scaling experiment metrics callbacks.x model._target_ dtype@other a/b run_name scheduler
    hydra/launcher hydra.job.nam hydra.run.dir hydra.sweep.dir hydra.sweeper.max_batch_size
    hydra.searchpath"""
VALUES = """3 nan -1 [1,2] ${x} ??? null 1,2 range(1,3) [ ' interval(0,1) glob(*) choice() tag(a,1)
    int(3) mixed,amp ../x ${oc.env:NOPE} 1e400 sort(3,1) shuffle(1,2) mlp off"""
SPACED = ["", "{a: 1}", "\x1b[2J", "a b", "x" * 300]
FLAGS = "-m -m -m --cfg --cfg=job --info -h --resolve -p --nope -r"


@pytest.mark.parametrize("cases", [8, pytest.param(400, marks=pytest.mark.storm)])
def test_any_command_line_ends_well_or_in_one_line(cases: int, started: Any, capsys: Shown) -> None:
    signs, keys, values = ["", "", "+", "++", "~"], KEYS.split(), [*SPACED, *VALUES.split()]
    for seed in range(cases):
        draw = random.Random(seed)
        parts = [(signs, keys, ["="], values)] * draw.randint(1, 3)
        words = ["".join(map(draw.choice, own)) for own in parts]
        if draw.random() < 0.6:
            words.insert(draw.randint(0, len(words)), draw.choice(FLAGS.split()))
        try:
            started(*words)
        except MpframeError as error:
            assert "\n" not in str(error), words  # noqa: PT017 - none need be raised
        except SystemExit as ended:
            assert not ended.code, words  # noqa: PT017
        assert capsys.readouterr().err == "", words


def test_a_users_file_stands_first(own_folder: Path, started: Any) -> None:
    words = ["--config-dir", "own", "experiment=digits_mlp"]
    (config,) = started(*words)
    assert (config.model.hidden, config.seed) == (7, 5)
    ((_, checked),) = jobs(words)
    assert (checked.model["hidden"], checked.run.seed) == (7, 5)


@pytest.mark.parametrize("more", [[], ["--config-name=config.yaml"]])
def test_no_config_yaml_stands_in(more: list[str], tmp_path: Path, started: Any) -> None:
    """It may be that of a checkpoint, or of another program."""
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    line = f"{tmp_path}/config.yaml: would replace mpframe's; rename it and add --config-name=NAME"
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
        started(f"--config-dir={tmp_path}", *more)


@pytest.mark.slow
def test_a_folder_of_ones_own_has_its_choices(own_folder: Path, started: Any) -> None:
    own, mine = "--config-dir=own", "--config-name=mine"
    for words in ([own, "dtype=glob(s*)"], ["hydra.searchpath=[file://own]", "dtype=special"]):
        (config,) = started(*words, "-m", "+recipe=short", "seed=9")
        assert (config.dtype.mode, config.trainer.epochs, config.seed) == ("amp", 1, 9)
    assert [config.seed for config in started(own, mine)] == [3]
    assert [config.seed for config in started(own, mine, "-m", "dtype=special")] == [7, 8]
    key = own_folder / "dtype" / "twice.yaml"
    key.write_text("mode: amp\nhalf: float16\nmode: fp32\n")
    for words, line in {
        (own, "+recipe=shorr"): r"^recipe=shorr: choose short; nearest: short$",
        (own, "trainer.max_stepz=3", "+recipe=short"): r"^trainer.max_stepz: .*; nearest: trainer.",
        (own, "-m", "dtype=glob(x*)"): r"^dtype=glob\(x\*\): holds no value, ",
        (own, mine, "dtype=speciak"): r"^dtype=speciak: choose .*; nearest: special$",
        (own, "--config-name=mien"): r"^--config-name=mien: no mien\.yaml .* nearest: mine$",
        ("--config-name=our",): r"^--config-name=our: no our.* add --config-dir=FOLDER$",
        (own, "dtype=twice"): r"/twice.yaml, line 3: found duplicate key mode; correct the file$",
    }.items():
        with pytest.raises(ConfigError, match=line):  # Hydra's program names its own primary one.
            started(*words) if "-name" in words[-1] else next(jobs([*words]))


def test_a_path_in_place_of_the_shipped_one(own_folder: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(own_folder.parent)
    (own_folder / "project.yaml").write_text(
        "defaults: [config, override model: mlp, _self_]\n"
        "hydra: {searchpath: ['pkg://mpframe.conf']}\nseed: 3\n"
    )
    flags = ["--config-path=own", "--config-name=project.yaml"]
    for words in (flags, ["-m", *flags, "dtype=fp32,amp"]):
        _, config = next(jobs(words))
        assert (config.model["hidden"], config.run.seed) == (7, 3)
    seen = prepare(["--config-path", "own", "seed=1"])
    assert seen == ["seed=1", "--config-path", "own", f"--config-path={own_folder}"]
