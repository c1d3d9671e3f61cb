"""The networks: shapes, sizes, torchvision's ResNet to the last number, and honest refusals."""

from typing import Any

import pytest
import torch
import torchvision
from torch import nn

from mpframe.core.errors import ConfigError
from mpframe.workloads.images import cnn, mlp, resnet18
from mpframe.workloads.segmentation.model import UNet
from mpframe.workloads.tables.model import Tabular


def size(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


# mlp


@pytest.mark.parametrize("in_features", [64, [1, 8, 8], (4, 16)])
def test_mlp_takes_a_number_or_sizes(in_features: Any) -> None:
    net = mlp(in_features, classes=5, hidden=7, depth=3)
    assert net(torch.zeros(2, 64)).shape == (2, 5)
    assert net(torch.zeros(2, 1, 8, 8)).shape == (2, 5)
    assert size(net) == (64 * 7 + 7) + 2 * (7 * 7 + 7) + (7 * 5 + 5)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_mlp_names_and_dropout(dropout: float) -> None:
    net = mlp(4, classes=2, hidden=3, depth=2, dropout=dropout)
    assert [name for name, _ in net.named_children()] == ["flatten", "hidden1", "hidden2", "head"]
    drops = [module for module in net.modules() if isinstance(module, nn.Dropout)]
    assert len(drops) == (2 if dropout else 0)


# cnn


@pytest.mark.parametrize("side", [8, 11, 28, 32, 64])
def test_cnn_takes_sides_from_8_to_64(side: int) -> None:
    net = cnn(channels=2, classes=5, width=4)
    assert net(torch.zeros(3, 2, side, side)).shape == (3, 5)


@pytest.mark.parametrize(("stages", "width"), [(1, 3), (2, 8), (3, 4)])
def test_cnn_size(stages: int, width: int) -> None:
    expected, before = 0, 2
    for stage in range(stages):
        wide = width * 2**stage
        expected += 9 * before * wide + 9 * wide * wide + 2 * 2 * wide
        before = wide
    expected += before * 5 + 5
    assert size(cnn(channels=2, classes=5, width=width, stages=stages)) == expected


def test_cnn_changes_no_tensor_in_place() -> None:
    # What a hook sees of a layer must still be there when it looks at it after the forward pass.
    net = cnn(channels=1, classes=3, width=4)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for module in net.modules():
        module.register_forward_hook(lambda _m, _i, output: seen.append((output, output.clone())))
    net(torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0)))
    assert seen
    assert all(torch.equal(now, then) for now, then in seen)


def test_cnn_dropout_sits_before_the_head() -> None:
    names = [name for name, _ in cnn(channels=1, classes=3, dropout=0.2).named_children()]
    assert names[-2:] == ["dropout", "head"]


# resnet18


def test_resnet18_with_its_own_stem_is_torchvisions() -> None:
    torch.manual_seed(3)
    ours = resnet18(classes=10, small_stem=False)
    torch.manual_seed(3)
    theirs = torchvision.models.resnet18(num_classes=10)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ours(images), theirs(images))


def test_the_small_stem_is_the_only_difference() -> None:
    small, large = resnet18(classes=10), torchvision.models.resnet18(num_classes=10)
    assert size(small) == size(large) - 64 * 3 * (49 - 9)
    assert small.conv1.stride == (1, 1)
    assert isinstance(small.maxpool, nn.Identity)


@pytest.mark.parametrize("small_stem", [True, False])
def test_every_tensor_is_real(small_stem: bool) -> None:
    net = resnet18(classes=10, width=8, small_stem=small_stem)
    tensors = [*net.parameters(), *net.buffers()]
    assert all(tensor.device.type == "cpu" for tensor in tensors)
    assert all(torch.isfinite(tensor).all() for tensor in tensors)


@pytest.mark.parametrize(("width", "channels"), [(8, 1), (16, 3), (24, 3)])
def test_resnet18_width_scales_every_stage(width: int, channels: int) -> None:
    net = resnet18(classes=7, channels=channels, width=width)
    stages = [getattr(net, f"layer{number}")[-1].conv2.out_channels for number in (1, 2, 3, 4)]
    assert stages == [width, 2 * width, 4 * width, 8 * width]
    assert net(torch.zeros(2, channels, 16, 16)).shape == (2, 7)


# Refusals


@pytest.mark.parametrize(
    ("make", "arguments", "text"),
    [
        (mlp, {"in_features": 0, "classes": 2}, "model.in_features=0: must be a whole number"),
        (mlp, {"in_features": [3, 0], "classes": 2}, "model.in_features=0: must be a whole number"),
        (mlp, {"in_features": 4, "classes": 2, "depth": 0}, "model.depth=0: must be a whole"),
        (mlp, {"in_features": 4, "classes": 2, "dropout": 1.0}, "model.dropout=1.0: must be >= 0"),
        (cnn, {"channels": 1, "classes": 0}, "model.classes=0: must be a whole number >= 1"),
        (cnn, {"channels": 1, "classes": 2, "width": 1.5}, "model.width=1.5: must be a whole"),
        (cnn, {"channels": 1, "classes": 2, "stages": -1}, "model.stages=-1: must be a whole"),
        (cnn, {"channels": 1, "classes": 2, "dropout": -0.1}, "model.dropout=-0.1: must be >= 0"),
        (resnet18, {"classes": 10, "width": 0}, "model.width=0: must be a whole number >= 1"),
        (resnet18, {"classes": True}, "model.classes=True: must be a whole number >= 1"),
    ],
)
def test_sizes_out_of_range(make: Any, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**arguments)
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)


# tabular


def test_tabular_by_hand() -> None:
    net = Tabular({"a": 1, "b": 9}, ["x"], hidden=[5], dropout=0.5, embedding_dropout=0.5).eval()
    sizes = [tuple(embedding.weight.shape) for embedding in net.embeddings]
    assert sizes == [(2, round(1.6 * 2**0.56)), (10, round(1.6 * 10**0.56))] == [(2, 2), (10, 6)]
    categorical, continuous = torch.tensor([[1, 9], [0, 0]]), torch.tensor([[2.0], [3.0]])
    net.values_norm.running_mean += 1.0
    joined = torch.cat(
        [
            *(e.weight[categorical[:, i]] for i, e in enumerate(net.embeddings)),
            (continuous - 1.0) / torch.sqrt(torch.tensor(1.0 + net.values_norm.eps)),
        ],
        dim=1,
    )
    linear, norm = net.blocks.block1.linear, net.blocks.block1.norm
    hidden = linear(joined).relu() / torch.sqrt(torch.tensor(1.0 + norm.eps))
    torch.testing.assert_close(net(categorical, continuous), net.head(hidden))


def test_tabular_takes_columns_of_one_kind() -> None:
    assert Tabular({}, ["x", "y"])(torch.zeros(2, 0).long(), torch.zeros(2, 2)).shape == (2, 1)
    assert Tabular({"a": 3}, [])(torch.ones(2, 1).long(), torch.zeros(2, 0)).shape == (2, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"categories": {}, "continuous": []}, "model.categories, model.continuous: are both"),
        ({"categories": {"a": 0}}, "model.categories.a=0: must be a whole number >= 1"),
        ({"hidden": [4, 0]}, "model.hidden.1=0: must be a whole number >= 1"),
        ({"dropout": 1.0}, "model.dropout=1.0: must be >= 0 and < 1"),
        ({"embedding_dropout": -0.1}, "model.embedding_dropout=-0.1: must be >= 0 and < 1"),
    ],
)
def test_tabular_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Tabular(**{"categories": {"a": 2}, "continuous": ["x"], **options})
    assert str(caught.value).startswith(message)


# unet


def test_unet_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        assert size(UNet(channels=3, classes=9)) == 7_703_497


@pytest.mark.parametrize(("stages", "height", "width"), [(1, 5, 7), (2, 6, 4), (4, 16, 24)])
def test_unet_keeps_the_size(stages: int, height: int, width: int) -> None:
    net = UNet(channels=2, classes=5, width=3, stages=stages)
    assert net(torch.zeros(2, 2, height, width)).shape == (2, 5, height, width)


def test_unet_refuses_sides_that_it_cannot_halve() -> None:
    with pytest.raises(ConfigError) as caught:
        UNet(channels=1, classes=2, width=2)(torch.zeros(1, 1, 16, 20))
    assert str(caught.value) == (
        "model.stages: halves images of [16, 20] to no whole number; use sides that are multiples "
        "of 8 (dataset.image_size) or fewer stages"
    )
    with pytest.raises(ConfigError, match=r"^model.stages=0: must be a whole number >= 1"):
        UNet(channels=1, classes=2, stages=0)


def test_unet_joins_the_features_of_the_same_side() -> None:
    net = UNet(channels=1, classes=2, width=2, stages=2).eval()
    image = torch.randn(1, 1, 4, 4)
    first = net.encoder[0](image)
    second = net.encoder[1](nn.functional.max_pool2d(first, 2))
    joined = torch.cat([first, net.up[0](second)], dim=1)
    assert torch.equal(net(image), net.head(net.decoder[0](joined)))
