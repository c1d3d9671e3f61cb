"""Random numbers that are a pure function of their key, such as (seed, epoch, sample).

There is no state to keep, so a sample's augmentation is the same in every process and whatever was
drawn before it. SplitMix64 (Steele, Lea and Flood 2014) adds the odd constant
γ = 0x9E3779B97F4A7C15 to a 64-bit state s for each draw and mixes the sum, all modulo 2^64:

    mix64(z):  z = (z ⊕ (z >> 30)) · 0xBF58476D1CE4E5B9
               z = (z ⊕ (z >> 27)) · 0x94D049BB133111EB
               z ⊕ (z >> 31)
    draw j of a stream:  mix64(s + j γ),  j = 1, 2, ...

A key of several words becomes one state by s <- mix64(s + word + γ) for each word, from s = 0 on.
Everything is computed for a whole batch at once.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

UInt64Array: TypeAlias = NDArray[np.uint64]
Word: TypeAlias = int | Sequence[int] | NDArray[np.integer]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def keyed_state(*words: Word) -> UInt64Array:
    """Fold `words` into 64-bit states.

    Args:
        words: integers of any sign (taken modulo 2^64) or 1-d integer sequences of one length.

    Returns:
        1-d uint64, one state per element of the longest word.
    """
    state = np.zeros(1, dtype=np.uint64)
    for word in words:
        state = _mix64(state + _as_uint64(word) + _GAMMA)
    return state


def keyed_uniform(draws: int, *words: Word) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) of 53 random bits: `draws` for each key, shape [keys, draws]."""
    steps = np.arange(1, draws + 1, dtype=np.uint64) * _GAMMA
    bits = _mix64(keyed_state(*words)[:, None] + steps)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix64(z: UInt64Array) -> UInt64Array:
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    return z ^ (z >> np.uint64(31))


def _as_uint64(word: Word) -> UInt64Array:
    # At least 1-d: numpy wraps arrays silently, as modulo 2^64 wants, but warns for scalars.
    if isinstance(word, int):
        return np.array([word % 2**64], dtype=np.uint64)
    return np.asarray(word, dtype=np.int64).astype(np.uint64)
