"""torchvision's families: each one's smallest member, on small images.

Not the smallest: a batch norm over two numbers gives plus and minus one whatever they are, and its
gradient is rounding. Four images of 64 pixels leave it 16 numbers at the deepest layer.
"""

from collections.abc import Callable
from typing import Any

import torch
from example import Example, images
from torch import Tensor, nn
from torchvision import models

CLASSES = 5
CLASSIFIERS: dict[str, tuple[int, dict[str, Any]]] = {
    "alexnet": (64, {}),
    "convnext_tiny": (64, {}),
    "densenet121": (64, {}),
    "efficientnet_b0": (64, {}),
    "efficientnet_v2_s": (64, {}),
    "googlenet": (64, {"init_weights": False, "aux_logits": False}),
    "inception_v3": (80, {"init_weights": False, "aux_logits": False}),
    "mnasnet0_5": (64, {}),
    "mobilenet_v2": (64, {}),
    "mobilenet_v3_small": (64, {}),
    "regnet_x_400mf": (64, {}),
    "regnet_y_400mf": (64, {}),
    "resnet18": (64, {}),
    "resnext50_32x4d": (64, {}),
    "wide_resnet50_2": (64, {}),
    "shufflenet_v2_x0_5": (64, {}),
    "squeezenet1_1": (64, {}),
    "swin_t": (64, {}),
    "swin_v2_t": (64, {}),
    "vgg11": (64, {}),
    "vgg11_bn": (64, {}),
}
WIDE = ("alexnet", "vgg11", "vgg11_bn")  # 60 to 130 million weights, nearly all in the classifier
SEGMENTERS = (
    "deeplabv3_mobilenet_v3_large",
    "fcn_resnet50",
    "lraspp_mobilenet_v3_large",
)
DETECTORS = (
    "fasterrcnn_mobilenet_v3_large_320_fpn",
    "fasterrcnn_resnet50_fpn_v2",
    "fcos_resnet50_fpn",
    "keypointrcnn_resnet50_fpn",
    "maskrcnn_resnet50_fpn",
    "retinanet_resnet50_fpn",
    "ssd300_vgg16",
    "ssdlite320_mobilenet_v3_large",
)
VIDEO = {"mc3_18": 32, "r2plus1d_18": 32, "r3d_18": 32, "s3d": 64, "swin3d_t": 32}
OWN: dict[str, Callable[[], Example]] = {}


def names() -> list[str]:
    """Every family of torchvision that this file knows."""
    return sorted([*CLASSIFIERS, *SEGMENTERS, *DETECTORS, *VIDEO, *OWN])


def build(name: str) -> Example:
    """The member of this name with a batch."""
    torch.manual_seed(0)
    if name in CLASSIFIERS:
        size, options = CLASSIFIERS[name]
        model = getattr(models, name)(weights=None, num_classes=CLASSES, **options)
        return Example(
            _without_chance(model), (images(size, count=4),), recompute=_memory_efficient(model)
        )
    if name in SEGMENTERS:
        model = getattr(models.segmentation, name)(
            weights=None, weights_backbone=None, num_classes=CLASSES
        )
        return Example(_without_chance(model), (images(64, count=4),))
    if name in DETECTORS:
        return _detector(name)
    if name in VIDEO:
        model = getattr(models.video, name)(weights=None, num_classes=CLASSES)
        clip = images(VIDEO[name], channels=48).unflatten(1, (3, 16))
        return Example(_without_chance(model), (clip,))
    return OWN[name]()


def _narrow(model: nn.Module) -> None:
    wide = [layer for layer in model.classifier if isinstance(layer, nn.Linear)]
    model.classifier = nn.Sequential(
        nn.Linear(wide[0].in_features, 32), nn.ReLU(), nn.Linear(32, CLASSES)
    )


def _detector(name: str) -> Example:
    sized = {} if name.startswith("ssd") else {"min_size": 64, "max_size": 64}
    model = getattr(models.detection, name)(
        weights=None, weights_backbone=None, num_classes=CLASSES, **sized
    )
    return Example(_without_chance(model), (list(images(64)), [_target(), _target()]))


def _target() -> dict[str, Tensor]:
    """What a detector of any kind is taught: one box with its class, mask and keypoints."""
    mask = torch.zeros(1, 64, 64, dtype=torch.uint8)
    mask[:, 8:40, 8:40] = 1
    return {
        "boxes": torch.tensor([[8.0, 8.0, 40.0, 40.0]]),
        "labels": torch.tensor([1]),
        "masks": mask,
        "keypoints": torch.tensor([20.0, 20.0, 1.0]).expand(1, 17, 3).clone(),
    }


def _memory_efficient(model: nn.Module) -> Callable[[nn.Module], object] | None:
    if not isinstance(model, models.DenseNet):
        return None

    def turn_on(copy: nn.Module) -> None:
        for module in copy.modules():
            if hasattr(module, "memory_efficient"):
                module.memory_efficient = True

    return turn_on


def _without_chance(model: nn.Module) -> nn.Module:
    """No dropout and no dropped paths: outcomes are compared."""
    for module in model.modules():
        if isinstance(module, nn.Dropout | nn.Dropout3d):
            module.p = 0.0
        if type(module).__name__ == "StochasticDepth":
            module.p = 0.0
    return model.train()


def _vit() -> Example:
    model = models.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=CLASSES)
    return Example(model, (images(32),))


def _maxvit() -> Example:
    model = models.MaxVit((64, 64), 16, 2, [16, 32], [1, 1], 8, 0.0, num_classes=CLASSES)
    return Example(model, (images(64),))


def _raft() -> Example:
    model = models.optical_flow.raft_small(weights=None)
    return Example(model, (images(128), images(128).flip(-1)), {"num_flow_updates": 2})


OWN |= {"maxvit": _maxvit, "raft_small": _raft, "vit": _vit}
