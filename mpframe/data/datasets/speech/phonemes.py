"""Speech-like sequences that are generated: strings of labels as noisy frames of features.

Each label has a spectrum of its own, two bumps over the features as vowels have formants. It lasts
for some frames and is loudest in their middle. There is silence before each label, so that a label
said twice can be told from a long one. A sequence is a pure function of (data_seed, part, index),
so none comes from a file.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from mpframe.data.datasets.kept import Kept
from mpframe.data.facts import require_whole
from mpframe.data.keyed_random import keyed_uniform
from mpframe.data.metrics.label_error_rate import LabelErrorRate
from mpframe.data.task import Task
from mpframe.errors import ConfigError
from mpframe.objectives.ctc import ctc

_SHORTEST, _LONGEST, _PAUSE = 3, 8, 4  # frames of a label, and of the longest silence
_WIDTH = 0.06  # standard deviation of a bump, as a share of all features

Array = NDArray[np.float64]
Whole = NDArray[np.int64]


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
    """Sequences for CTC, measured by the label error rate.

    Args:
        train, val, test: sequences in each part, >= 1.
        classes: the labels, and the blank, which is class 0; >= 2.
        features: numbers in a frame, >= 1.
        max_labels: a sequence has 1 to so many, >= 1.
        noise: standard deviation of the noise; a label's spectrum reaches about 1. >= 0, finite.
        data_seed: another one gives other spectra and other sequences. >= 0.
        cache_bytes: keep samples in memory up to this size, in each process that loads.

    Raises:
        ConfigError: an argument is out of its range.
    """
    counts = {"train": train, "val": val, "test": test}
    least = {"classes": 2, "data_seed": 0}
    sizes = {"classes": classes, "features": features, "max_labels": max_labels}
    for name, size in {**counts, **sizes, "data_seed": data_seed}.items():
        require_whole(f"dataset.{name}", size, least.get(name, 1))
    if not 0 <= noise < math.inf:
        raise ConfigError(f"dataset.noise={noise}: must be >= 0 and finite")
    spectra = _spectra(classes, features, data_seed)
    parts = [
        Kept(Phonemes(count, spectra, max_labels, noise, (data_seed, part)), cache_bytes)
        for part, count in enumerate(counts.values())
    ]
    return Task(parts[0], parts[1], ctc, LabelErrorRate, padded, test=parts[2])


class Phonemes(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of frames [T, features] float32 and labels [L] int64, each >= 1; L <= T.

    Args:
        count: how many.
        spectra: of each class [classes, features]; that of the blank is silence.
        max_labels, noise: as for `phonemes`.
        key: whole numbers that decide all sequences.
    """

    def __init__(
        self, count: int, spectra: Array, max_labels: int, noise: float, key: tuple[int, ...]
    ) -> None:
        self._count, self._spectra, self._max_labels = count, spectra, max_labels
        self._noise, self._key = noise, key

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self._count:
            raise IndexError(f"{index}: there are {self._count} sequences")
        (length, *draws) = keyed_uniform(1 + 3 * self._max_labels, *self._key, index, 0)[0]
        said = np.reshape(draws, (3, -1))[:, : 1 + int(length * self._max_labels)]
        labels = 1 + (said[0] * (len(self._spectra) - 1)).astype(np.int64)
        lasts = _SHORTEST + (said[1] * (_LONGEST - _SHORTEST + 1)).astype(np.int64)
        pauses = 1 + (said[2] * _PAUSE).astype(np.int64)
        frames = self._spoken(labels, lasts, pauses)
        even = keyed_uniform(frames.size, *self._key, index, 1).reshape(frames.shape) - 0.5
        frames += self._noise * math.sqrt(12) * even  # even numbers over 1 deviate by 1 / sqrt(12)
        return torch.from_numpy(frames).float(), torch.from_numpy(labels)

    def _spoken(self, labels: Whole, lasts: Whole, pauses: Whole) -> Array:
        """Silence and a label, in turns: [T, features]."""
        spans = pauses + lasts
        begins = np.repeat(np.cumsum(spans) - lasts, spans)  # of the label that a frame belongs to
        place = (np.arange(spans.sum()) - begins + 0.5) / np.repeat(lasts, spans)
        loudness: Array = np.where(place > 0, np.sin(np.pi * place), 0.0)
        spoken: Array = loudness[:, None] * self._spectra[np.repeat(labels, spans)]
        return spoken


def padded(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """A batch of sequences of different lengths, named as torch's CTC loss names its arguments.

    Returns:
        inputs [N, T, features] and targets [N, L], zeros behind the end of each; input_lengths and
        target_lengths as lists of N whole numbers, which stay on the host.
    """
    frames, labels = zip(*samples, strict=True)
    return {
        "inputs": pad_sequence(list(frames), batch_first=True),
        "input_lengths": [len(one) for one in frames],
        "targets": pad_sequence(list(labels), batch_first=True),
        "target_lengths": [len(one) for one in labels],
    }


def _spectra(classes: int, features: int, data_seed: int) -> Array:
    """[classes, features]: two bumps for each label, nothing for the blank."""
    centres = keyed_uniform(2, data_seed, range(classes))[:, :, None]
    places = (np.arange(features) + 0.5) / features
    bumps: Array = np.exp(-0.5 * ((places - centres) / _WIDTH) ** 2).sum(axis=1)
    bumps[0] = 0
    return bumps
