"""Where a configuration is composed from: the flags, and a folder of a user's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpframe.cli import job as job_module
from mpframe.config.command_line import compose_named, jobs, prepare
from mpframe.config.overrides import stand_ins
from mpframe.core.errors import ConfigError

Started = Callable[..., list[Any]]


@pytest.fixture
def said(started: Started, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is told of files that stand for shipped ones."""
    lines: list[str] = []
    keep = job_module._train
    monkeypatch.setattr(
        job_module, "_train", lambda job, own: (lines.extend(stand_ins(own)), keep(job, own))[1]
    )
    return lines


@pytest.mark.parametrize(
    "flags",
    [
        ["--config-dir", "own"],
        ["hydra.searchpath=[file://own]"],
        ["-cd={}/other", "--config-name=searching"],
        ["--config-dir={}/other", "hydra.searchpath=[file://{}]"],
    ],
)
def test_a_users_file_stands_for_the_shipped_one_of_its_name(
    flags: list[str], own_folder: Path, started: Started, said: list[str]
) -> None:
    words = [*(flag.format(own_folder) for flag in flags), "experiment=digits_mlp"]
    (config,) = started(*words)
    assert (config.model.hidden, config.seed) == (7, 5)
    told = {line.partition(": ")[0]: line.partition(" stands ")[0] for line in said}
    files = ["model=mlp", "experiment=digits_mlp"]
    assert told.keys() == set(files)
    assert all(told[name].endswith(f"own/{name.replace('=', '/')}.yaml") for name in files)
    (job,) = jobs(words)
    assert (job.config.model["hidden"], job.config.run.seed) == (7, 5)


def test_a_file_that_is_not_taken_is_not_told(
    own_folder: Path, started: Started, said: list[str]
) -> None:
    (config,) = started("-m", "--config-dir=own", "model=cnn")
    assert (config.model._target_, said) == ("mpframe.workloads.images.cnn", [])
    (config,) = started("-m", "--config-dir=own", "model=mlp")
    assert (config.model.hidden, len(said)) == (7, 1)
    (after,) = started("model=mlp")
    assert (after.model.hidden, len(said)) == (256, 1)


def test_a_users_folders_are_searched_in_hydras_order(own_folder: Path, tmp_path: Path) -> None:
    """That of --config-dir, then those of hydra.searchpath, the first one first."""
    further = tmp_path / "further"
    (further / "model").mkdir(parents=True)
    (further / "model" / "mlp.yaml").write_text("_target_: my.mlp\nhidden: 9\n")
    for first, second, hidden in ((own_folder, further, 7), (further, own_folder, 9)):
        for words in (
            [f"--config-dir={first}", f"hydra.searchpath=[file://{second}]"],
            [f"hydra.searchpath=[file://{first},file://{second}]"],
        ):
            (job,) = jobs([*words, "model=mlp"])
            assert job.config.model["hidden"] == hidden


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


@pytest.mark.parametrize("flag", ["--config-dir=own", "hydra.searchpath=[file://own]"])
def test_a_folder_of_ones_own_has_its_choices(
    flag: str, own_folder: Path, started: Started
) -> None:
    (config,) = started(flag, "-m", "dtype=glob(s*)", "+recipe=short", "seed=9")
    assert (config.dtype.mode, config.trainer.epochs, config.seed) == ("amp", 1, 9)
    for words, line in {
        ("dtype=speciak",): r"^dtype=speciak: choose .*; nearest: special$",
        ("+recipe=shorr",): r"^recipe=shorr: choose short; nearest: short$",
        ("trainer.max_stepz=3", "+recipe=short"): r"^trainer.max_stepz: .*; nearest: trainer.",
        ("-m", "dtype=glob(x*)"): r"^dtype=glob\(x\*\): matches no choice; .* special$",
    }.items():
        with pytest.raises(ConfigError, match=line):
            started(flag, *words)


def test_a_primary_configuration_of_ones_own(own_folder: Path, started: Started) -> None:
    flags = ["--config-dir=own", "--config-name=mine"]
    assert [config.seed for config in started(*flags)] == [3]
    assert [config.seed for config in started(*flags, "-m", "dtype=special")] == [7, 8]
    for words, line in {
        (*flags, "dtype=speciak"): r"^dtype=speciak: choose .*; nearest: special$",
        (flags[0], "--config-name=mien"): r"^--config-name=mien: no mien\.yaml .* nearest: mine$",
        (flags[1],): r"^--config-name=mine: no mine.* add --config-dir=FOLDER$",
    }.items():
        with pytest.raises(ConfigError, match=line):
            started(*words)


def test_a_path_in_place_of_the_shipped_one(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own_folder.parent)
    (own_folder / "project.yaml").write_text(
        "defaults: [config, override model: mlp, _self_]\n"
        "hydra: {searchpath: ['pkg://mpframe.conf']}\nseed: 3\n"
    )
    flags = ["--config-path=own", "--config-name=project.yaml"]
    for words in (flags, ["-m", *flags, "dtype=fp32,amp"]):
        config = next(jobs(words)).config
        assert (config.model["hidden"], config.run.seed) == (7, 3)
    assert prepare(["--config-path", "own", "seed=1"]) == [
        "seed=1", "--config-path", "own", f"--config-path={own_folder}"
    ]  # fmt: skip


def test_a_mistake_in_a_flag_is_one_line() -> None:
    for word, line in {
        "--config-dir=nowhere": "--config-dir=nowhere: no such folder; name one with .yaml files",
        "--config-path=nowhere": "--config-path=nowhere: no such folder; name one with .yaml files",
        "--config-dir": "--config-dir/-cd: expected one argument; see --help",
        "--cfg=job": "--cfg=job: no such option; give option=value",
        "seed=1,2": "seed=1,2: give one value; there is no sweep here",
    }.items():
        with pytest.raises(ConfigError) as refused:
            compose_named([word])
        assert str(refused.value) == line


def test_a_key_given_twice_in_a_file_is_named(own_folder: Path, started: Started) -> None:
    (own_folder / "dtype" / "twice.yaml").write_text("mode: amp\nhalf: float16\nmode: fp32\n")
    with pytest.raises(ConfigError) as refused:
        started(f"--config-dir={own_folder}", "dtype=twice")
    assert str(refused.value) == (
        f"{own_folder}/dtype/twice.yaml, line 3: found duplicate key mode; correct the file"
    )
