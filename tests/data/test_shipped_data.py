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
from omegaconf import OmegaConf

from mpframe.data.images import AUGMENTATIONS

CONF = ROOT / "conf"
MODELS = CONF / "model"
DATASETS = [path for path in sorted((CONF / "dataset").glob("*.yaml")) if path.stem != "own"]


def target_of(path: Path) -> Callable[..., Any]:
    return get_object(OmegaConf.load(path)._target_)


def test_keys_are_the_arguments() -> None:
    ours = [p for p in (*DATASETS, *MODELS.glob("*.yaml")) if "_target_: mpframe." in p.read_text()]
    assert len(ours) > 10
    for path in ours:
        options: Any = OmegaConf.load(path)
        module, _, name = options._target_.rpartition(".")
        assert name == target_of(path).__name__
        assert module.startswith("mpframe.workloads.") or module == "mpframe.data"
        # How workers load has its default in the schema alone.
        extra = {"_target_"} | ({"batch_size"} if path in DATASETS else set())
        assert set(options) == set(inspect.signature(target_of(path)).parameters) | extra, path


def test_values_are_the_defaults_of_the_code() -> None:
    for path in DATASETS:
        options = OmegaConf.load(path)
        for name, parameter in inspect.signature(target_of(path)).parameters.items():
            if target_of(path).__name__.lower() == path.stem:  # The others choose their own.
                assert options[name] == parameter.default, (path, name)
        assert options.get("augment", "none") in AUGMENTATIONS


@pytest.mark.parametrize("model", ["cnn", "gan", "mlp", "resnet18"])
def test_every_model_takes_every_dataset(model: str) -> None:
    """The datasets of images with a class each."""
    own = MODELS / f"{model}.yaml"
    for path in (path for path in DATASETS if "augment:" in path.read_text()):
        config = OmegaConf.create({"dataset": OmegaConf.load(path), "model": OmegaConf.load(own)})
        resolved: Any = OmegaConf.to_container(config, resolve=True)
        facts, arguments = resolved["dataset"], resolved["model"]
        del arguments["_target_"]
        side = facts["image_size"]
        with torch.device("meta"):
            net = target_of(own)(**arguments).eval()
            outputs = net(torch.zeros(2, facts["channels"], side, side))
        # A GAN gives one logit each for the real and for the made images.
        wanted = [(2, 1), (2, 1)] if model == "gan" else [(2, facts["classes"])]
        assert [own.shape for own in (outputs if model == "gan" else [outputs])] == wanted


def test_every_option_is_explained() -> None:
    for path in (*CONF.glob("dataset/*.yaml"), *MODELS.glob("*.yaml")):
        lines = path.read_text().splitlines()
        assert lines[0].startswith("# "), path
        for before, line in pairwise(lines):
            plain = line.startswith(("_target_:", "classes: 10", "#", "  "))
            assert plain or " # " in line or before.startswith("#"), line
