"""Word Jaccard of found spans: chosen tokens and values, worked out by hand."""

import math

import pytest
import torch

from mpframe.workloads.text.tweets import WordJaccard, best_spans, jaccard

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize(
    ("found", "true", "value"),
    [
        ("a good day", "a good day", 1.0),
        ("Good  DAY", "good day", 1.0),
        ("a good day", "good", 1 / 3),
        ("no no no", "no way", 1 / 2),
        ("one", "two", 0.0),
        ("", "two", 0.0),
        ("", " ", 1.0),
    ],
)
def test_jaccard(found: str, true: str, value: float) -> None:
    assert jaccard(found, true) == value


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_best_span_begins_before_it_ends(dtype: torch.dtype) -> None:
    # Apart the best are start 2 and end 1; of the pairs s <= e, 1 to 1 has 3 + 5, 2 to 3 has 4 + 2.
    start = torch.tensor([[9.0, 3.0, 4.0, 0.0], [0.0, 1.0, 0.0, 0.0]], dtype=dtype)
    end = torch.tensor([[9.0, 5.0, 0.0, 2.0], [0.0, 0.0, 0.0, 1.0]], dtype=dtype)
    allowed = torch.tensor([[False, True, True, True], [True, True, True, False]])
    # In row 2 token 3 is not the text's; 1 to 1 and 1 to 2 are equal, and the first one counts.
    assert best_spans(start, end, allowed).tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_over_uneven_batches(dtype: torch.dtype) -> None:
    metric = WordJaccard()
    offsets = torch.tensor([[[-1, -1], [0, 1], [2, 6], [7, 10]]])
    logits = torch.zeros(3, 4, dtype=dtype)
    start, end = logits.clone(), logits.clone()
    start[:, 1], end[0, 1], end[1, 2], end[2, 3] = 2.0, 2.0, 2.0, 2.0  # a | a good | a good day
    both = {"start_logits": start, "end_logits": end}
    texts = {"text": ["a good day"] * 3, "selected": ["a good day"] * 3}
    for rows in (slice(0, 1), slice(1, 3)):
        metric.update(
            {name: values[rows] for name, values in both.items()},
            {
                "offsets": offsets.expand(3, 4, 2)[rows],
                **{name: values[rows] for name, values in texts.items()},
            },
        )
    # The sum of 1/3, 2/3 and 1 in float64.
    assert metric.compute().item() == pytest.approx(2 / 3, rel=1e-15)
    assert metric.compute().dtype == torch.float64


def test_before_the_first_batch_it_is_nan() -> None:
    assert math.isnan(WordJaccard().compute().item())
