"""How many steps are left to the planned end, from anywhere in a run."""

from mpframe.training.plan import Plan, Progress


def test_a_run_past_its_end_has_no_steps_left_and_a_pass_in_part_counts() -> None:
    assert Plan(epochs=2).steps_left(Progress(epoch=3), 7) == 0
    assert Plan(epochs=2, max_steps=4).steps_left(Progress(steps=6), 7) == 0
    assert Plan(max_steps=4).steps_left(Progress(steps=1, skipped=2), 7) == 3
    numbers = Plan(epochs=9, max_steps=5, accumulate=2).numbers(7)
    assert numbers == {"total_steps": 5, "epochs": 2, "steps_per_epoch": 4}
    other_batches = Plan(epochs=20).numbers(5, Progress(steps=30, epoch=3))
    assert other_batches == {"total_steps": 30 + 17 * 5, "epochs": 23, "steps_per_epoch": 5}
    assert Plan(max_steps=0).numbers(7) == {"total_steps": 1, "epochs": 1, "steps_per_epoch": 7}
