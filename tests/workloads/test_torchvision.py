"""torchvision's detection models and its box functions train and run under `cast()`."""

from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn
from torchvision import ops
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator

from mpframe import Precision
from mpframe.config.locations import CONF
from mpframe.core.objective import compute
from mpframe.workloads.detection import detection

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
        "box_roi_pool": ops.MultiScaleRoIAlign(["0"], 4, 2),
        "min_size": SIDE,
        "max_size": SIDE,
        "rpn_post_nms_top_n_train": 20,
        "num_classes": 3,
    }
    if kind == "maskrcnn":
        return MaskRCNN(backbone, mask_roi_pool=ops.MultiScaleRoIAlign(["0"], 4, 2), **parts)
    return FasterRCNN(backbone, **parts)


@pytest.mark.parametrize(
    ("kind", "mode", "half"),
    [
        ("fasterrcnn", "fp32", "float16"),
        ("fasterrcnn", "amp", "float16"),
        ("fasterrcnn", "mixed", "bfloat16"),
        ("maskrcnn", "amp", "bfloat16"),
        ("maskrcnn", "mixed", "float16"),
    ],
)
def test_a_detector_trains_and_detects(kind: str, mode: str, half: str) -> None:
    precision = Precision(mode, half)
    model = detector(kind)
    model, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    masks = torch.zeros(2, SIDE, SIDE, dtype=torch.uint8)
    masks[:, 4:16, 4:16] = 1
    target = {"boxes": BOXES, "labels": torch.tensor([1, 2]), "masks": masks}
    batch = [torch.rand(3, SIDE, SIDE)], [target]
    with precision.cast():
        output = compute(detection, model, batch)
    output.loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())
    result = optimizer.step()
    assert result is None or not result.skipped
    with torch.no_grad(), precision.cast():
        first, second = (compute(detection, model.eval(), batch) for _ in range(2))
    assert torch.equal(first.loss, second.loss)
    (found,) = first.outputs
    assert {"boxes", "scores", "labels"} <= set(found)
    assert found["boxes"].shape[1:] == (4,)


@pytest.mark.parametrize("name", ["fasterrcnn", "fcos", "ssdlite"])
def test_torchvisions_detectors_are_chosen_by_name(name: str) -> None:
    node = {"model": OmegaConf.load(CONF / "model" / f"{name}.yaml")}
    facts = {"dataset": {"classes": 4, "image_size": 64}}
    options = OmegaConf.create({**node, **facts}).model
    assert options.weights is None
    assert options.weights_backbone is None
    with torch.device("meta"):  # Their weights would take seconds to draw.
        assert isinstance(instantiate(options), nn.Module)
