"""Speech-like sequences: generated frames of features, a recurrent network, and CTC.

Each label has its spectrum, two bumps over the features as vowels have formants. It lasts for some
frames and is loudest in their middle. Silence before each label tells a label said twice from a
long one. The objective is connectionist temporal classification (Graves et al. 2006), and the
metric is the share of labels that were read wrongly.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from mpframe.core.objective import StepOutput
from mpframe.core.tree import to_fp32
from mpframe.core.user_code import user_code
from mpframe.data.samples import Generated, draw_uniforms
from mpframe.data.task import Task, require_counts
from mpframe.workloads.images import require_dropout, require_sizes


class LabelErrorRate:
    """Wrong, missing and additional labels over all labels, from 0, which is perfect.

    A model reads the best class of each frame, takes each run of one class once, and leaves out the
    blanks (greedy decoding). The distance from the target is the least number of labels to replace,
    put in or take out (Levenshtein 1966). `blank` is the class of a frame without a label.
    """

    name = "label_error_rate"
    higher_is_better = False

    def __init__(self, blank: int = 0) -> None:
        self._blank = blank
        self._batches: list[tuple[Tensor, Sequence[int], Tensor, Sequence[int]]] = []

    def update(self, outputs: Any, targets: Any) -> None:
        """Keep the best classes of `logits` [N, T, classes], and the targets' `labels` [N, L]."""
        best = outputs["logits"].argmax(dim=2)
        self._batches.append((best, outputs["lengths"], targets["labels"], targets["lengths"]))

    def compute(self) -> Tensor:
        """Return the rate so far, 0-d float64, nan before the first update."""
        wrong = labels = 0
        for best, frames, targets, lengths in self._batches:
            rows = zip(best.tolist(), frames, targets.tolist(), lengths, strict=True)
            for classes, frame_count, target, length in rows:
                read = collapse(classes[:frame_count], self._blank)
                wrong += edit_distance(read, target[:length])
                labels += length
        return torch.tensor(wrong, dtype=torch.float64) / labels


def collapse(classes: Sequence[int], blank: int) -> list[int]:
    """Return the labels that CTC reads from the classes of the frames."""
    before = [blank, *classes]
    return [now for last, now in zip(before, classes, strict=False) if now not in (last, blank)]


def edit_distance(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the least number of items to replace, put in or take out between two sequences."""
    row = list(range(len(second) + 1))
    for number, item in enumerate(first, start=1):
        diagonal, row[0] = row[0], number
        for place, other in enumerate(second, start=1):
            replaced = diagonal + (item != other)
            diagonal, row[place] = row[place], min(replaced, row[place] + 1, row[place - 1] + 1)
    return row[-1]


def ctc(model: nn.Module, batch: Any, blank: int = 0) -> StepOutput:
    """Return the CTC loss of each sequence over its number of labels, averaged over the batch.

    `outputs` for metrics are `logits` [N, T, classes] in fp32 and `lengths`. `targets` are `labels`
    [N, L] and `lengths`.

    Args:
        model: called with `inputs` and `input_lengths`, gives logits [N, T, classes].
        batch: a mapping of inputs [N, T, ...], input_lengths, targets [N, L] and target_lengths.
            The lengths are lists of N whole numbers, so that nothing waits for the device.
        blank: the class of a frame without a label.

    UserCodeError: the model raised.
    """
    inputs, frames = batch["inputs"], batch["input_lengths"]
    labels, lengths = batch["targets"], batch["target_lengths"]
    with user_code("model:", model, inputs=inputs):
        logits = model(inputs, frames)
    log_probs = F.log_softmax(logits, dim=2).transpose(0, 1)
    loss = F.ctc_loss(log_probs, labels, frames, lengths, blank)
    outputs = {"logits": to_fp32(logits), "lengths": frames}
    return StepOutput(loss, outputs, {"labels": labels, "lengths": lengths}, count=len(lengths))


_SHORTEST, _LONGEST, _PAUSE = 3, 8, 4  # frames of a label, and of the longest silence
_WIDTH = 0.06  # standard deviation of a bump, as a share of all features

Array = NDArray[np.float64]


def phonemes(
    train: int = 4000,
    val: int = 400,
    test: int = 400,
    classes: int = 17,
    features: int = 24,
    max_labels: int = 8,
    noise: float = 0.5,
    data_seed: int = 0,
    cache_bytes: int = 2**28,
) -> Task:
    """Return sequences for CTC, measured by the label error rate.

    `noise` is finite and >= 0, `data_seed` >= 0, `classes` >= 2. See conf/dataset/phonemes.yaml.
    """
    require_counts(train=train, val=val, test=test, features=features, max_labels=max_labels)
    require_counts(2, classes=classes)
    require_counts(0, data_seed=data_seed)
    spectra = _make_spectra(classes, features, data_seed)
    parts = [
        Phonemes(spectra, max_labels, count, (data_seed, part), noise, cache_bytes)
        for part, count in enumerate((train, val, test))
    ]
    return Task(parts[0], parts[1], ctc, LabelErrorRate, collate, test=parts[2])


class Phonemes(Generated):
    """Pairs of frames [T, features] float32 and labels [L] int64, each >= 1, with L <= T."""

    def __init__(self, spectra: Array, max_labels: int, *generated: Any) -> None:
        super().__init__(*generated)
        self._spectra, self._max_labels = spectra, max_labels

    def draw(self, index: int) -> tuple[Tensor, Tensor]:
        length, *draws = self.uniforms(1 + 3 * self._max_labels, index, 0)
        said = np.reshape(draws, (3, -1))[:, : 1 + int(length * self._max_labels)]
        labels = 1 + (said[0] * (len(self._spectra) - 1)).astype(np.int64)
        lasts = _SHORTEST + (said[1] * (_LONGEST - _SHORTEST + 1)).astype(np.int64)
        pauses = 1 + (said[2] * _PAUSE).astype(np.int64)
        spans = pauses + lasts  # silence and a label, in turns
        begins = np.repeat(np.cumsum(spans) - lasts, spans)  # of the label that a frame belongs to
        place = (np.arange(spans.sum()) - begins + 0.5) / np.repeat(lasts, spans)
        loudness = np.where(place > 0, np.sin(np.pi * place), 0.0)
        spoken = loudness[:, None] * self._spectra[np.repeat(labels, spans)]
        return self.add_noise(spoken, index), torch.from_numpy(labels)


def collate(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Make a batch of sequences of different lengths, with the names of torch's CTC loss.

    The inputs [N, T, features] and targets [N, L] are zero behind the end of each sequence. The
    lengths are lists of N whole numbers, which stay on the host.
    """
    frames, labels = zip(*samples, strict=True)
    return {
        "inputs": pad_sequence(list(frames), batch_first=True),
        "input_lengths": [len(one) for one in frames],
        "targets": pad_sequence(list(labels), batch_first=True),
        "target_lengths": [len(one) for one in labels],
    }


def _make_spectra(classes: int, features: int, data_seed: int) -> Array:
    """Return [classes, features]: two bumps for each label, nothing for the blank."""
    centres = draw_uniforms(2, data_seed, range(classes))[:, :, None]
    places = (np.arange(features) + 0.5) / features
    bumps: Array = np.exp(-0.5 * ((places - centres) / _WIDTH) ** 2).sum(axis=1)
    bumps[0] = 0
    return bumps


class LSTM(nn.Module):
    """LSTM layers over the frames, and a linear layer on each frame's output.

    The sequences are packed: no step is computed behind the end of one, and the backward direction
    begins at its last frame. So logits do not depend on how far a sequence was padded. See
    conf/model/lstm.yaml.
    """

    def __init__(
        self,
        features: int,
        classes: int,
        hidden: int = 128,
        layers: int = 1,
        bidirectional: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        require_sizes(features=features, classes=classes, hidden=hidden, layers=layers)
        require_dropout(dropout)
        self.lstm = nn.LSTM(features, hidden, layers, batch_first=True, bidirectional=bidirectional)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden * (1 + bidirectional), classes)

    def forward(self, inputs: Tensor, lengths: list[int]) -> Tensor:
        """Return logits [N, T, classes] of inputs [N, T, features], with `lengths` on the host."""
        packed = pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
        packed, length = self.lstm(packed)[0], inputs.shape[1]
        states, _ = pad_packed_sequence(packed, batch_first=True, total_length=length)
        logits: Tensor = self.head(self.dropout(states))
        return logits
