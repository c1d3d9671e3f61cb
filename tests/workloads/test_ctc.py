"""CTC: the loss beside PyTorch's own, the formats of its ops, and sequences that do not mix."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vocabulary import HALVES, Kernels

from mpframe import Precision
from mpframe.core.errors import ConfigError, UserCodeError
from mpframe.core.objective import compute
from mpframe.tracking.dtype_map import dtype_map
from mpframe.workloads.speech import LSTM, collate, ctc

MODES = [("fp32", "float16"), *((m, h) for m in ("mixed", "amp") for h in HALVES)]
FEATURES, CLASSES = 6, 5


def batch_of(*lengths: tuple[int, int]) -> dict[str, Any]:
    """Random sequences of so many frames and labels."""
    random = torch.Generator().manual_seed(0)
    return collate(
        [
            (
                torch.randn(t, FEATURES, generator=random),
                torch.randint(1, CLASSES, (n,), generator=random),
            )
            for t, n in lengths
        ]
    )


def network(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return LSTM(FEATURES, CLASSES, hidden=8, **options)


def test_the_loss_is_torchs_own() -> None:
    model, batch = network(), batch_of((12, 3), (9, 2), (7, 1))
    output = compute(ctc, model, batch)
    logits = model(batch["inputs"], batch["input_lengths"])
    own = nn.CTCLoss()(
        logits.log_softmax(2).transpose(0, 1),
        batch["targets"],
        torch.tensor(batch["input_lengths"]),
        torch.tensor(batch["target_lengths"]),
    )
    assert torch.equal(output.loss, own)
    assert output.count == 3


def test_two_frames_and_one_label_by_hand() -> None:
    """P(a) = P(a a) + P(a -) + P(- a) with 1/2 each way at each frame: 3/4."""

    class Even(nn.Module):
        def forward(self, inputs: Tensor, lengths: Any) -> Tensor:
            return inputs[..., :2] * 0

    batch = collate([(torch.ones(2, 2), torch.tensor([1]))])
    with torch.no_grad():
        loss = compute(ctc, Even(), batch).loss
    # log_softmax, two products and a logarithm in fp32, each within 2^-24 of a number below 2.
    assert loss.item() == pytest.approx(-torch.tensor(0.75).log().item(), abs=8 * 2.0**-23)


def test_another_blank() -> None:
    model, batch = network(), batch_of((12, 3))
    batch["targets"] = batch["targets"] - 1
    logits = model(batch["inputs"], batch["input_lengths"]).log_softmax(2).transpose(0, 1)
    own = F.ctc_loss(logits, batch["targets"], (12,), (3,), blank=CLASSES - 1)
    assert torch.equal(ctc(model, batch, blank=CLASSES - 1).loss, own)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("mode", "half"), MODES)
def test_how_far_a_sequence_is_padded_does_not_matter(
    mode: str, half: str, bidirectional: bool
) -> None:
    precision = Precision(mode, half)
    model, _ = _prepared(precision, network(bidirectional=bidirectional, layers=2))
    sample, longer = batch_of((7, 2), (15, 3)), batch_of((7, 2))
    with torch.no_grad(), precision.cast():
        beside = model(sample["inputs"], sample["input_lengths"])[0, :7]
        alone = model(longer["inputs"], longer["input_lengths"])[0]
        sample["inputs"][0, 7:] = 99.0  # what stands behind its end
        after = model(sample["inputs"], sample["input_lengths"])[0, :7]
    assert torch.equal(beside, after)
    # Products of other sizes may be summed in another order: 30 sums of at most 15 terms below 4.
    assert torch.allclose(beside.float(), alone.float(), atol=450 * 2.0**-22 + 4 * _unit(alone))


def _unit(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps


def _prepared(precision: Precision, model: nn.Module) -> Any:
    return precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))


@pytest.mark.parametrize(("mode", "half"), MODES)
def test_the_lstm_computes_in_half_and_ctc_in_fp32(mode: str, half: str) -> None:
    precision = Precision(mode, half)
    model, optimizer = _prepared(precision, network())
    states: list[torch.dtype] = []
    model.head.register_forward_pre_hook(lambda _, given: states.append(given[0].dtype))
    with Kernels() as kernels, precision.cast():
        output = compute(ctc, model, batch_of((12, 3), (9, 2)))
    output.loss.backward()
    result = optimizer.step()
    narrow = torch.float32 if mode == "fp32" else HALVES[half]
    given = {kernel.name: kernel.given for kernel in kernels.ran}
    assert states == [narrow]
    assert given["_log_softmax"] == given["_ctc_loss"] == {torch.float32}
    assert output.loss.dtype == output.outputs["logits"].dtype == torch.float32
    assert result is None or not result.skipped
    computes = {row.module: row.compute for row in dtype_map(precision, model)}
    assert computes["lstm"] == computes["head"] == ("float32" if mode == "fp32" else half)


def test_a_batch_that_is_no_such_mapping() -> None:
    with pytest.raises(UserCodeError) as caught:
        compute(ctc, network(), {"inputs": torch.ones(1, 2, 3)})
    assert str(caught.value) == (
        "objective: ctc takes a mapping with inputs, input_lengths, targets, target_lengths, and "
        "the dataset gave a dict of inputs; let its collate make one"
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"hidden": 0}, "model.hidden=0: must be a whole number >= 1"),
        ({"layers": 0}, "model.layers=0: must be a whole number >= 1"),
        ({"dropout": 1.0}, "model.dropout=1.0: must be >= 0 and < 1"),
    ],
)
def test_sizes_out_of_range(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        LSTM(FEATURES, CLASSES, **options)
