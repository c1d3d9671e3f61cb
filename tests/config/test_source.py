"""Where a configuration is composed from: the flags, and a folder of a user's own."""

import re
from pathlib import Path
from typing import Any

import pytest
from fixtures import Patch

from mpframe.cli import job as job_module
from mpframe.config.command_line import compose_named, jobs, prepare
from mpframe.config.overrides import stand_ins
from mpframe.core.errors import ConfigError


@pytest.fixture
def said(started: Any, monkeypatch: Patch) -> list[str]:
    """What is told of files that stand for shipped ones."""
    lines: list[str] = []
    keep = job_module._train

    def train(job: Any, own: Any) -> Any:
        lines.extend(stand_ins(own))
        return keep(job, own)

    monkeypatch.setattr(job_module, "_train", train)
    return lines


FLAGS = [
    *("--config-dir own", "-cd={}/other --config-name=searching"),
    "--config-dir={}/other hydra.searchpath=[file://{}]",
]


@pytest.mark.parametrize("flags", FLAGS)
def test_a_users_file_stands_first(flags: str, own_folder: Path, started: Any, said: Any) -> None:
    words = [*flags.format(own_folder, own_folder).split(), "experiment=digits_mlp"]
    (config,) = started(*words)
    assert (config.model.hidden, config.seed) == (7, 5)
    told = [
        re.sub(r": .*own/(.*)\.yaml stands .*", r" by \1", line)
        for line in said
        if " stands for " in line
    ]
    files = {"model=mlp by model/mlp", "experiment=digits_mlp by experiment/digits_mlp"}
    assert set(told) == files
    (job,) = jobs(words)
    assert (job.config.model["hidden"], job.config.run.seed) == (7, 5)


@pytest.mark.slow
def test_a_file_not_taken_is_not_told(own_folder: Path, started: Any, said: list[str]) -> None:
    (config,) = started("-m", "--config-dir=own", "model=cnn")
    assert config.model._target_ == "mpframe.workloads.images.cnn"
    assert said == [f"{own_folder}/mine.yaml is not used; --config-name=mine begins with it"]
    (config,) = started("--config-dir=own", "model=mlp")
    assert (config.model.hidden, len(said)) == (7, 3)
    for words, hidden in ((["model=mlp"], 256), (["--config-dir=own", "--config-name=mine"], None)):
        (after,) = started(*words)
        assert (after.model.get("hidden"), len(said)) == (hidden, 3)


def test_a_users_folders_are_searched_in_hydras_order(own_folder: Path, tmp_path: Path) -> None:
    """That of --config-dir, then those of hydra.searchpath, the first one first."""
    further = tmp_path / "further"
    (further / "model").mkdir(parents=True)
    (further / "model" / "mlp.yaml").write_text("_target_: my.mlp\nhidden: 9\n")
    for flags, hidden in {
        f"--config-dir={own_folder} hydra.searchpath=[file://{further}]": 7,
        f"--config-dir={further} hydra.searchpath=[file://{own_folder}]": 9,
        f"hydra.searchpath=[file://{own_folder},file://{further}]": 7,
        f"hydra.searchpath=[file://{further},file://{own_folder}]": 9,
    }.items():
        (job,) = jobs([*flags.split(), "model=mlp"])
        assert job.config.model["hidden"] == hidden


@pytest.mark.parametrize("more", [[], ["--config-name=config.yaml"]])
@pytest.mark.parametrize("flag", ["--config-dir={}", "hydra.searchpath=[file://{}]"])
def test_no_config_yaml_stands_in(flag: str, more: list[str], tmp_path: Path, started: Any) -> None:
    """It may be that of a checkpoint, or of another program."""
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    line = f"{tmp_path}/config.yaml: would replace mpframe's; rename it and add --config-name=NAME"
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
        started(flag.format(tmp_path), *more)


@pytest.mark.slow
def test_a_folder_of_ones_own_has_its_choices(own_folder: Path, started: Any) -> None:
    own, mine = "--config-dir=own", "--config-name=mine"
    for flag in (own, "hydra.searchpath=[file://own]"):
        (config,) = started(flag, "-m", "dtype=glob(s*)", "+recipe=short", "seed=9")
        assert (config.dtype.mode, config.trainer.epochs, config.seed) == ("amp", 1, 9)
    assert [config.seed for config in started(own, mine)] == [3]
    assert [config.seed for config in started(own, mine, "-m", "dtype=special")] == [7, 8]
    key = own_folder / "dtype" / "twice.yaml"
    key.write_text("mode: amp\nhalf: float16\nmode: fp32\n")
    for words, line in {
        (own, "+recipe=shorr"): r"^recipe=shorr: choose short; nearest: short$",
        (own, "trainer.max_stepz=3", "+recipe=short"): r"^trainer.max_stepz: .*; nearest: trainer.",
        (own, "-m", "dtype=glob(x*)"): r"^dtype=glob\(x\*\): matches no choice; .* special, twice$",
        (own, mine, "dtype=speciak"): r"^dtype=speciak: choose .*; nearest: special$",
        (own, "--config-name=mien"): r"^--config-name=mien: no mien\.yaml .* nearest: mine$",
        (mine,): r"^--config-name=mine: no mine.* add --config-dir=own$",
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
        config = next(jobs(words)).config
        assert (config.model["hidden"], config.run.seed) == (7, 3)
    seen = prepare(["--config-path", "own", "seed=1"])
    assert seen == ["seed=1", "--config-path", "own", f"--config-path={own_folder}"]


def test_a_mistake_in_a_flag_is_one_line() -> None:
    for word, line in {
        "--config-path=nowhere": "--config-path=nowhere: no such folder; name one with .yaml files",
        "--config-dir": "--config-dir/-cd: expected one argument; see --help",
        "--cfg=job": "--cfg=job: no such option; give option=value",
        "seed=1,2": "seed=1,2: give one value; there is no sweep here",
    }.items():
        with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
            compose_named([word])
