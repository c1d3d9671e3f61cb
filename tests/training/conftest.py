"""What the tests of compiled steps share."""

import pytest

from mpframe.training.step_record import StepRecord


@pytest.fixture
def op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the records themselves: the same ops, so the same bits."""
    monkeypatch.setattr(StepRecord, "compile", lambda record, inputs: None)
