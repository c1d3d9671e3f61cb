"""Metrics against sums done by hand, in every dtype an output can have."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from fixtures import refused
from torch import Tensor

from mpframe.core.errors import DataError
from mpframe.data import RMSE, RMSPE, Accuracy, BitsPerByte, Dice, IoU, Perplexity

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def measured(metric: Any, *batches: tuple[Tensor, Tensor]) -> float:
    for outputs, targets in batches:
        metric.update(outputs, targets)
    assert metric.compute().dtype == torch.float64
    return float(metric.compute().item())


@pytest.mark.parametrize("dtype", DTYPES)
def test_accuracy_and_errors_over_uneven_batches(dtype: torch.dtype) -> None:
    logits = torch.tensor([[2.0, 1.0], [0.0, 3.0], [5.0, 4.0], [1.0, 0.0], [0.0, 1.0]], dtype=dtype)
    targets = torch.tensor([0, 1, 1, 0, 0])  # right, right, wrong, right, wrong
    assert measured(Accuracy(), (logits[:4], targets[:4]), (logits[4:], targets[4:])) == 0.6
    logits = torch.zeros(2, 3, 4, 4, dtype=dtype)
    logits[:, 2] = 1.0
    targets = torch.full((2, 4, 4), 2)
    targets[0, 0, 0] = 1
    assert measured(Accuracy(), (logits, targets)) == 31 / 32
    metric = Accuracy()
    metric._sum, metric._seen = torch.tensor(2**24), 2**24
    metric.update(torch.tensor([[0.0, 1.0]], dtype=dtype), torch.tensor([1]))
    assert int(metric._sum) == 2**24 + 1  # which float32 does not hold
    # 300² = 90,000 is above float16's largest number, 65,504: they are squared in float64.
    outputs = torch.tensor([[300.0], [2.0], [4.0]], dtype=dtype)
    targets = torch.zeros(3, 1, dtype=dtype)
    own = measured(RMSE(), (outputs[:1], targets[:1]), (outputs[1:], targets[1:]))
    assert own == math.sqrt((outputs[0].double().item() ** 2 + 20) / 3)
    # Half too much, half and a quarter too little.
    outputs, targets = torch.tensor([3.0, 2.0, 12.0], dtype=dtype), torch.tensor([2.0, 4.0, 16.0])
    own = measured(RMSPE(), (outputs[:1], targets[:1]), (outputs[1:], targets[1:]))
    assert own == math.sqrt((0.25 + 0.25 + 0.0625) / 3)


def test_which_of_two_values_is_better_and_no_update_waits_for_the_device() -> None:
    names = {m.name: m.higher_is_better for m in (Accuracy, Dice, IoU, RMSE, RMSPE)}
    assert names == {"accuracy": True, "dice": True, "iou": True, "rmse": False, "rmspe": False}
    targets = torch.zeros(4, dtype=torch.int64, device="meta")  # To read it back raises.
    for metric in (Accuracy(), Dice(), IoU()):
        metric.update(torch.zeros(4, 3, device="meta"), targets)
    Perplexity().update(torch.zeros(4, 2, 3, device="meta"), targets.view(2, 2).repeat(2, 1))
    RMSE().update(targets.float(), targets.float())


TOKENS = torch.zeros(1, 3, dtype=torch.int64)


WRONG = torch.tensor([[-100, 0, -1]])
NO_CLASS = "the target -1 is no class; correct it, or give the metric ignore_index=-1, which leave"


@pytest.mark.parametrize(("metric", "outputs", "targets", "text"), [
    # Shapes that would broadcast.
    (RMSE(), [5, 1], torch.zeros(5), "[5, 1] against targets of shape [5]; give model and dataset"),
    (RMSPE(), [3, 1], torch.ones(3), "[3, 1] against targets of shape [3]; give model and dataset"),
    (Accuracy(), [5, 3], torch.zeros(5, 1), "[5] against targets of shape [5, 1]"),
    (BitsPerByte(), [1, 2, 4], TOKENS, "[1, 2] against targets of shape [1, 3]"),
    (IoU(), [1, 2, 4], TOKENS[0], "[1, 4] against targets of shape [3]"),
    (Accuracy(), [5, 3], torch.zeros(5, 3), "[5] against targets of shape [5, 3]"),
    *((metric, [5, 1], torch.zeros(5).long(), f"{metric.name}: outputs of shape [5, 1] have one cl")
      for metric in (Accuracy(), Dice(), IoU(True))),
    *((metric, [1, 2, 3], WRONG, f"{metric.name}: {NO_CLASS}")
      for metric in (Accuracy(), Dice(), IoU())),
    (BitsPerByte(), [1, 3, 2], WRONG, f"bits_per_byte: {NO_CLASS}"),
])  # fmt: skip
def test_a_single_column_and_targets_that_are_no_classes_and_not_ignored_are_refused(
    metric: Any, outputs: list[int], targets: Tensor, text: str
) -> None:
    assert math.isnan(metric.compute())  # No update is nan.
    assert text in refused(DataError, metric.update, torch.zeros(outputs), targets)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_and_perplexity_of_known_probabilities(dtype: torch.dtype) -> None:
    # Logits (0, 0, 0, 0) give each token 1/4, which is 2 bits: the perplexity is 4.
    batches = [(torch.zeros(1, 3, 4, dtype=dtype), TOKENS + number) for number in range(2)]
    # ln 4 in fp32 is off by at most 2^-24 of itself.
    assert measured(BitsPerByte(), *batches) == pytest.approx(2.0, rel=2**-24)
    assert measured(Perplexity(), *batches) == pytest.approx(4.0, rel=2**-22)
    assert measured(BitsPerByte(4.0), *batches) == pytest.approx(2 / 4, rel=2**-24)
    # exp(-200) is 0 beside 1: the loss of a sure token is exactly 0, beside three of 1 bit.
    sure = (torch.tensor([[[200.0, 0.0]]], dtype=dtype), TOKENS[:, :1])
    bits = measured(BitsPerByte(), sure, (torch.zeros(1, 3, 2, dtype=dtype), TOKENS))
    assert bits == pytest.approx(3 / 4, rel=2**-23)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dice_and_iou_over_uneven_batches(dtype: torch.dtype) -> None:
    chosen = torch.tensor([[0, 0, 1, 1], [1, 2, 2, 0], [1, 1, 1, 1]])
    targets = torch.tensor([[0, 1, 1, 1], [1, 1, 2, 0], [0, 0, 0, 1]])
    logits = torch.nn.functional.one_hot(chosen, 5).movedim(-1, 1).to(dtype)  # 3 and 4: nowhere
    # shared 2, 4, 1; targets 5, 6, 1; predicted 3, 7, 2
    dice, iou = [4 / 8, 8 / 13, 2 / 3], [2 / 6, 4 / 9, 1 / 2]
    for metric, values in (
        *((Dice(True), dice), (Dice(), dice[1:]), (IoU(True), iou), (IoU(), iou[1:])),
    ):
        own = measured(metric, (logits[:2], targets[:2]), (logits[2:], targets[2:]))
        assert own == pytest.approx(sum(values) / len(values), abs=1e-15)


@pytest.mark.parametrize("ignored", [-100, 255, 1])  # 1: another label is left out than by default.
@pytest.mark.parametrize("dtype", DTYPES)
def test_ignored_labels_are_in_no_sum_and_no_count(dtype: torch.dtype, ignored: int) -> None:
    logits = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    targets = torch.arange(24).view(4, 6) % 5
    targets[:, 4:], targets[3] = ignored, ignored  # The last sample has no label.
    kept = targets != ignored
    for metric in (Accuracy, Perplexity, BitsPerByte, partial(Dice, True), partial(IoU, True)):
        of_tokens = metric in (Perplexity, BitsPerByte)
        rows = logits.movedim(1, 2)[kept], targets[kept]  # as if nothing else had been there
        rows = tuple(values[None] for values in rows) if of_tokens else rows
        outputs = logits.movedim(1, 2) if of_tokens else logits
        batches = zip(outputs.split(3), targets.split(3), strict=True)
        own = measured(metric(ignore_index=ignored), *batches)
        # Up to 16 losses are summed in another order, in float64.
        assert own == pytest.approx(measured(metric(), rows), rel=16 * 2**-53), metric
        none = torch.full_like(targets, ignored)
        assert math.isnan(measured(metric(ignore_index=ignored), (outputs, none)))


def test_targets_may_be_narrow_integers() -> None:
    """156 is -100 and 20 * 21 is 164 in uint8."""
    targets = torch.tensor([20, 156, 3], dtype=torch.uint8)
    logits = torch.nn.functional.one_hot(torch.tensor([20, 7, 3]), 200).float()
    assert measured(Accuracy(), (logits, targets)) == 2 / 3
    assert measured(Dice(), (logits[::2, :21], targets[::2])) == 1.0


@pytest.mark.parametrize("metric", [Accuracy, Perplexity, Dice, RMSE])
def test_what_ranks_have_measured_is_merged(metric: Any) -> None:
    logits = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(0))
    targets: Tensor = torch.arange(18).view(6, 3) % 4
    logits = logits.movedim(1, 2) if metric is Perplexity else logits
    targets = torch.zeros_like(logits) if metric is RMSE else targets
    whole, parts = metric(), [metric(), metric(), metric()]
    whole.update(logits, targets)
    parts[0].update(logits[:2], targets[:2])
    parts[2].update(logits[2:], targets[2:])  # The rank between had no sample.
    for other in parts[1:]:
        parts[0].merge(other)
    # Of the sums of losses the last bit may differ: at most 72 terms in float64.
    assert parts[0].compute().item() == pytest.approx(whole.compute().item(), rel=18 * 2**-53)
