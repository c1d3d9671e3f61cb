"""What a `_target_` of 0.1.0 named has a new name: whoever writes the old one is told it."""

import re
from pathlib import Path

import pytest
from hydra.errors import HydraException
from hydra.utils import get_object
from omegaconf import OmegaConf

from mpframe.config.command_line import compose_named, without_hydra
from mpframe.config.moved import MOVED
from mpframe.config.stored import config_of
from mpframe.core.errors import CheckpointError, ConfigError
from mpframe.run.target import find_target

OLD, NEW = "mpframe.models.gpt", "mpframe.workloads.text.language_model.GPT"


def test_only_the_new_name_is_there() -> None:
    for old, new in MOVED.items():
        assert get_object(new).__name__ == new.rpartition(".")[2]
        assert new.lower().endswith("." + old.rpartition(".")[2].lower())
        with pytest.raises((ImportError, HydraException, ValueError)):
            get_object(old)


def test_the_old_name_is_answered_with_the_new_one() -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(f'model._target_={OLD}: is now {NEW}')}$"):
        find_target("model", OLD)
    _, composed = compose_named(["model=gpt", "dataset=next_token", "dataset.root=texts"])
    stored = OmegaConf.to_yaml(without_hydra(composed), resolve=True).replace(NEW, OLD)
    with pytest.raises(CheckpointError) as refused:
        config_of(stored, Path("config.yaml"), [])
    line = f"config.yaml: model._target_={OLD} is now {NEW}; add model._target_={NEW}"
    assert str(refused.value) == line
    again = config_of(stored, Path("config.yaml"), [f"model._target_={NEW}"])
    assert again.model["_target_"] == NEW
