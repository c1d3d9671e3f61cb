"""Metrics against sums done by hand, in every dtype an output can have."""

import math
from typing import Any

import pytest
import torch
from fixtures import refused
from torch import Tensor

from mpframe.core.errors import DataError
from mpframe.data import RMSE, RMSPE, Accuracy, BitsPerByte, Dice, IoU, Metric, Perplexity

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def measured(metric: Any, *batches: tuple[Tensor, Tensor]) -> float:
    for outputs, targets in batches:
        metric.update(outputs, targets)
    assert metric.compute().dtype == torch.float64
    return float(metric.compute().item())


@pytest.mark.parametrize("dtype", DTYPES)
def test_accuracy_over_uneven_batches(dtype: torch.dtype) -> None:
    logits = torch.tensor([[2.0, 1.0], [0.0, 3.0], [5.0, 4.0], [1.0, 0.0], [0.0, 1.0]], dtype=dtype)
    targets = torch.tensor([0, 1, 1, 0, 0])  # right, right, wrong, right, wrong
    assert measured(Accuracy(), (logits[:4], targets[:4]), (logits[4:], targets[4:])) == 0.6
    logits = torch.zeros(2, 3, 4, 4, dtype=dtype)
    logits[:, 2] = 1.0
    targets = torch.full((2, 4, 4), 2)
    targets[0, 0, 0] = 1
    assert measured(Accuracy(), (logits, targets)) == 31 / 32
    metric = Accuracy()  # Counts are whole numbers beyond what float32 holds.
    metric._sum, metric._seen = torch.tensor(2**24), 2**24
    metric.update(torch.tensor([[0.0, 1.0]], dtype=dtype), torch.tensor([1]))
    assert torch.equal(metric._sum, torch.tensor(2**24 + 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_over_uneven_batches(dtype: torch.dtype) -> None:
    # 300² = 90,000 is above float16's largest number, 65,504: they are squared in float64.
    outputs = torch.tensor([[300.0], [2.0], [4.0]], dtype=dtype)
    targets = torch.zeros(3, 1, dtype=dtype)
    own = measured(RMSE(), (outputs[:1], targets[:1]), (outputs[1:], targets[1:]))
    assert own == math.sqrt((outputs[0].double().item() ** 2 + 20) / 3)
    # Half too much, half and a quarter too little.
    outputs, targets = torch.tensor([3.0, 2.0, 12.0], dtype=dtype), torch.tensor([2.0, 4.0, 16.0])
    own = measured(RMSPE(), (outputs[:1], targets[:1]), (outputs[1:], targets[1:]))
    assert own == math.sqrt((0.25 + 0.25 + 0.0625) / 3)


def test_which_of_two_values_is_better() -> None:
    names = {m.name: m.higher_is_better for m in (Accuracy, Dice, IoU, RMSE, RMSPE)}
    assert names == {"accuracy": True, "dice": True, "iou": True, "rmse": False, "rmspe": False}


def test_update_never_waits_for_the_device() -> None:
    targets = torch.zeros(4, dtype=torch.int64, device="meta")  # To read it back raises.
    Accuracy().update(torch.zeros(4, 3, device="meta"), targets)
    RMSE().update(targets.float(), targets.float())


TOKENS = torch.zeros(1, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("metric", "outputs", "targets", "shapes"),
    [
        (RMSE(), torch.zeros(5, 1), torch.zeros(5), "[5, 1] against targets of shape [5]"),
        (RMSPE(), torch.ones(3, 1), torch.ones(3), "[3, 1] against targets of shape [3]"),
        (Accuracy(), torch.zeros(5, 3), torch.zeros(5, 1), "[5] against targets of shape [5, 1]"),
        (BitsPerByte(), torch.zeros(1, 2, 4), TOKENS, "[1, 2] against targets of shape [1, 3]"),
        (IoU(), torch.zeros(1, 2, 4), TOKENS[0], "[1, 4] against targets of shape [3]"),
    ],
)
def test_shapes_that_would_broadcast_are_refused(
    metric: Metric, outputs: Tensor, targets: Tensor, shapes: str
) -> None:
    assert math.isnan(metric.compute())  # No update is nan.
    text = refused(DataError, metric.update, outputs, targets)
    assert text.endswith(f"predictions of shape {shapes}; give model and dataset the same shape")


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_and_perplexity_of_known_probabilities(dtype: torch.dtype) -> None:
    # Logits (0, 0, 0, 0) give each token 1/4, which is 2 bits: the perplexity is 4.
    logits = torch.zeros(1, 3, 4, dtype=dtype)
    batches = [(logits, torch.tensor([targets])) for targets in ([0, 1, 2], [3, 0, 1])]
    # ln 4 in fp32 is off by at most 2^-24 of itself.
    assert measured(BitsPerByte(), *batches) == pytest.approx(2.0, rel=2**-24)
    assert measured(Perplexity(), *batches) == pytest.approx(4.0, rel=2**-22)


def test_bits_are_shared_by_the_bytes_of_a_token_and_a_mean_over_tokens() -> None:
    bits = measured(BitsPerByte(bytes_per_token=4.0), (torch.zeros(1, 3, 256), TOKENS))
    assert bits == pytest.approx(8 / 4, rel=2**-23)
    sure = torch.tensor([[[200.0, 0.0]]])  # exp(-200) is 0 beside 1: the loss is exactly 0
    bits = measured(BitsPerByte(), (sure, TOKENS[:, :1]), (torch.zeros(1, 3, 2), TOKENS))
    assert bits == pytest.approx(3 / 4, rel=2**-23)


@pytest.mark.parametrize(
    ("dtype", "background"),
    [(torch.float16, True), (torch.bfloat16, False), (torch.float32, True), (torch.float64, False)],
)
def test_dice_and_iou_over_uneven_batches(dtype: torch.dtype, background: bool) -> None:
    chosen = torch.tensor([[0, 0, 1, 1], [1, 2, 2, 0], [1, 1, 1, 1]])
    targets = torch.tensor([[0, 1, 1, 1], [1, 1, 2, 0], [0, 0, 0, 1]])
    logits = torch.nn.functional.one_hot(chosen, 5).movedim(-1, 1).to(dtype)  # 3 and 4: nowhere
    # shared 2, 4, 1; targets 5, 6, 1; predicted 3, 7, 2
    dice = [4 / 8, 8 / 13, 2 / 3][not background :]
    iou = [2 / 6, 4 / 9, 1 / 2][not background :]
    for metric, values in ((Dice(background), dice), (IoU(background), iou)):
        own = measured(metric, (logits[:2], targets[:2]), (logits[2:], targets[2:]))
        assert own == pytest.approx(sum(values) / len(values), abs=1e-15)


@pytest.mark.parametrize("metric", [Accuracy, Perplexity, Dice, RMSE])
def test_what_ranks_have_measured_is_merged(metric: Any) -> None:
    logits = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(0))
    targets: Tensor = torch.arange(18).view(6, 3) % 4
    if metric is Perplexity:
        logits = logits.movedim(1, 2)
    if metric is RMSE:
        targets = torch.zeros_like(logits)
    whole, parts = metric(), [metric(), metric(), metric()]
    whole.update(logits, targets)
    parts[0].update(logits[:2], targets[:2])
    parts[2].update(logits[2:], targets[2:])  # The rank between had no sample.
    for other in parts[1:]:
        parts[0].merge(other)
    # Of the sums of losses the last bit may differ: at most 72 terms in float64.
    assert parts[0].compute().item() == pytest.approx(whole.compute().item(), rel=18 * 2**-53)
