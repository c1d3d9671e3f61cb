"""How many steps are left to the planned end, from anywhere in a run."""

import pytest
import torch
from prepared import Batches, prepared
from torch import nn

from mpframe.core.callback import Callback
from mpframe.training.plan import Plan, Progress


@pytest.mark.parametrize(("accumulate", "max_steps"), [(1, 5), (2, None), (3, 5), (2, 5), (3, 100)])
def test_the_steps_left_are_those_that_follow(accumulate, max_steps) -> None:
    """A skipped step counts for the epochs, and not for `max_steps`. Batches 3 to 5 overflow."""
    values = (torch.inf if 3 <= number <= 5 else 1.0 for number in range(7))
    batches = Batches((torch.full((2, 2), value), torch.ones(2, 1)) for value in values)
    plan, noted = Plan(epochs=3, max_steps=max_steps, accumulate=accumulate), Callback()
    trainer = prepared(nn.Linear(2, 1), nn.MSELoss(), plan=plan, callbacks={"noted": noted})
    progress, seen = trainer.progress, []
    noted.on_step_end = lambda _: seen.append(
        (plan.steps_left(progress, 7), progress.steps, plan.total_steps(7, progress))
    )
    trainer.fit(batches)
    left, steps, totals = zip(*seen, strict=True)
    assert set(totals) == {plan.total_steps(7)}
    first = plan.steps_left(Progress(), 7)
    assert left[-1] == 0 < progress.skipped
    if max_steps == 5:  # One more for each that is skipped.
        assert (first, len(left)) == (5, 5 + progress.skipped)
        assert left == tuple(5 - taken for taken in steps)
    else:
        assert left == tuple(range(first - 1, -1, -1))


def test_a_run_past_its_end_has_no_steps_left_and_a_pass_in_part_counts() -> None:
    assert Plan(epochs=2).steps_left(Progress(epoch=3), 7) == 0
    assert Plan(epochs=2, max_steps=4).steps_left(Progress(steps=6), 7) == 0
    numbers = Plan(epochs=9, max_steps=5, accumulate=2).numbers(7)
    assert numbers == {"total_steps": 5, "epochs": 2, "steps_per_epoch": 4}
    other_batches = Plan(epochs=20).numbers(5, Progress(steps=30, epoch=3))
    assert other_batches == {"total_steps": 30 + 17 * 5, "epochs": 23, "steps_per_epoch": 5}
    assert Plan(max_steps=0).numbers(7) == {"total_steps": 1, "epochs": 1, "steps_per_epoch": 7}
