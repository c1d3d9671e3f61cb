"""The networks, and each shipped YAML of the groups dataset and model."""

import inspect
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from checkout import ROOT
from fixtures import refused
from hydra.utils import get_object, instantiate
from omegaconf import OmegaConf
from torch import nn
from vocabulary import differing

from mpframe.core.errors import ConfigError
from mpframe.data.images import AUGMENTATIONS
from mpframe.workloads.detection import scenes
from mpframe.workloads.images import cnn, mlp, resnet18
from mpframe.workloads.segmentation.data import shapes
from mpframe.workloads.segmentation.model import UNet
from mpframe.workloads.speech import phonemes
from mpframe.workloads.tables.model import Tabular
from mpframe.workloads.text.language_model import GPT


def size(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


def test_mlp_and_cnn_have_their_layers_and_change_no_tensor_in_place() -> None:
    for in_features in (64, [1, 8, 8]):
        net = mlp(in_features, classes=5, hidden=7, depth=3, dropout=0.5)
        assert net(torch.zeros(2, 64)).shape == net(torch.zeros(2, 1, 8, 8)).shape == (2, 5)
        assert size(net) == (64 * 7 + 7) + 2 * (7 * 7 + 7) + (7 * 5 + 5)
        names = ["flatten", "hidden1", "hidden2", "hidden3", "head"]
        assert [name for name, _ in net.named_children()] == names
        assert sum(isinstance(module, nn.Dropout) for module in net.modules()) == 3
    net = cnn(channels=2, classes=5, width=3, stages=2, dropout=0.2)
    first, second = (9 * a * b + 9 * b * b + 2 * 2 * b for a, b in ((2, 3), (3, 6)))
    assert size(net) == first + second + 6 * 5 + 5
    assert [name for name, _ in net.named_children()][-2:] == ["dropout", "head"]
    # What a hook sees of a layer must still be there when it looks at it after the forward pass.
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for module in net.modules():
        module.register_forward_hook(lambda _m, _i, output: seen.append((output, output.clone())))
    images = torch.randn(3, 2, 11, 11, generator=torch.Generator().manual_seed(0))
    assert net(images).shape == (3, 5)
    assert len(seen) > 6
    assert all(torch.equal(now, then) for now, then in seen)


def test_resnet18_with_its_own_stem_is_torchvisions_and_with_the_small_stem_smaller() -> None:
    torch.manual_seed(3)
    ours = resnet18(classes=10, small_stem=False).eval()
    torch.manual_seed(3)
    theirs = torchvision.models.resnet18(num_classes=10).eval()
    assert not differing(dict(ours.state_dict()), dict(theirs.state_dict()))
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ours(images), theirs(images))
    with torch.device("meta"):
        small = resnet18(classes=10)
    assert size(small) == size(theirs) - 64 * 3 * (49 - 9)
    assert small.conv1.stride == (1, 1)
    assert isinstance(small.maxpool, nn.Identity)


def test_tabular_by_hand() -> None:
    net = Tabular({"a": 1, "b": 9}, ["x"], hidden=[5], dropout=0.5, embedding_dropout=0.5).eval()
    sizes = [tuple(embedding.weight.shape) for embedding in net.embeddings]
    assert sizes == [(2, round(1.6 * 2**0.56)), (10, round(1.6 * 10**0.56))] == [(2, 2), (10, 6)]
    categorical, continuous = torch.tensor([[1, 9], [0, 0]]), torch.tensor([[2.0], [3.0]])
    net.values_norm.running_mean += 1.0
    embedded = [own.weight[categorical[:, i]] for i, own in enumerate(net.embeddings)]
    normed = (continuous - 1.0) / torch.sqrt(torch.tensor(1.0 + net.values_norm.eps))
    joined = torch.cat([*embedded, normed], dim=1)
    linear, norm = net.blocks.block1.linear, net.blocks.block1.norm
    hidden = linear(joined).relu() / torch.sqrt(torch.tensor(1.0 + norm.eps))
    torch.testing.assert_close(net(categorical, continuous), net.head(hidden))
    # Columns of one kind.
    assert Tabular({}, ["x", "y"])(torch.zeros(2, 0).long(), torch.zeros(2, 2)).shape == (2, 1)
    assert Tabular({"a": 3}, [])(torch.ones(2, 1).long(), torch.zeros(2, 0)).shape == (2, 1)


def test_unet_joins_the_features_of_the_same_side() -> None:
    net = UNet(channels=1, classes=2, width=2, stages=2).eval()
    image = torch.randn(1, 1, 4, 4)
    first = net.encoder[0](image)
    second = net.encoder[1](nn.functional.max_pool2d(first, 2))
    joined = torch.cat([first, net.up[0](second)], dim=1)
    assert torch.equal(net(image), net.head(net.decoder[0](joined)))
    with torch.device("meta"):  # The published number of parameters.
        assert size(UNet(channels=3, classes=9)) == 7_703_497


OTHERS: dict[Any, dict[str, Any]] = {
    cnn: {"channels": 1, "classes": 2},
    UNet: {"channels": 1, "classes": 2},
    Tabular: {"categories": {"a": 2}, "continuous": []},
    GPT: {"vocab_size": 11, "context": 8, "width": 16},
}
WHOLE = "must be a whole number >="


@pytest.mark.parametrize(("make", "given", "text"), [
    (cnn, {"width": 1.5}, f"model.width=1.5: {WHOLE} 1"),
    (UNet, {"stages": 0}, f"model.stages=0: {WHOLE} 1"),
    (lambda: UNet(1, 2, 2)(torch.zeros(1, 1, 16, 20)), {}, "model.stages: halves images of [16"
     ", 20] to no whole number; use sides that are multiples of 8 (dataset.image_size) or fe"),
    (Tabular, {"categories": {"a": 0}}, f"model.categories.a=0: {WHOLE} 1"),
    (Tabular, {"embedding_dropout": -0.1}, "model.embedding_dropout=-0.1: must be >= 0"),
    (GPT, {"heads": 3}, "model.width=16: must be a multiple of model.heads=3"),
    (phonemes, {"classes": 1}, f"dataset.classes=1: {WHOLE} 2"),
    (phonemes, {"noise": float("nan")}, "dataset.noise=nan: must be a number >= 0"),
    (scenes, {"classes": 3}, "dataset.classes=3: scenes has 4; set dataset.classes=4"),
    (shapes, {"image_size": 7}, "dataset.image_size=7: "),
    (shapes, {"classes": 3}, "dataset.classes=3: "),
])  # fmt: skip
def test_what_is_out_of_range(make: Any, given: dict[str, Any], text: str) -> None:
    assert refused(ConfigError, make, **{**OTHERS.get(make, {}), **given}).startswith(text)


CONF = ROOT / "conf"
MODELS = CONF / "model"
DATASETS = [path for path in sorted((CONF / "dataset").glob("*.yaml")) if path.stem != "own"]


def target_of(path: Path) -> Callable[..., Any]:
    return get_object(OmegaConf.load(path)._target_)


def test_options_are_the_arguments_with_their_defaults_and_explained() -> None:
    ours = [p for p in (*DATASETS, *MODELS.glob("*.yaml")) if "_target_: mpframe." in p.read_text()]
    assert len(ours) > 10
    for path in ours:
        options: Any = OmegaConf.load(path)
        parameters = inspect.signature(target_of(path)).parameters
        name = options._target_.rpartition(".")[2]
        # How workers load has its default in the schema alone.
        extra = {"_target_"} | ({"batch_size"} if path in DATASETS else set())
        assert set(options) == set(parameters) | extra, path
        assert options.get("augment", "none") in AUGMENTATIONS
        # The others choose their own.
        same = parameters if path in DATASETS and name.lower() == path.stem else {}
        assert {key: options[key] for key in same} == {k: p.default for k, p in same.items()}, path
    for path in (*CONF.glob("dataset/*.yaml"), *MODELS.glob("*.yaml")):
        lines = path.read_text().splitlines()
        assert lines[0].startswith("# "), path
        for before, line in pairwise(lines):
            plain = line.startswith(("_target_:", "classes: 10", "#", "  "))
            assert plain or " # " in line or before.startswith("#"), line


def built(model: str, dataset: Path) -> Any:
    """The network on the meta device, whose weights take no time to draw, and the dataset."""
    files = {"dataset": dataset, "model": MODELS / f"{model}.yaml"}
    config = OmegaConf.create({group: OmegaConf.load(path) for group, path in files.items()})
    with torch.device("meta"):
        return instantiate(config.model).eval(), config.dataset


@pytest.mark.parametrize("name", ["fasterrcnn", "fcos", "ssdlite"])
def test_torchvisions_detectors_are_chosen_by_name_without_weights(name: str) -> None:
    assert isinstance(built(name, CONF / "dataset" / "scenes.yaml")[0], nn.Module)


@pytest.mark.parametrize("model", ["cnn", "gan", "mlp", "resnet18"])
def test_every_model_takes_every_dataset_of_classified_images(model: str) -> None:
    for path in (path for path in DATASETS if "augment:" in path.read_text()):
        net, facts = built(model, path)
        with torch.device("meta"):
            outputs = net(torch.zeros(2, facts.channels, facts.image_size, facts.image_size))
        # A GAN gives one logit each for the real and for the made images.
        wanted = [(2, 1), (2, 1)] if model == "gan" else [(2, facts.classes)]
        assert [own.shape for own in (outputs if model == "gan" else [outputs])] == wanted
