"""torchvision's families: each one's smallest member, on small images.

Not the smallest: a batch norm over two numbers gives plus and minus one whatever they are, and its
gradient is rounding. Four images of 64 pixels leave it 16 numbers at the deepest layer.
"""

from collections.abc import Callable
from typing import Any

import torch
from comparison import Example, called, images
from torch import Tensor, nn
from torchvision import models

CLASSES = 5
PLAIN = (
    "alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s mnasnet0_5 mobilenet_v2 "
    "mobilenet_v3_small regnet_x_400mf regnet_y_400mf resnet18 resnext50_32x4d wide_resnet50_2 "
    "shufflenet_v2_x0_5 squeezenet1_1 swin_t swin_v2_t vgg11 vgg11_bn"
)
_AUXILIARY = {"init_weights": False, "aux_logits": False}
CLASSIFIERS: dict[str, tuple[int, dict[str, Any]]] = {
    **{name: (64, {}) for name in PLAIN.split()},
    "googlenet": (64, _AUXILIARY),
    "inception_v3": (80, _AUXILIARY),
}
SEGMENTERS = ("deeplabv3_mobilenet_v3_large", "fcn_resnet50", "lraspp_mobilenet_v3_large")
DETECTORS = (
    *("fasterrcnn_mobilenet_v3_large_320_fpn", "fasterrcnn_resnet50_fpn_v2", "fcos_resnet50_fpn"),
    *("keypointrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn", "retinanet_resnet50_fpn"),
    *("ssd300_vgg16", "ssdlite320_mobilenet_v3_large"),
)
VIDEO = {"mc3_18": 32, "r2plus1d_18": 32, "r3d_18": 32, "s3d": 64, "swin3d_t": 32}


def names() -> list[str]:
    return sorted([*CLASSIFIERS, *SEGMENTERS, *DETECTORS, *VIDEO, *OWN])


def build(name: str) -> Example:
    torch.manual_seed(0)
    if name in OWN:
        return OWN[name]()
    if name in CLASSIFIERS:
        size, options = CLASSIFIERS[name]
        model = getattr(models, name)(weights=None, num_classes=CLASSES, **options)
        inputs: tuple[Any, ...] = (images(size, count=4),)
    elif name in VIDEO:
        model = getattr(models.video, name)(weights=None, num_classes=CLASSES)
        inputs = (images(VIDEO[name], channels=48).unflatten(1, (3, 16)),)
    else:
        detects = name in DETECTORS
        sized = {"min_size": 64, "max_size": 64} if detects and not name.startswith("ssd") else {}
        make = getattr(models.detection if detects else models.segmentation, name)
        model = make(weights=None, weights_backbone=None, num_classes=CLASSES, **sized)
        taught = (list(images(64)), [_target(), _target()])
        inputs = taught if detects else (images(64, count=4),)
    return called(_without_chance(model), *inputs)


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


def _without_chance(model: nn.Module) -> nn.Module:
    """No dropout and no dropped paths: outcomes are compared."""
    for module in model.modules():
        if type(module).__name__ in ("Dropout", "Dropout3d", "StochasticDepth"):
            module.p = 0.0
    return model.train()


OWN: dict[str, Callable[[], Example]] = {
    "maxvit": lambda: called(
        models.MaxVit((64, 64), 16, 2, [16, 32], [1, 1], 8, 0.0, num_classes=CLASSES), images(64)
    ),
    "raft_small": lambda: called(
        models.optical_flow.raft_small(), images(128), images(128).flip(-1), num_flow_updates=2
    ),
    "vit": lambda: called(
        models.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=CLASSES), images(32)
    ),
}
