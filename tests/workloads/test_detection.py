"""Detectors: matching, losses, formats; generated scenes; the mean average precision by hand."""

import math
from typing import Any

import pytest
import torch
from fixtures import refused
from torch import Tensor, nn
from torchvision import ops
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import box_iou
from vocabulary import HALVES, Kernels

from mpframe import Precision
from mpframe.core.errors import UserCodeError
from mpframe.core.objective import NamedObjective
from mpframe.data import Loader
from mpframe.workloads import detection as det
from mpframe.workloads.detection import MeanAveragePrecision, detection, encode, match, scenes

DEFAULTS = torch.tensor([[10.0, 10, 20, 20], [30, 10, 20, 20], [50, 50, 8, 8]])


def batch(size: int = 2) -> Any:
    random = torch.Generator().manual_seed(0)
    images = [torch.rand(3, 64, 64, generator=random) for _ in range(size)]
    boxes = torch.tensor([[4.0, 4, 24, 20], [30, 30, 62, 60]])
    masks = torch.zeros(2, 64, 64, dtype=torch.uint8)
    masks[:, 8:32, 8:32] = 1
    return images, [{"boxes": boxes, "labels": torch.tensor([1, 3]), "masks": masks}] * size


def network(kind: str) -> nn.Module:
    """A detector of 64 x 64 pixels and four classes; torchvision's over two convolutions."""
    torch.manual_seed(0)
    if kind == "ssd":
        return det.SSD(classes=4, image_size=64, width=4)
    layers = nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU()
    backbone: Any = nn.Sequential(*layers)
    backbone.out_channels = 8
    return MaskRCNN(
        backbone, rpn_anchor_generator=AnchorGenerator(((8, 16),), ((1.0,),)), min_size=64,
        box_roi_pool=ops.MultiScaleRoIAlign(["0"], 4, 2), max_size=64, num_classes=4,
        rpn_post_nms_top_n_train=20, mask_roi_pool=ops.MultiScaleRoIAlign(["0"], 4, 2),
    )  # fmt: skip


@pytest.mark.parametrize("side", [64, 300])
def test_default_boxes_stand_where_the_maps_have_places(side: int) -> None:
    maps = [-(-side // stride) for stride in (8, 16, 32)]
    boxes = det.default_boxes(side)
    assert boxes.shape == (sum(2 * count**2 for count in maps), 4)
    logits, offsets = det.SSD(4, side, width=1).predict(torch.zeros(2, 3, side, side))
    assert (logits.shape, offsets.shape) == ((2, len(boxes), 4), (2, len(boxes), 4))
    assert boxes[0].tolist() == pytest.approx([side / maps[0] / 2] * 2 + [0.2 * side] * 2)
    assert boxes[2, :2].tolist() == pytest.approx([1.5 * side / maps[0], side / maps[0] / 2])
    assert boxes[-1].tolist() == pytest.approx(
        [side - side / maps[2] / 2] * 2 + [(0.55 * 0.8) ** 0.5 * side] * 2
    )


def test_a_box_belongs_to_what_it_overlaps_by_half_and_each_object_has_its_best_box() -> None:
    """The first default box is the object but for a strip: IoU 0.8. The second overlaps by 1/3."""
    boxes = torch.tensor([[0.0, 0, 20, 16], [25, 0, 45, 20]])
    labels, offsets = match(DEFAULTS, boxes, torch.tensor([2, 1]))
    assert labels.tolist() == [2, 1, 0]
    assert torch.equal(offsets[:2], encode(boxes, DEFAULTS[:2]))
    places = torch.tensor([[10.0, 10, 20, 20], [10, 8, 20, 16], [10, 4, 20, 8]])
    for defaults, box, wanted in (
        (places, [0.0, 0, 20, 20], [3, 3, 0]),  # IoU 1, 0.8 and 0.4
        (DEFAULTS, [52.0, 52, 80, 80], [0, 0, 3]),  # however little it overlaps
    ):
        assert match(defaults, torch.tensor([box]), torch.tensor([3]))[0].tolist() == wanted
    labels, offsets = match(DEFAULTS, torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
    assert labels.tolist() == [0, 0, 0]
    assert torch.equal(offsets, torch.zeros(3, 4))
    boxes = torch.tensor([[0.0, 4.0, 40.0, 14.0]])  # its middle at (20, 9), 40 x 10
    offsets = encode(boxes, DEFAULTS[:1])
    wanted = [0.5 / 0.1, -0.05 / 0.1, math.log(2) / 0.2, -math.log(2) / 0.2]
    # A difference of numbers near 10 over 20 and over 0.1, each rounded by 2^-24.
    assert offsets[0].tolist() == pytest.approx(wanted, abs=64 * 2.0**-24)
    # log and exp of numbers below 1, then sums below 64: a few roundings of 2^-24 each.
    assert torch.allclose(det.decode(offsets, DEFAULTS[:1]), boxes, atol=64 * 8 * 2.0**-24)


def test_the_losses_by_hand() -> None:
    """One object of two classes: its own entropy and the three largest of the four others'."""
    entropy = torch.tensor([[0.1, 0.9, -1.0, 0.4, 0.2, 0.8], [0.1, 0.9, 0.3, 0.4, 0.2, 0.8]])
    chosen = det.hardest(entropy, torch.tensor([1, 0]))
    assert chosen.tolist() == [[False, True, False, True, False, True], [False] * 6]
    logits = torch.tensor([[[0.0, 0.0], [0.0, 1.0], [0.0, 3.0], [0.0, 2.0], [0.0, 0.0]]])
    labels = torch.tensor([[1, 0, 0, 0, 0]])
    offsets, wanted = torch.zeros(1, 5, 4), torch.zeros(1, 5, 4)
    wanted[0, 0] = torch.tensor([0.5, 2.0, 0.0, 0.0])  # 0.5 * 0.25 and 2 - 0.5
    wanted[0, 1] = 100.0  # of a box without an object
    found = det.losses(logits, offsets, labels, wanted)
    entropy = nn.functional.softplus(torch.tensor([0.0, 1.0, 3.0, 2.0])).sum()
    assert found["bbox_regression"].item() == 1.625
    assert found["classification"].item() == pytest.approx(entropy.item(), rel=16 * 2.0**-24)


@pytest.mark.parametrize(("kind", "mode", "half"), [
    ("ssd", "fp32", "float16"), ("ssd", "mixed", "float16"), ("ssd", "amp", "bfloat16"),
    ("maskrcnn", "amp", "float16"), ("maskrcnn", "mixed", "bfloat16"),
])  # fmt: skip
def test_a_step_and_an_evaluation_in_every_mode(kind: str, mode: str, half: str) -> None:
    precision, model = Precision(mode, half), network(kind)
    model, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    convolved: set[torch.dtype] = set()
    for layer in (own for own in model.modules() if isinstance(own, nn.Conv2d)):
        layer.register_forward_hook(lambda _, __, gave: convolved.add(gave.dtype))
    with Kernels() as kernels, precision.cast():
        output = NamedObjective("", detection)(model, batch())
    output.loss.backward()
    assert output.count == 2
    assert all(weight.grad is not None for weight in model.parameters())
    result = optimizer.step()
    assert result is None or not result.skipped
    given = {kernel.name: kernel.given for kernel in kernels.ran}
    assert given["smooth_l1_loss"] == given["_log_softmax"] == {torch.float32}
    assert convolved == {torch.float32 if mode == "fp32" else HALVES[half]}
    with torch.no_grad(), precision.cast():
        first, second = (NamedObjective("", detection)(model.eval(), batch()) for _ in range(2))
    assert torch.equal(first.loss, second.loss)
    for found in first.outputs:
        assert found["boxes"].dtype == found["scores"].dtype == torch.float32
        assert found["boxes"].shape == (*found["labels"].shape, 4)


class Detector(nn.Sequential):
    """Gives losses in training and boxes otherwise, as torchvision's do; draws random numbers."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm2d(3), nn.Dropout(0.5), nn.Conv2d(3, 4, 1))
        # A tuple's list, because the second call leaves the model's own lists as they were.
        self.spy: tuple[list[list[bool]]] = ([],)

    def forward(self, images: list[Tensor], targets: Any = None) -> Any:
        outputs = super().forward(torch.stack(images))
        self.spy[0].append([part.training for part in (self, *self)])
        if self.training:
            return {"a": outputs.mean(), "b": outputs.square().mean() + torch.rand(())}
        return [{"boxes": torch.ones(1, 4)}] * len(images)


def test_an_evaluation_measures_losses_and_boxes_and_changes_nothing() -> None:
    model = Detector().eval()
    before, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    with torch.no_grad():
        first, second = (NamedObjective("", detection)(model, batch(3)) for _ in range(2))
    assert torch.equal(first.loss, second.loss)
    assert (len(first.outputs), len(first.targets), first.count) == (3, 3, 3)
    assert model.spy[0][:2] == [[False] * 4, [True, False, False, True]]
    assert not any(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(before[name], own) for name, own in model.state_dict().items())


def test_losses_are_summed_in_fp32_and_what_gives_none_is_refused() -> None:
    def giving(gave: Any) -> nn.Module:
        (model := nn.Identity()).forward = lambda images, targets: gave  # type: ignore[method-assign]
        return model

    losses = {"large": torch.tensor(2048.0).half(), "small": torch.tensor(1.0).half()}
    with torch.no_grad():
        output = NamedObjective("", detection)(giving(losses), batch())
    assert output.loss.item() == 2049.0  # which float16 does not hold
    for other, given, text in (
        (nn.Conv2d(3, 4, 1), torch.ones(3, 3), "objective: detection raised ValueError (too many"),
        (nn.Conv2d(3, 4, 1), ([torch.ones(3, 8, 8)], None), "model: Conv2d raised TypeError"),
        (
            giving([torch.ones(3, 4)]),
            batch(),
            "objective: detection raised AttributeError ('list' ",
        ),
    ):
        assert refused(UserCodeError, NamedObjective("", detection), other, given).startswith(text)


def test_a_shape_fills_its_box_which_overlaps_no_other_and_nothing_else() -> None:
    """Without noise the background has one colour, and each shape's pixels are in its box."""
    task = scenes(train=20, image_size=48, noise=0.0, max_objects=6)
    images, targets = next(Loader(task.train, 20, shuffle=False, collate=task.collate).epoch(0))
    assert [tuple(image.shape) for image in images] == [(3, 48, 48)] * 20
    areas: dict[int, list[float]] = {1: [], 2: [], 3: []}
    for image, target in zip(images, targets, strict=True):
        own = target["boxes"]
        assert 0 <= own.min() <= own.max() <= 48
        assert torch.equal(box_iou(own, own), torch.eye(len(own)))
        colours, counts = image.flatten(1).unique(dim=1, return_counts=True)
        background = colours[:, counts.argmax()][:, None, None]
        shape = (image != background).any(dim=0)
        for box, label in zip(target["boxes"], target["labels"], strict=True):
            middle = (box[:2] + box[2:]).div(2).int().tolist()[::-1]
            apart = (image[:, *middle] - background.flatten()).abs()
            assert torch.minimum(apart, 1 - apart).min() >= 0.25 - 1e-6
            # A pixel belongs to a shape if its middle does.
            left, top = (box[:2] - 0.5).ceil().int().tolist()
            right, bottom = (box[2:] - 0.5).floor().int().tolist()
            inside = shape[top : bottom + 1, left : right + 1]
            areas[int(label)].append(inside.double().mean().item())
            assert inside.any(dim=1)[1:].all()  # In the first row a triangle has its tip alone.
            shape[top : bottom + 1, left : right + 1] = False
        assert not shape.any()
    assert len({len(target["boxes"]) for target in targets}) > 2
    means = {label: sum(own) / len(own) for label, own in areas.items()}
    assert means[1] == 1.0
    # An ellipse covers pi / 4 of its box, a triangle half; the edges' pixels are at most 4 of 9.6.
    assert 0.7 < means[2] < 0.87
    assert 0.4 < means[3] < 0.6


LEFT, RIGHT, FAR = [0.0, 0.0, 8.0, 8.0], [8.0, 0.0, 16.0, 8.0], [0.0, 16.0, 8.0, 24.0]


def boxes(*rows: tuple[list[float], int, float], dtype: torch.dtype = torch.float32) -> Any:
    places, labels, scores = zip(*rows, strict=True) if rows else ((), (), ())
    own = torch.tensor(places, dtype=dtype).reshape(-1, 4), torch.tensor(labels).long()
    return {"boxes": own[0], "labels": own[1], "scores": torch.tensor(scores, dtype=dtype)}


def test_a_true_box_is_found_once_by_an_overlap_of_half() -> None:
    """Of two boxes of 8 x 8 shifted by s the IoU is (8 - s) / (8 + s): 6/10, 5/11 and 7/9."""
    one, nothing = boxes((LEFT, 1, 1)), boxes()
    near, off, next_ = ([s, 0.0, 8.0 + s, 8.0] for s in (2.0, 3.0, 1.0))
    two, third = boxes((LEFT, 1, 1), (RIGHT, 1, 1)), pytest.approx((1 + 2 / 3) / 2)
    for found, true, wanted in (
        (boxes((LEFT, 1, 0.9), (LEFT, 1, 0.8), (RIGHT, 1, 0.7)), two, third),
        (boxes((near, 1, 0.9)), one, 1.0),
        (boxes((off, 1, 0.9)), one, 0.0),
        # At the first recall the precision is that of the second: 2/3.
        (boxes((FAR, 1, 0.9), (LEFT, 1, 0.8), (RIGHT, 1, 0.7)), two, pytest.approx(2 / 3)),
        (boxes((LEFT, 1, 0.9)), boxes((LEFT, 1, 1), (RIGHT, 1, 1), (FAR, 1, 1)), 1 / 3),
        (boxes((FAR, 1, 0.1), (LEFT, 1, 0.9)), one, 1.0),
        (boxes((FAR, 1, 0.9), (LEFT, 1, 0.1)), one, 0.5),
        (boxes((LEFT, 1, 0.9), (FAR, 2, 0.9)), one, 1.0),
        (nothing, one, 0.0),
        (boxes((LEFT, 1, 0.9)), nothing, pytest.approx(math.nan, nan_ok=True)),
    ):
        metric = MeanAveragePrecision()
        assert math.isnan(metric.compute().item())
        metric.update([found], [true])
        assert metric.compute().item() == wanted
    # Class 1, by score: right, wrong, right, of 3: (1 + 2/3) / 3. Class 2: its one box: 1.
    first = boxes((LEFT, 1, 0.875), (FAR, 1, 0.75), (RIGHT, 2, 0.5), dtype=torch.float16)
    second = boxes((LEFT, 1, 0.625), dtype=torch.float16)
    true = boxes((LEFT, 1, 1), (RIGHT, 2, 1)), boxes((LEFT, 1, 1), (FAR, 1, 1))
    (metric := MeanAveragePrecision()).update([first, second], [*true])
    assert metric.compute().dtype == torch.float64
    assert metric.compute().item() == pytest.approx(((1 + 2 / 3) / 3 + 1) / 2, rel=1e-15)
    strict = MeanAveragePrecision(iou=0.75)
    strict.update([boxes((next_, 1, 0.9))], [one])
    assert (strict.name, strict.compute().item()) == ("map_75", 1.0)
