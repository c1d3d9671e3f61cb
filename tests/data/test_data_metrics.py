"""Metrics against sums done by hand, in every dtype an output can have."""

import math

import pytest
import torch

from mpframe.core.errors import DataError
from mpframe.data import RMSE, RMSPE, Accuracy, BitsPerByte, Dice, IoU, Metric, Perplexity

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_accuracy_over_uneven_batches(dtype: torch.dtype) -> None:
    metric = Accuracy()
    logits = torch.tensor([[2.0, 1.0], [0.0, 3.0], [5.0, 4.0], [1.0, 0.0], [0.0, 1.0]], dtype=dtype)
    targets = torch.tensor([0, 1, 1, 0, 0])  # right, right, wrong, right, wrong
    metric.update(logits[:4], targets[:4])
    metric.update(logits[4:], targets[4:])
    assert metric.name == "accuracy"
    assert torch.equal(metric.compute(), torch.tensor(0.6, dtype=torch.float64))


def test_accuracy_of_dense_predictions() -> None:
    metric = Accuracy()
    logits = torch.zeros(2, 3, 4, 4)
    logits[:, 2] = 1.0
    targets = torch.full((2, 4, 4), 2)
    targets[0, 0, 0] = 1
    metric.update(logits, targets)
    assert metric.compute().item() == 31 / 32


def test_counts_are_whole_numbers_beyond_what_float32_holds() -> None:
    metric = Accuracy()
    metric._sum, metric._seen = torch.tensor(2**24), 2**24
    metric.update(torch.tensor([[0.0, 1.0]]), torch.tensor([1]))
    assert isinstance(metric._sum, torch.Tensor)
    assert metric._sum.dtype == torch.int64
    assert metric._sum.item() == 2**24 + 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_rmse_over_uneven_batches(dtype: torch.dtype) -> None:
    metric = RMSE()
    outputs = torch.tensor([[1.0], [2.0], [4.0]], dtype=dtype)
    metric.update(outputs[:1], torch.tensor([[0.0]]))
    metric.update(outputs[1:], torch.tensor([[0.0], [0.0]]))
    assert metric.name == "rmse"
    assert metric.compute().dtype == torch.float64
    assert metric.compute().item() == math.sqrt(21 / 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rmspe_over_uneven_batches(dtype: torch.dtype) -> None:
    metric = RMSPE()
    outputs = torch.tensor([3.0, 2.0, 12.0], dtype=dtype)
    metric.update(outputs[:1], torch.tensor([2.0]))  # half too much
    metric.update(outputs[1:], torch.tensor([4.0, 16.0]))  # half and a quarter too little
    assert (metric.name, metric.higher_is_better) == ("rmspe", False)
    assert metric.compute().dtype == torch.float64
    assert metric.compute().item() == math.sqrt((0.25 + 0.25 + 0.0625) / 3)


def test_rmspe_refuses_what_would_broadcast() -> None:
    with pytest.raises(DataError, match=r"^rmspe: predictions of shape \[3, 1\] against"):
        RMSPE().update(torch.ones(3, 1), torch.ones(3))


def test_rmse_squares_in_float64() -> None:
    # 300² = 90,000 is above float16's largest number, 65,504.
    metric = RMSE()
    metric.update(torch.tensor([300.0]).half(), torch.tensor([0.0]).half())
    assert metric.compute().item() == 300.0


@pytest.mark.parametrize("metric", [Accuracy(), RMSE()])
def test_no_update_is_nan(metric: Metric) -> None:
    assert metric.compute().isnan()
    assert metric.compute().shape == ()


@pytest.mark.parametrize("make", [Accuracy, RMSE])
def test_update_never_waits_for_the_device(make: type[Accuracy] | type[RMSE]) -> None:
    # The meta device holds no values, so reading one back raises.
    metric = make()
    targets = torch.zeros(4, dtype=torch.int64, device="meta")
    outputs = torch.zeros(4, 3, device="meta") if make is Accuracy else targets.float()
    metric.update(outputs, targets)
    metric.update(outputs, targets)


def test_shapes_that_would_broadcast_are_refused() -> None:
    with pytest.raises(DataError) as caught:
        RMSE().update(torch.zeros(5, 1), torch.zeros(5))
    assert str(caught.value) == (
        "rmse: predictions of shape [5, 1] against targets of shape [5]; "
        "give model and dataset the same shape"
    )
    with pytest.raises(DataError, match=r"^accuracy: predictions of shape \[5\] against"):
        Accuracy().update(torch.zeros(5, 3), torch.zeros(5, 1))


# bits per byte and perplexity


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_and_perplexity_of_known_probabilities(dtype: torch.dtype) -> None:
    # Logits (0, 0, 0, 0) give each token 1/4, which is 2 bits; (0, ln 3, -inf, -inf) gives the
    # first of two 1/4 as well, and every format holds 0; so the mean is 2 bits, the perplexity 4.
    logits = torch.zeros(2, 3, 4, dtype=dtype)
    targets = torch.tensor([[0, 1, 2], [3, 0, 1]])
    bits, perplexity = BitsPerByte(), Perplexity()
    for metric in (bits, perplexity):
        metric.update(logits[:1], targets[:1])
        metric.update(logits[1:], targets[1:])
    # ln 4 in fp32 is off by at most 2^-24 of itself.
    assert bits.compute().item() == pytest.approx(2.0, rel=2**-24)
    assert perplexity.compute().item() == pytest.approx(4.0, rel=2**-22)
    assert bits.compute().dtype == torch.float64


def test_bits_are_shared_by_the_bytes_of_a_token() -> None:
    metric = BitsPerByte(bytes_per_token=4.0)
    metric.update(torch.zeros(1, 2, 256), torch.zeros(1, 2, dtype=torch.int64))
    assert metric.compute().item() == pytest.approx(8 / 4, rel=2**-23)


def test_a_mean_over_tokens_and_not_over_batches() -> None:
    sure = torch.zeros(1, 1, 2)
    sure[..., 0] = 200.0  # exp(-200) is 0 beside 1: the loss is exactly 0
    metric = BitsPerByte()
    metric.update(sure, torch.zeros(1, 1, dtype=torch.int64))
    metric.update(torch.zeros(1, 3, 2), torch.zeros(1, 3, dtype=torch.int64))
    assert metric.compute().item() == pytest.approx(3 / 4, rel=2**-23)


@pytest.mark.parametrize("metric", [BitsPerByte(), Perplexity()])
def test_tokens_of_another_shape_are_refused(metric: BitsPerByte) -> None:
    message = rf"^{metric.name}: predictions of shape \[1, 2\] against targets of shape \[1, 3\]"
    with pytest.raises(DataError, match=message):
        metric.update(torch.zeros(1, 2, 4), torch.zeros(1, 3, dtype=torch.int64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("background", [False, True])
def test_dice_and_iou_over_uneven_batches(dtype: torch.dtype, background: bool) -> None:
    chosen = torch.tensor([[0, 0, 1, 1], [1, 2, 2, 0], [1, 1, 1, 1]])
    targets = torch.tensor([[0, 1, 1, 1], [1, 1, 2, 0], [0, 0, 0, 1]])
    logits = torch.nn.functional.one_hot(chosen, 5).movedim(-1, 1).to(dtype)  # 3 and 4: nowhere
    # shared 2, 4, 1; targets 5, 6, 1; predicted 3, 7, 2
    dice = [4 / 8, 8 / 13, 2 / 3][not background :]
    iou = [2 / 6, 4 / 9, 1 / 2][not background :]
    for metric, values in ((Dice(background), dice), (IoU(background), iou)):
        metric.update(logits[:2], targets[:2])
        metric.update(logits[2:], targets[2:])
        assert metric.compute().dtype == torch.float64
        assert metric.compute().item() == pytest.approx(sum(values) / len(values), abs=1e-15)


def test_an_overlap_without_batch_is_nan_and_shapes_must_fit() -> None:
    assert math.isnan(Dice().compute())
    with pytest.raises(DataError, match=r"^iou: predictions of shape \[1, 4\] against"):
        IoU().update(torch.zeros(1, 2, 4), torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize("metric", [Accuracy, BitsPerByte, Perplexity, Dice, IoU])
def test_what_ranks_have_measured_is_merged(metric: type[Metric]) -> None:
    logits = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(0))
    if issubclass(metric, BitsPerByte | Perplexity):
        logits = logits.movedim(1, 2)
    targets = torch.arange(18).view(6, 3) % 4
    whole, parts = metric(), [metric(), metric(), metric()]
    whole.update(logits, targets)
    parts[0].update(logits[:2], targets[:2])
    parts[2].update(logits[2:], targets[2:])  # The rank between had no sample.
    for other in parts[1:]:
        parts[0].merge(other)
    # Of the sums of losses the last bit may differ: 18 terms in float64.
    assert parts[0].compute().item() == pytest.approx(whole.compute().item(), rel=18 * 2**-53)


def test_merged_errors() -> None:
    whole, first, second = RMSE(), RMSE(), RMSE()
    outputs, targets = torch.arange(6.0), torch.zeros(6)  # squares: whole numbers
    whole.update(outputs, targets)
    first.update(outputs[:2], targets[:2])
    second.update(outputs[2:], targets[2:])
    first.merge(second)
    assert torch.equal(first.compute(), whole.compute())
