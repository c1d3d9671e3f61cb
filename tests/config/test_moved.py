"""What a `_target_` of 0.1.0 named has a new name: whoever writes the old one is told it."""

from pathlib import Path

import pytest
from fixtures import refused
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
    said = refused(ConfigError, find_target, "model", OLD)
    assert said == f"model._target_={OLD}: is now {NEW}"
    _, composed = compose_named(["model=gpt", "dataset=next_token", "dataset.root=texts"])
    stored = OmegaConf.to_yaml(without_hydra(composed), resolve=True).replace(NEW, OLD)
    file, line = Path("config.yaml"), f"model._target_={OLD} is now {NEW}; add model._target_={NEW}"
    assert refused(CheckpointError, config_of, stored, file, []) == f"{file}: {line}"
    again = config_of(stored, file, [f"model._target_={NEW}"])
    assert again.model["_target_"] == NEW
