"""torchvision's detection models and its box functions train and run under `cast()`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign
from vocabulary import HALVES

from mpframe import Precision

SIDE = 32
BOXES = torch.tensor([[2.0, 2.0, 20.0, 24.0], [10.0, 8.0, 30.0, 30.0]])


def detector(kind: str) -> nn.Module:
    """A detector over two convolutions, with images of 32 x 32 and three classes."""
    torch.manual_seed(0)
    backbone: Any = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU()
    )
    backbone.out_channels = 8
    parts: dict[str, Any] = {
        "rpn_anchor_generator": AnchorGenerator(((8, 16),), ((1.0,),)),
        "box_roi_pool": MultiScaleRoIAlign(["0"], 4, 2),
        "min_size": SIDE,
        "max_size": SIDE,
        "rpn_post_nms_top_n_train": 20,
        "num_classes": 3,
    }
    if kind == "maskrcnn":
        return MaskRCNN(backbone, mask_roi_pool=MultiScaleRoIAlign(["0"], 4, 2), **parts)
    return FasterRCNN(backbone, **parts)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("mode", ["fp32", "amp", "mixed"])
@pytest.mark.parametrize("kind", ["fasterrcnn", "maskrcnn"])
def test_a_detector_trains_and_detects(kind: str, mode: str, half: str) -> None:
    precision = Precision(mode, half)
    model = detector(kind)
    model, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    images = [torch.rand(3, SIDE, SIDE)]
    masks = torch.zeros(2, SIDE, SIDE, dtype=torch.uint8)
    masks[:, 4:16, 4:16] = 1
    targets = [{"boxes": BOXES, "labels": torch.tensor([1, 2]), "masks": masks}]
    with precision.cast():
        losses = model(images, targets)
    total = sum(loss.float() for loss in losses.values())
    total.backward()
    result = optimizer.step()
    assert torch.isfinite(total)
    assert result is None or not result.skipped
    with torch.no_grad(), precision.cast():
        (found,) = model.eval()(images)
    assert found["boxes"].shape[1:] == (4,)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "box_iou": lambda boxes: torchvision.ops.box_iou(boxes, boxes),
    "box_area": torchvision.ops.box_area,
    "generalized_box_iou": lambda boxes: torchvision.ops.generalized_box_iou(boxes, boxes),
    "complete_box_iou": lambda boxes: torchvision.ops.complete_box_iou(boxes, boxes),
    "generalized_box_iou_loss": lambda boxes: torchvision.ops.generalized_box_iou_loss(
        boxes, boxes.float()
    ),
    "sigmoid_focal_loss": lambda boxes: torchvision.ops.sigmoid_focal_loss(
        boxes / 8 - 2, (boxes > 9).float()
    ),
    "box_convert": lambda boxes: torchvision.ops.box_convert(boxes, "xyxy", "cxcywh"),
    "batched_nms": lambda boxes: torchvision.ops.batched_nms(
        boxes, boxes[:, 2], torch.tensor([0, 1]), 0.5
    ),
    "nms": lambda boxes: torchvision.ops.nms(boxes, boxes[:, 2].float(), 0.5),
    "remove_small_boxes": lambda boxes: torchvision.ops.remove_small_boxes(boxes, 1.0),
    "clip_boxes_to_image": lambda boxes: torchvision.ops.clip_boxes_to_image(boxes, (16, 16)),
}


@pytest.mark.parametrize("half", HALVES.values())
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_boxes(name: str, half: torch.dtype) -> None:
    """The whole numbers in BOXES are exact in half; a result rounded a few times is near."""
    with Precision("amp", str(half).removeprefix("torch.")).cast():
        result = FUNCTIONS[name](BOXES.to(half))
    # At most eight roundings of half, each half a unit in the last place.
    torch.testing.assert_close(
        result.float(),
        FUNCTIONS[name](BOXES).float(),
        rtol=4 * torch.finfo(half).eps,
        atol=4 * torch.finfo(half).eps,
    )
