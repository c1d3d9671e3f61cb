"""Whether a resumed run can equal the undisturbed one bit for bit, and if not, why.

It does if it adds the same numbers in the same order: with the same options, torch, number of
threads and device. Options that only watch a run (how often it is logged, saved, validated) do not
count; the schema marks them.
"""

from collections.abc import Mapping
from typing import Any

from mpframe.config.check import flatten
from mpframe.config.schema import only_watches, watching
from mpframe.config.sweep.earlier import ELSEWHERE, changes
from mpframe.errors import CheckpointError

Options = Mapping[str, Any]

# A resumed run takes no first weights. The checkpoint's facts name the device it was made on.
_ELSEWHERE = ELSEWHERE | {"init_from", "init_from_names", "init_from_except"}
_LENGTH = {"trainer.epochs", "trainer.max_steps"}
_STATES = ("optimizer", "scheduler")
_PLATEAU = "ReduceLROnPlateau"  # Fed by validations, and sized by nothing.


def refuse_other_parts(then: Options, now: Options) -> None:
    """Refuse a checkpoint made by another kind of optimizer or schedule.

    Their states are tensors by number: another kind would take them and compute nonsense.

    Args:
        then, now: the resolved options of the checkpoint and of this run.

    Raises:
        CheckpointError: a `_target_` differs.
    """
    for path, (old, new) in _changes(then, now).items():
        if path.startswith(_STATES) and path.endswith("_target_"):
            raise CheckpointError(
                f"made with {path}={old}, and this run has {new}; "
                "resume with the same, or take the weights alone with init_from"
            )


def differences(then: Options, now: Options) -> list[str]:
    """The options because of which the resumed run will not equal the undisturbed one.

    Args:
        then, now: the resolved options of the checkpoint and of this run.

    Returns:
        `option=value (was value)` each.
    """
    changes, saved = _changes(then, now), _in_saved_state(now)
    passed_over = _passed_over(_schedule_of(now))
    return [
        f"{path}={new} (was {old})"
        for path, (old, new) in changes.items()
        if path not in passed_over and not path.startswith(saved) and not _aside(path)
    ]


def _schedule_of(options: Options) -> str:
    return str(flatten(options).get("scheduler._target_", ""))


def _in_saved_state(now: Options) -> tuple[str, ...]:
    """The sections whose saved options count; other schedules follow the new ones."""
    return _STATES if _schedule_of(now).endswith(_PLATEAU) else _STATES[:1]


def _aside(path: str) -> bool:
    """Whether an option belongs to a callback that only watches, or only ends a run."""
    return path.startswith(("callbacks.early_stopping", "metrics.", "init_from_names.")) or (
        path.startswith("callbacks.") and only_watches(path)
    )


def _passed_over(schedule: str) -> set[str]:
    """The options that change none of a run's numbers under its schedule, a `_target_` or ""."""
    if schedule.endswith(_PLATEAU):
        return (watching() | _ELSEWHERE | _LENGTH) - {"trainer.eval_every", "trainer.monitor"}
    return watching() | _ELSEWHERE | (set() if schedule else _LENGTH)


def carried_over(then: Options, now: Options) -> list[str]:
    """The options that do not count, because the saved state has its own.

    Returns:
        `option=value (goes on with value)` each.
    """
    changes, saved = _changes(then, now), _in_saved_state(now)
    return [
        f"{path}={new} (goes on with {old})"
        for path, (old, new) in changes.items()
        if path.startswith(saved)
    ]


def other_arithmetic(then: Any, now: Mapping[str, Any]) -> list[str]:
    """What differs between two `environment.arithmetic`: `fact=value (was value)` each."""
    if not isinstance(then, Mapping):
        return []  # A checkpoint may hold anything there.
    return [f"{k}={now[k]} (was {then[k]})" for k in now if k in then and then[k] != now[k]]


def _changes(then: Options, now: Options) -> dict[str, tuple[str, str]]:
    # Without options it was saved in a loop of the user's own.
    return changes(then, now) if then and now else {}
