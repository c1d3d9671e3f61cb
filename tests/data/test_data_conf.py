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
LOADING = {"batch_size"}


def shipped(group: str) -> list[Path]:
    files = sorted(path for path in (CONF / group).glob("*.yaml") if path.stem != "own")
    assert files
    return files


def ours(group: str) -> list[Path]:
    """Those whose `_target_` is mpframe's."""
    return [path for path in shipped(group) if "_target_: mpframe." in path.read_text()]


IMAGES = [path for path in shipped("dataset") if "augment:" in path.read_text()]
"""The datasets of images with a class each; the models below take any of them."""
CLASSIFIERS = [CONF / "model" / f"{name}.yaml" for name in ("cnn", "gan", "mlp", "resnet18")]


def target_of(path: Path) -> Callable[..., Any]:
    return get_object(OmegaConf.load(path)._target_)  # type: ignore[no-any-return]


@pytest.mark.parametrize("path", ours("dataset") + ours("model"), ids=lambda p: p.stem)
def test_keys_are_the_arguments(path: Path) -> None:
    options = OmegaConf.load(path)
    assert isinstance(options, DictConfig)
    module, _, name = options._target_.rpartition(".")
    assert name == target_of(path).__name__
    data = path.parent.name == "dataset" and module == "mpframe.data"
    assert data or module.startswith("mpframe.workloads.")
    extra = LOADING if path.parent.name == "dataset" else set()
    assert set(options) - {"_target_"} == set(inspect.signature(target_of(path)).parameters) | extra


@pytest.mark.parametrize("path", sorted((CONF / "dataset").glob("*.yaml")), ids=lambda p: p.stem)
def test_how_workers_load_has_its_default_in_the_schema_alone(path: Path) -> None:
    assert OmegaConf.load(path).keys().isdisjoint({"workers"})


@pytest.mark.parametrize("path", shipped("dataset"), ids=lambda p: p.stem)
def test_values_are_the_defaults_of_the_code(path: Path) -> None:
    options = OmegaConf.load(path)
    for name, parameter in inspect.signature(target_of(path)).parameters.items():
        if target_of(path).__name__.lower() == path.stem:  # The others choose values of their own.
            assert options[name] == parameter.default, name
    assert options.get("augment", "none") in AUGMENTATIONS


@pytest.mark.parametrize("dataset", IMAGES, ids=lambda p: p.stem)
@pytest.mark.parametrize("model", CLASSIFIERS, ids=lambda p: p.stem)
def test_every_model_takes_every_dataset(model: Path, dataset: Path) -> None:
    config = OmegaConf.create({"dataset": OmegaConf.load(dataset), "model": OmegaConf.load(model)})
    resolved: Any = OmegaConf.to_container(config, resolve=True)
    arguments = {name: value for name, value in resolved["model"].items() if name != "_target_"}
    net = target_of(model)(**arguments).eval()
    facts = resolved["dataset"]
    inputs = torch.zeros(2, facts["channels"], facts["image_size"], facts["image_size"])
    outputs = net(inputs)
    if model.stem == "gan":  # One logit each for the real and for the made images.
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
