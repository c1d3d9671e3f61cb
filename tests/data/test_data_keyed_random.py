"""The random numbers are SplitMix64's, uniform, and a function of their key alone."""

import numpy as np
import pytest

from mpframe.data.samples import _mix64, draw_uniforms, hash_key

GAMMA = 0x9E3779B97F4A7C15
MASK = 2**64 - 1


def reference_mix64(z: int) -> int:
    """mix64 in Python's own integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_stream_is_splitmix64() -> None:
    # The first outputs of SplitMix64 seeded with 0, as its reference implementation prints them.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    steps = np.arange(1, 4, dtype=np.uint64) * np.uint64(GAMMA)
    assert _mix64(steps).tolist() == published


@pytest.mark.parametrize("words", [(0,), (1, 2), (2**63 - 1, 7, 3), (-5, 2**64 - 1, 11)])
def test_state_folds_the_words_as_documented(words: tuple[int, ...]) -> None:
    state = 0
    for word in words:
        state = reference_mix64((state + word + GAMMA) & MASK)
    assert hash_key(*words).tolist() == [state]


def test_draws_follow_the_state() -> None:
    state = hash_key(3, 4, 5).tolist()[0]
    bits = [reference_mix64((state + j * GAMMA) & MASK) >> 11 for j in (1, 2, 3)]
    assert draw_uniforms(3, 3, 4, 5).tolist() == [[b * 2.0**-53 for b in bits]]


def test_a_row_depends_on_its_key_alone() -> None:
    together = draw_uniforms(4, 1, 2, list(range(100)))
    for index in (0, 17, 99):
        assert np.array_equal(draw_uniforms(4, 1, 2, [index])[0], together[index])
        assert np.array_equal(draw_uniforms(4, 1, 2, [50, index, 3])[1], together[index])


def test_fewer_draws_are_the_first_of_more() -> None:
    assert np.array_equal(draw_uniforms(2, 9, [4, 5]), draw_uniforms(6, 9, [4, 5])[:, :2])


@pytest.mark.parametrize("axis", ["seed", "epoch", "index"])
def test_uniform_along_every_word_of_the_key(axis: str) -> None:
    n, bins = 20_000, 64
    many = np.arange(n)
    words = {"seed": (many, 1, 2), "epoch": (1, many, 2), "index": (1, 2, many)}[axis]
    values = draw_uniforms(1, *words).ravel()
    assert values.min() >= 0.0
    assert values.max() < 1.0
    counts = np.bincount((values * bins).astype(int), minlength=bins)
    chi2 = ((counts - n / bins) ** 2 / (n / bins)).sum()
    # 63 degrees of freedom: mean 63, deviation sqrt(126) = 11.2; five deviations either side.
    assert abs(chi2 - 63) < 5 * 11.2
    # Neighbours are uncorrelated: r of n pairs has deviation 1/sqrt(n) = 0.0071; five of them.
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 5 / np.sqrt(n)


def test_seed_and_epoch_do_not_trade_places() -> None:
    square = [hash_key(seed, epoch).tolist()[0] for seed in range(50) for epoch in range(50)]
    assert len(set(square)) == 2500
