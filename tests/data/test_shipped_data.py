"""Each shipped YAML of the groups dataset and model: its keys, its values and its comments."""

import inspect
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from mpframe.data.images import AUGMENTATIONS

CONF = ROOT / "conf"


def shipped(group: str) -> list[Path]:
    files = sorted(path for path in (CONF / group).glob("*.yaml") if path.stem != "own")
    assert files
    return files


def target_of(path: Path) -> Callable[..., Any]:
    return get_object(OmegaConf.load(path)._target_)  # type: ignore[no-any-return]


@pytest.mark.parametrize("group", ["dataset", "model"])
def test_keys_are_the_arguments(group: str) -> None:
    ours = [path for path in shipped(group) if "_target_: mpframe." in path.read_text()]
    assert len(ours) > 3
    for path in ours:
        options = OmegaConf.load(path)
        assert isinstance(options, DictConfig)
        module, _, name = options._target_.rpartition(".")
        assert name == target_of(path).__name__
        assert module.startswith("mpframe.workloads.") or (group, module) == (
            "dataset", "mpframe.data",
        )  # fmt: skip
        extra = {"batch_size"} if group == "dataset" else set()
        arguments = set(inspect.signature(target_of(path)).parameters)
        # How workers load has its default in the schema alone.
        assert set(options) - {"_target_"} == arguments | extra, path


def test_values_are_the_defaults_of_the_code() -> None:
    for path in shipped("dataset"):
        options = OmegaConf.load(path)
        for name, parameter in inspect.signature(target_of(path)).parameters.items():
            if target_of(path).__name__.lower() == path.stem:  # The others choose their own.
                assert options[name] == parameter.default, (path, name)
        assert options.get("augment", "none") in AUGMENTATIONS


@pytest.mark.parametrize("model", ["cnn", "gan", "mlp", "resnet18"])
def test_every_model_takes_every_dataset(model: str) -> None:
    """The datasets of images with a class each."""
    for path in (path for path in shipped("dataset") if "augment:" in path.read_text()):
        own = CONF / "model" / f"{model}.yaml"
        config = OmegaConf.create({"dataset": OmegaConf.load(path), "model": OmegaConf.load(own)})
        resolved: Any = OmegaConf.to_container(config, resolve=True)
        facts, arguments = resolved["dataset"], resolved["model"]
        del arguments["_target_"]
        with torch.device("meta"):
            net = target_of(own)(**arguments).eval()
            side = facts["image_size"]
            outputs = net(torch.zeros(2, facts["channels"], side, side))
        if model == "gan":  # One logit each for the real and for the made images.
            assert [tuple(logits.shape) for logits in outputs] == [(2, 1), (2, 1)]
        else:
            assert outputs.shape == (2, facts["classes"])


@pytest.mark.parametrize("group", ["dataset", "model"])
def test_every_option_is_explained(group: str) -> None:
    for path in (CONF / group).glob("*.yaml"):
        lines = path.read_text().splitlines()
        assert lines[0].startswith("# "), path
        for before, line in pairwise(lines):
            plain = line.startswith(("_target_:", "classes: 10", "#", "  "))
            assert plain or "  # " in line or " # " in line or before.startswith("#"), line
