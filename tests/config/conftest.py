"""Command lines in this process, and a folder of configurations of a user's own."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from mpframe.cli import job as job_module
from mpframe.cli.commands import train
from mpframe.config import CONF

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


@pytest.fixture
def own_folder(tmp_path: Path) -> Path:
    """A primary configuration, a choice of `dtype`, a group, and a shipped file's name."""
    files = {
        "mine": "defaults:\n  - config\n  - _self_\nseed: 3\n"
        "hydra:\n  sweeper:\n    params:\n      seed: choice(7,8)\n",
        "recipe/short": "# @package _global_\ntrainer: {epochs: 1}\n",
        "model/mlp": "_target_: mpframe.workloads.images.mlp\nhidden: 7\n",
        "experiment/digits_mlp": "# @package _global_\ndefaults: [override /model: mlp]\nseed: 5\n",
    }
    for name, text in files.items():
        path = tmp_path / "own" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "own" / "dtype").mkdir()
    shutil.copy(CONF / "dtype" / "amp.yaml", tmp_path / "own" / "dtype" / "special.yaml")
    return tmp_path / "own"
