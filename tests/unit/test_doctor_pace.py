"""How long a step waits for its data."""

import pytest

from mpframe.numerics.doctor.speed import Pace


@pytest.mark.parametrize(
    ("workers", "load", "step", "waits"),
    [(0, 0.5, 2.0, 0.5), (0, 2.0, 0.5, 2.0), (2, 0.5, 2.0, 0.0), (2, 2.0, 0.5, 1.5)],
)
def test_workers_load_while_the_step_computes(
    workers: int, load: float, step: float, waits: float
) -> None:
    assert Pace(load, step, workers).waits == waits
