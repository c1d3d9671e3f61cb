"""The small SSD and the objective of detectors: matching by hand, losses, formats, evaluation."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vocabulary import HALVES, Kernels

from mpframe import Precision
from mpframe.core.errors import ConfigError, UserCodeError
from mpframe.core.objective import compute
from mpframe.workloads.detection import (
    SSD,
    decode,
    default_boxes,
    detection,
    encode,
    hardest,
    losses,
    match,
)

MODES = [("fp32", "float16"), ("mixed", "float16"), ("amp", "bfloat16")]
DEFAULTS = torch.tensor(
    [[10.0, 10.0, 20.0, 20.0], [30.0, 10.0, 20.0, 20.0], [50.0, 50.0, 8.0, 8.0]]
)


def batch(size: int = 2) -> Any:
    random = torch.Generator().manual_seed(0)
    images = [torch.rand(3, 64, 64, generator=random) for _ in range(size)]
    boxes = torch.tensor([[4.0, 4.0, 24.0, 20.0], [30.0, 30.0, 62.0, 60.0]])
    return images, [{"boxes": boxes, "labels": torch.tensor([1, 3])} for _ in images]


def network() -> nn.Module:
    torch.manual_seed(0)
    return SSD(classes=4, image_size=64, width=4)


# The parts


@pytest.mark.parametrize("side", [64, 300])
def test_default_boxes_stand_where_the_maps_have_places(side: int) -> None:
    maps = [-(-side // stride) for stride in (8, 16, 32)]
    boxes = default_boxes(side)
    assert boxes.shape == (sum(2 * count**2 for count in maps), 4)
    logits, offsets = SSD(4, side, width=1).predict(torch.zeros(2, 3, side, side))
    assert (logits.shape, offsets.shape) == ((2, len(boxes), 4), (2, len(boxes), 4))
    assert boxes[0].tolist() == pytest.approx([side / maps[0] / 2] * 2 + [0.2 * side] * 2)
    assert boxes[2, :2].tolist() == pytest.approx([1.5 * side / maps[0], side / maps[0] / 2])
    assert boxes[-1].tolist() == pytest.approx(
        [side - side / maps[2] / 2] * 2 + [(0.55 * 0.8) ** 0.5 * side] * 2
    )


def test_a_box_belongs_to_what_it_overlaps_by_half() -> None:
    """The first default box is the object but for a strip: IoU 0.8. The second overlaps by 1/3."""
    boxes = torch.tensor([[0.0, 0.0, 20.0, 16.0], [25.0, 0.0, 45.0, 20.0]])
    labels, offsets = match(DEFAULTS, boxes, torch.tensor([2, 1]))
    assert labels.tolist() == [2, 1, 0]
    assert torch.equal(offsets[:2], encode(boxes, DEFAULTS[:2]))
    places = torch.tensor(
        [[10.0, 10.0, 20.0, 20.0], [10.0, 8.0, 20.0, 16.0], [10.0, 4.0, 20.0, 8.0]]
    )
    labels, _ = match(places, torch.tensor([[0.0, 0.0, 20.0, 20.0]]), torch.tensor([3]))
    assert labels.tolist() == [3, 3, 0]  # IoU 1, 0.8 and 0.4


def test_each_object_has_its_best_box_however_little_it_overlaps() -> None:
    labels, _ = match(DEFAULTS, torch.tensor([[52.0, 52.0, 80.0, 80.0]]), torch.tensor([3]))
    assert labels.tolist() == [0, 0, 3]
    labels, offsets = match(DEFAULTS, torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
    assert labels.tolist() == [0, 0, 0]
    assert torch.equal(offsets, torch.zeros(3, 4))


def test_offsets_by_hand_and_back() -> None:
    boxes = torch.tensor([[0.0, 4.0, 40.0, 14.0]])  # its middle at (20, 9), 40 x 10
    offsets = encode(boxes, DEFAULTS[:1])
    wanted = [0.5 / 0.1, -0.05 / 0.1, math.log(2) / 0.2, -math.log(2) / 0.2]
    # A difference of numbers near 10 over 20 and over 0.1, each rounded by 2^-24.
    assert offsets[0].tolist() == pytest.approx(wanted, abs=64 * 2.0**-24)
    # log and exp of numbers below 1, then sums below 64: a few roundings of 2^-24 each.
    assert torch.allclose(decode(offsets, DEFAULTS[:1]), boxes, atol=64 * 8 * 2.0**-24)


def test_three_background_boxes_count_for_each_object() -> None:
    entropy = torch.tensor([[0.1, 0.9, -1.0, 0.4, 0.2, 0.8], [0.1, 0.9, 0.3, 0.4, 0.2, 0.8]])
    chosen = hardest(entropy, torch.tensor([1, 0]))
    assert chosen.tolist() == [[False, True, False, True, False, True], [False] * 6]


def test_the_losses_by_hand() -> None:
    """One object of two classes: its own entropy and the three largest of the four others'."""
    logits = torch.tensor([[[0.0, 0.0], [0.0, 1.0], [0.0, 3.0], [0.0, 2.0], [0.0, 0.0]]])
    labels = torch.tensor([[1, 0, 0, 0, 0]])
    offsets, wanted = torch.zeros(1, 5, 4), torch.zeros(1, 5, 4)
    wanted[0, 0] = torch.tensor([0.5, 2.0, 0.0, 0.0])  # 0.5 * 0.25 and 2 - 0.5
    wanted[0, 1] = 100.0  # of a box without an object
    found = losses(logits, offsets, labels, wanted)
    entropy = nn.functional.softplus(torch.tensor([0.0, 1.0, 3.0, 2.0])).sum()
    assert found["bbox_regression"].item() == 1.625
    assert found["classification"].item() == pytest.approx(entropy.item(), rel=16 * 2.0**-24)


def test_sizes_out_of_range() -> None:
    for name, value in {"classes": 0, "image_size": 0, "width": 0.5}.items():
        with pytest.raises(ConfigError, match=f"model.{name}={value}: must be a whole number >= 1"):
            SSD(**{"classes": 4, "image_size": 64, name: value})


# The objective


@pytest.mark.parametrize(("mode", "half"), MODES)
def test_a_step_and_an_evaluation_in_every_mode(mode: str, half: str) -> None:
    precision = Precision(mode, half)
    model = network()
    model, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    convolved: list[torch.dtype] = []
    for head in model.heads:
        head.register_forward_hook(lambda _, __, gave: convolved.append(gave.dtype))
    with Kernels() as kernels, precision.cast():
        output = compute(detection, model, batch())
    output.loss.backward()
    result = optimizer.step()
    assert output.count == 2
    assert result is None or not result.skipped
    given = {kernel.name: kernel.given for kernel in kernels.ran}
    assert given["smooth_l1_loss"] == given["_log_softmax"] == {torch.float32}
    assert set(convolved) == {torch.float32 if mode == "fp32" else HALVES[half]}
    with torch.no_grad(), precision.cast():
        found = compute(detection, model.eval(), batch()).outputs
    assert all(own["boxes"].dtype == own["scores"].dtype == torch.float32 for own in found)


class Detector(nn.Module):
    """Gives losses in training and boxes otherwise, as torchvision's do; draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm2d(3), nn.Dropout(0.5)
        self.inner = nn.Sequential(nn.Conv2d(3, 4, 1))
        # A tuple's list, because the second call leaves the model's own lists as they were.
        self.spy: tuple[list[tuple[bool, ...]]] = ([],)

    def forward(self, images: list[Tensor], targets: Any = None) -> Any:
        outputs = self.inner(self.drop(self.norm(torch.stack(images))))
        self.spy[0].append(
            (self.training, self.inner.training, self.norm.training, self.drop.training)
        )
        if self.training:
            return {"a": outputs.mean(), "b": outputs.square().mean() + torch.rand(())}
        return [
            {"boxes": torch.ones(1, 4), "scores": torch.ones(1), "labels": torch.ones(1)}
        ] * len(images)


def test_an_evaluation_measures_losses_and_boxes_and_changes_nothing() -> None:
    model = Detector().eval()
    before, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    with torch.no_grad():
        first, second = (compute(detection, model, batch(3)) for _ in range(2))
    assert torch.equal(first.loss, second.loss)
    assert (len(first.outputs), len(first.targets), first.count) == (3, 3, 3)
    assert model.spy[0][:2] == [(False,) * 4, (True, True, False, False)]
    assert not any(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(before[name], own) for name, own in model.state_dict().items())


def test_the_losses_are_summed_in_fp32() -> None:
    class Halves(nn.Module):
        def forward(self, images: Any, targets: Any) -> dict[str, Tensor]:
            return {"large": torch.tensor(2048.0).half(), "small": torch.tensor([1.0]).half()[0]}

    with torch.no_grad():
        output = compute(detection, Halves(), batch())
    assert output.loss.item() == 2049.0  # which float16 does not hold


class Silent(nn.Module):
    def forward(self, images: Any, targets: Any) -> Any:
        return images


@pytest.mark.parametrize(
    ("model", "given", "text"),
    [
        (
            nn.Conv2d(3, 4, 1),
            torch.ones(2, 3),
            "objective: detection takes batches of (images, targets), and the dataset gave float32 "
            "[2, 3]; let its collate make such pairs",
        ),
        (nn.Conv2d(3, 4, 1), ([torch.ones(3, 8, 8)], None), "model: Conv2d raised TypeError"),
        (
            Silent(),
            batch(),
            "model: Silent gave a list of float32 [3, 64, 64], float32 [3, 64, 64] ",
        ),
    ],
)
def test_other_batches_and_models(model: nn.Module, given: Any, text: str) -> None:
    with pytest.raises(UserCodeError) as caught:
        compute(detection, model, given)
    assert str(caught.value).startswith(text)
