"""Speech: generated sequences, CTC beside PyTorch's own, and the label error rate by hand."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from fixtures import refused
from torch import nn
from torch.nn import functional as F
from vocabulary import HALVES, Kernels

from mpframe import Precision
from mpframe.core.errors import UserCodeError
from mpframe.core.objective import NamedObjective
from mpframe.workloads import speech
from mpframe.workloads.speech import LabelErrorRate, collapse, collate, ctc, phonemes

FEATURES, CLASSES = 6, 5


def batch_of(*lengths: tuple[int, int]) -> dict[str, Any]:
    torch.manual_seed(0)
    sizes = [((t, FEATURES), (n,)) for t, n in lengths]
    return collate([(torch.randn(f), torch.randint(1, CLASSES, n)) for f, n in sizes])


def network(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return speech.LSTM(FEATURES, CLASSES, hidden=8, **options)


@pytest.mark.parametrize("blank", [0, CLASSES - 1])
def test_the_loss_is_torchs_own(blank: int) -> None:
    model, batch = network(), batch_of((12, 3), (9, 2), (7, 1))
    batch["targets"] -= int(blank > 0)
    output = ctc(model, batch, blank=blank)
    logits = model(batch["inputs"], batch["input_lengths"]).log_softmax(2).transpose(0, 1)
    lengths = (torch.tensor(batch[f"{of}_lengths"]) for of in ("input", "target"))
    own = F.ctc_loss(logits, batch["targets"], *lengths, blank=blank)
    assert torch.equal(output.loss, own)
    assert output.count == 3


@pytest.mark.parametrize(
    ("mode", "half"), [("fp32", "float16"), ("mixed", "bfloat16"), ("amp", "float16")]
)
def test_the_lstm_computes_in_half_whatever_is_padded_and_ctc_in_fp32(mode: str, half: str) -> None:
    precision, model = Precision(mode, half), network(bidirectional=mode != "amp", layers=2)
    model, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    sample, longer = batch_of((7, 2), (15, 3)), batch_of((7, 2))
    with torch.no_grad(), precision.cast():
        beside = model(sample["inputs"], sample["input_lengths"])[0, :7]
        alone = model(longer["inputs"], longer["input_lengths"])[0]
        sample["inputs"][0, 7:] = 99.0  # what stands behind its end
        after = model(sample["inputs"], sample["input_lengths"])[0, :7]
    assert torch.equal(beside, after)
    # Products of other sizes may be summed in another order: 30 sums of at most 15 terms below 4.
    atol = 450 * 2.0**-22 + 4 * torch.finfo(alone.dtype).eps
    assert torch.allclose(beside.float(), alone.float(), atol=atol)
    states: list[torch.dtype] = []
    model.head.register_forward_pre_hook(lambda _, given: states.append(given[0].dtype))
    with Kernels() as kernels, precision.cast():
        output = NamedObjective("", ctc)(model, batch_of((12, 3), (9, 2)))
    output.loss.backward()
    result = optimizer.step()
    assert result is None or not result.skipped
    given = {kernel.name: kernel.given for kernel in kernels.ran}
    assert states == [torch.float32 if mode == "fp32" else HALVES[half]]
    assert given["_log_softmax"] == given["_ctc_loss"] == {torch.float32}
    assert output.loss.dtype == output.outputs["logits"].dtype == torch.float32


def test_every_label_is_heard_in_its_order_with_silence_between_and_has_one_spectrum() -> None:
    task = phonemes(train=20, val=1, test=1, noise=0.0, max_labels=12)
    for frames, labels in map(task.train.__getitem__, range(20)):
        sounds = frames.abs().sum(dim=1) > 0
        begins = [now and not before for before, now in pairwise([False, *sounds.tolist()])]
        assert sum(begins) == len(labels)
        assert 4 * len(labels) <= len(frames) <= 12 * len(labels)
    task = phonemes(train=100, val=1, test=1, noise=0.0, max_labels=1)
    seen = set()
    for frames, labels in map(task.train.__getitem__, range(100)):
        loudest = frames[frames.sum(dim=1).argmax()]
        seen.add((int(labels[0]), tuple((loudest / loudest.max()).mul(100).round().tolist())))
    assert len(seen) == len({label for label, _ in seen}) == len({own for _, own in seen}) == 16


def test_batches_are_padded_mappings_and_the_lengths_stay_on_the_host() -> None:
    samples = [(torch.ones(2, 3), torch.tensor([4])), (torch.ones(1, 3), torch.tensor([5, 6]))]
    batch = collate(samples)
    assert batch["inputs"].tolist() == [[[1.0] * 3] * 2, [[1.0] * 3, [0.0] * 3]]
    assert batch["targets"].tolist() == [[4, 0], [5, 6]]
    assert (batch["input_lengths"], batch["target_lengths"]) == ([2, 1], [1, 2])
    text = refused(
        UserCodeError, NamedObjective("", ctc), network(), {"inputs": torch.ones(1, 2, 3)}
    )
    assert text.startswith("objective: ctc raised KeyError ('input_lengths')")


def test_what_is_read_of_the_frames_and_how_far_apart_two_readings_are() -> None:
    for classes, blank, labels in (
        ([0, 0, 0], 0, []),
        ([1, 0, 1], 0, [1, 1]),
        ([0, 1, 1, 2, 0, 2, 2, 0], 0, [1, 2, 2]),
        ([2, 0, 0, 2, 0, 1, 2], 2, [0, 0, 1]),
    ):
        assert collapse(classes, blank=blank) == labels
    for first, second, distance in (("", "abc", 3), ("intention", "execution", 5), ("ab", "ba", 2)):
        own = speech.edit_distance
        assert own(first, second) == own(second, first) == distance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_over_batches(dtype: torch.dtype) -> None:
    """2 of 3 labels wrong in the first batch, 1 missing of 2 and none of 1 in the second: 3 / 6."""
    metric = LabelErrorRate()
    assert math.isnan(metric.compute())
    for classes, lengths, labels, targets in (
        ([[1, 0, 2, 3]], [3], [[2, 2, 3]], [3]),
        ([[1, 1, 1], [0, 3, 3]], [3, 2], [[1, 1], [3, 0]], [2, 1]),
    ):
        logits = F.one_hot(torch.tensor(classes), 4).to(dtype)
        wanted = {"labels": torch.tensor(labels), "lengths": targets}
        metric.update({"logits": logits, "lengths": lengths}, wanted)
    assert torch.equal(metric.compute(), torch.tensor(3 / 6, dtype=torch.float64))
